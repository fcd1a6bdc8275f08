"""A setting of a conversation: which of an agent's file changes in a project need an approval.

    ask           every change of the project's files is shown as a diff and waits for a yes
    ask_outside   the same, except for changes below these directories of the project
    allow         every change is applied at once

A call that changes no file never needs this approval.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sbx.errors import BadRequest

ChangesMode = Literal["ask", "allow"]
PREFIXES_MAX = 50
_PREFIX_MAX = 1000  # characters
_WORKSPACE = "/workspace"


@dataclass(frozen=True, slots=True)
class ChangesSetting:
    """`ask_outside` are directories relative to the project, without a trailing slash.

    They have an effect only if `mode` is `ask`.
    """

    mode: ChangesMode = "ask"
    ask_outside: tuple[str, ...] = ()


def checked_prefixes(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return the directories in canonical form, relative to the project.

    Raise BadRequest `invalid_prefix` for a path that is the project itself or leads out of it.
    """
    checked = tuple(dict.fromkeys(_checked(prefix) for prefix in prefixes))
    if len(checked) > PREFIXES_MAX:
        raise _invalid(f"ask_outside names at most {PREFIXES_MAX} directories")
    return checked


def _checked(prefix: str) -> str:
    path = prefix.strip()
    if path == _WORKSPACE or path.startswith(f"{_WORKSPACE}/"):
        path = path.removeprefix(_WORKSPACE).lstrip("/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not path.isprintable() or len(path) > _PREFIX_MAX:
        raise _invalid(f"{prefix[:200]!r} is not a directory of the project")
    if not parts:
        raise _invalid(f"{prefix[:200]!r} is the whole project", 'use changes = "allow"')
    return "/".join(parts)


def _invalid(
    sentence: str, hint: str = 'name directories of the project, such as "tests/"'
) -> BadRequest:
    return BadRequest(sentence, code="invalid_prefix", hint=hint, details={"field": "ask_outside"})
