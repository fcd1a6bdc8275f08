"""Questions of a front end about code: completions, documentation, whether it is whole.

Completions are of a name, an attribute, a key or a path, as ipykernel returns them.

IPython evaluates the code before the cursor, as far as that has no effects. jedi also infers the
result of calls, but it takes 200 ms to seconds. So it is asked only if IPython finds nothing.
"""

# IPython is typed only in part.
# mypy: disable-error-code="misc,no-untyped-call,union-attr,no-any-return,arg-type"

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from sbx.guest.kernel.shell import SandboxShell

_MATCHES_MAX = 10_000
_CACHE = "/tmp/.cache/jedi"  # noqa: S108  # of the jail
_NAMES = frozenset(
    f"IPCompleter.{matcher}"
    for matcher in ("python_matcher", "python_func_kw_matcher", "custom_completer_matcher")
)


async def complete(shell: SandboxShell, content: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a `complete_request`."""
    from IPython.core.completer import JEDI_INSTALLED

    code = str(content.get("code", ""))
    position = content.get("cursor_pos")
    position = len(code) if position is None else int(position)
    items = _items(shell, code, position)
    if not items and JEDI_INSTALLED:
        with _with_jedi(shell):
            items = _items(shell, code, position)
    return {
        "status": "ok",
        "matches": [item["text"] for item in items],
        "cursor_start": items[0]["start"] if items else position,
        "cursor_end": items[0]["end"] if items else position,
        "metadata": {"_jupyter_types_experimental": items},
    }


def _items(shell: SandboxShell, code: str, position: int) -> list[dict[str, Any]]:
    """Return the completions, names first. All of them have the same start and end."""
    from IPython.core.completer import provisionalcompleter, rectify_completions

    with provisionalcompleter():
        candidates = shell.Completer.completions(code, position)
        matches = list(islice(rectify_completions(code, candidates), _MATCHES_MAX))
    # An attribute begins with its dot, which is in the code already.
    dots = int(bool(matches) and all(item.text.startswith(".") for item in matches))
    dots = dots if matches and code[matches[0].start :].startswith(".") else 0
    matches.sort(key=lambda item: _order(item.text[dots:]) if item._origin in _NAMES else _LAST)
    return [
        {
            "start": item.start + dots,
            "end": item.end,
            "text": item.text[dots:],
            "type": item.type,
            "signature": item.signature,
        }
        for item in matches
    ]


_LAST = (True, True, True, "")


def _order(text: str) -> tuple[bool, bool, bool, str]:
    """Return the key of the order in which jedi has names: private ones follow the others."""
    return text.startswith("%"), text.startswith("__"), text.startswith("_"), text.lower()


@contextmanager
def _with_jedi(shell: SandboxShell) -> Iterator[None]:
    """Let the completer ask jedi. Its cache is in the tmpfs of the jail: the workspace belongs to
    the user."""
    if shell.walls:
        settings: Any = import_module("jedi.settings")  # jedi is a requirement of IPython
        settings.cache_directory = _CACHE
    shell.Completer.use_jedi = True
    try:
        yield
    finally:
        shell.Completer.use_jedi = False


async def inspect(shell: SandboxShell, content: dict[str, Any]) -> dict[str, Any]:
    """Return the documentation of the name at a position."""
    name = token_at_cursor(str(content.get("code", "")), int(content.get("cursor_pos", 0)))
    level = int(content.get("detail_level") or 0)
    try:
        data = shell.object_inspect_mime(name, detail_level=level)
    except KeyError:
        return {"status": "ok", "found": False, "data": {}, "metadata": {}}
    return {"status": "ok", "found": True, "data": data, "metadata": {}}


async def is_complete(shell: SandboxShell, content: dict[str, Any]) -> dict[str, Any]:
    """Return whether the code is a whole cell."""
    status, indent = shell.check_complete(str(content.get("code", "")))
    return {"status": status, "indent": indent if status == "incomplete" else ""}
