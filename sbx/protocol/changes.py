"""A setting of a conversation: which of an agent's file changes in a project need an approval.

    ask           every change of the project's files is shown as a diff and waits for a yes
    ask_outside   the same, except for changes below these directories of the project
    budgets       the same, except for a call that changes a few files below a directory
    allow         every change is applied at once

A call that changes no file never needs this approval.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sbx.errors import BadRequest

ChangesMode = Literal["ask", "allow"]
PREFIXES_MAX = 50
FILES_MAX = 100_000
TRIALS_MAX = 4  # copies of a project on which the commands of one conversation run at once
_BUDGETS = "budgets"
_PREFIX_MAX = 1000  # characters
_WORKSPACE = "/workspace"


@dataclass(frozen=True, slots=True)
class ChangeBudget:
    """The changes that one call may make without a question: at most `files` paths at or `below` a
    directory, None for any number. A removal, also of a file that becomes a directory, needs
    `deletions`. New directories count too. `below` is relative to the project; "" is all of it."""

    below: str
    files: int | None
    deletions: bool = False


@dataclass(frozen=True, slots=True)
class ChangesSetting:
    """`ask_outside` are directories relative to the project, without a trailing slash.

    They and the `budgets` have an effect only if `mode` is `ask`.
    """

    mode: ChangesMode = "ask"
    ask_outside: tuple[str, ...] = ()
    budgets: tuple[ChangeBudget, ...] = ()

    @property
    def allowances(self) -> tuple[ChangeBudget, ...]:
        """The changes that need no approval. Those of `ask_outside` are unlimited."""
        unlimited = (ChangeBudget(below, None, deletions=True) for below in self.ask_outside)
        return (*unlimited, *self.budgets)


def checked_prefixes(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return the directories in canonical form, relative to the project.

    Raise BadRequest `invalid_prefix` for a path that is the project itself or leads out of it.
    """
    checked = tuple(dict.fromkeys(_checked(prefix) for prefix in prefixes))
    if len(checked) > PREFIXES_MAX:
        raise _invalid(f"ask_outside names at most {PREFIXES_MAX} directories")
    return checked


def checked_budgets(budgets: Iterable[ChangeBudget]) -> tuple[ChangeBudget, ...]:
    """Return the budgets with their directories in canonical form; "." becomes "".

    Raise BadRequest `invalid_prefix`, also for `files` below 1 and for two budgets of a directory.
    """
    checked = {}
    for budget in budgets:
        whole = budget.below.strip() in (".", "./", _WORKSPACE, f"{_WORKSPACE}/")
        below = "" if whole else _checked(budget.below, _BUDGETS)
        if budget.files is not None and not 1 <= budget.files <= FILES_MAX:
            raise _invalid(
                f"a budget is for 1 to {FILES_MAX} files, not {budget.files}", field=_BUDGETS
            )
        if below in checked:
            raise _invalid(f"two budgets are for {below or 'the project'!r}", field=_BUDGETS)
        checked[below] = replace(budget, below=below)
    if len(checked) > PREFIXES_MAX:
        raise _invalid(f"a conversation has at most {PREFIXES_MAX} budgets", field=_BUDGETS)
    return tuple(checked.values())


def parse_budget(text: str) -> ChangeBudget:
    """Parse `DIR:FILES` or `DIR:FILES:deletions`. Raise BadRequest `invalid_prefix`."""
    match = re.fullmatch(r"(.+?):([0-9]{1,6})(:deletions)?", text)
    if match is None:
        raise _invalid(
            f"{text[:200]!r} is not a budget", 'such as "tests:5" or "tests:5:deletions"', _BUDGETS
        )
    return ChangeBudget(match[1], int(match[2]), deletions=match[3] is not None)


def _checked(prefix: str, field: str = "ask_outside") -> str:
    path = prefix.strip()
    if path == _WORKSPACE or path.startswith(f"{_WORKSPACE}/"):
        path = path.removeprefix(_WORKSPACE).lstrip("/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not path.isprintable() or len(path) > _PREFIX_MAX:
        raise _invalid(f"{prefix[:200]!r} is not a directory of the project", field=field)
    if not parts:
        raise _invalid(f"{prefix[:200]!r} is the whole project", 'use changes = "allow"', field)
    return "/".join(parts)


def _invalid(
    sentence: str,
    hint: str = 'name directories of the project, such as "tests/"',
    field: str = "ask_outside",
) -> BadRequest:
    return BadRequest(sentence, code="invalid_prefix", hint=hint, details={"field": field})
