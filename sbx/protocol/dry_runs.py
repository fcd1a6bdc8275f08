"""The changes of a command: shown to a user before they are applied, or reported after an undo."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

DRY_RUNS_MAX = 4  # of one conversation at a time
CHECKPOINTS_MAX = 4
LIFETIME_S = 600.0  # of a dry run
CHANGES_MAX = 200  # that are listed individually

ChangeKind = Literal["added", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of one file. Sizes are in bytes, and None for a side without a file.

    `diff` is a unified diff of a text file, cut if it is long. A line above the diff has the mode,
    if it changed or the file is new. For a symlink, `diff` has its target instead. If the content
    is not shown, it has the reason: `content not shown: binary`. A byte that is not UTF-8 is
    written as `\\xff`. `diff` is `None` if only the time changed, or if a file is empty.

    `path` is absolute in the view of code inside; that of a directory ends with `/`. It is meant
    for display: characters that are invisible, or that reorder others, are written by their
    numbers, and a backslash is doubled.
    """

    path: str
    kind: ChangeKind
    size_before: int | None
    size_after: int | None
    diff: str | None


def to_json(change: FileChange) -> dict[str, Any]:
    return asdict(change)


def from_json(data: Mapping[str, Any]) -> FileChange:
    """Return the change. Raise KeyError or ValueError for invalid data."""
    if data["kind"] not in ("added", "changed", "removed"):
        raise ValueError(f"unknown kind of a file change: {str(data['kind'])[:80]!r}")
    return FileChange(
        str(data["path"]),
        data["kind"],
        _size(data["size_before"]),
        _size(data["size_after"]),
        None if data["diff"] is None else str(data["diff"]),
    )


def _size(value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise ValueError("a size must be a number")
    return value
