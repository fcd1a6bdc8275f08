"""What a command would change: shown to a person before it is done, or told after an undo."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

REHEARSALS_MAX = 4  # of one conversation at a time
CHECKPOINTS_MAX = 4
LIFETIME_S = 600.0  # of a rehearsal
CHANGES_MAX = 200  # that are told one by one

ChangeKind = Literal["added", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of one file. Sizes in bytes, None for a side without a file.

    `diff` is a unified diff of a text, cut where it is long. Above it, it has the mode that changed
    or that a new file has, and in its place the target of a symlink or the reason why the content
    is not shown: `content not shown: binary`. A byte that is not UTF-8 is written as `\\xff`. None
    where only the time changed, or a file is empty.

    `path` is absolute, as the code inside sees it; that of a directory ends with `/`. It is for a
    person to read: characters that cannot be seen, or move others, are written by their numbers,
    and a backslash is doubled.
    """

    path: str
    kind: ChangeKind
    size_before: int | None
    size_after: int | None
    diff: str | None = None


def to_json(change: FileChange) -> dict[str, Any]:
    return asdict(change)


def from_json(told: Mapping[str, Any]) -> FileChange:
    """Raises KeyError, ValueError for what is none."""
    if told["kind"] not in ("added", "changed", "removed"):
        raise ValueError(f"no file is {str(told['kind'])[:80]!r}")
    return FileChange(
        str(told["path"]),
        told["kind"],
        _size(told["size_before"]),
        _size(told["size_after"]),
        None if told["diff"] is None else str(told["diff"]),
    )


def _size(told: object) -> int | None:
    if told is not None and not isinstance(told, int):
        raise ValueError("a size is a number")
    return told
