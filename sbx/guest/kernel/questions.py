"""Questions of a front end about code, which run none of it: completions, documentation."""

# IPython is typed only in part; only our side of it is checked here.
# mypy: disable-error-code="no-untyped-call,union-attr,no-any-return,arg-type"

from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from sbx.guest.kernel.shell import SandboxShell


async def complete(shell: SandboxShell, content: dict[str, Any]) -> dict[str, Any]:
    """Return the completions at a position."""
    from sbx.guest.kernel import completions  # loads the completer of IPython

    code = str(content.get("code", ""))
    position = content.get("cursor_pos")
    position = len(code) if position is None else int(position)
    return completions.complete(shell, code, position)


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
