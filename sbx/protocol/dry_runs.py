"""The changes of a command: shown to a user before they are applied, or reported after an undo."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sbx.protocol.fields import read_fields

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


def from_json(data: Any) -> FileChange:
    """Return the change. Ignore unknown fields. Raise ValueError for invalid data."""
    return read_fields(FileChange, data)
