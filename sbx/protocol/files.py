"""What is told of files: entries of a workspace, and uploads."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True)
class Entry:
    """What a name stands for. Bytes of a name that are no UTF-8 are shown as `\\xNN`.

    `path` is absolute, as the code inside sees it; `size` in bytes, of regular files only;
    `modified_s` in seconds of the epoch. FIFOs, sockets and devices are `other`.
    """

    name: str
    path: str
    kind: Kind
    size: int | None
    modified_s: float


class Listing(list[Entry]):
    """Entries by path; `complete` is False where the limit or an unreadable directory cut it."""

    complete: bool = True


@dataclass(frozen=True)
class Upload:
    """`path` as the code inside sees it, `size` in bytes, `uploaded_at` in seconds of the epoch."""

    name: str
    size: int
    sha256: str
    path: str
    uploaded_at: float


@dataclass(frozen=True)
class Match:
    """A line that matched. `line` and `column` count from 1, the column in characters; `text` is
    the line, its beginning where it is long."""

    path: str
    line: int
    column: int
    text: str


class Matches(list[Match]):
    """Matches by path and line.

    `complete` is False where a limit of matches, bytes, entries or time cut the search, or
    something could not be read; `files` is how many were read, `skipped` how many were not: files
    that are not text, too large or not readable.
    """

    complete: bool = True
    files: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Copied:
    """What a copy took: `files` and `bytes`. Not `complete`: something was left out, because it is
    no file, directory or symlink, or could not be read."""

    files: int
    bytes: int
    complete: bool


ChangeKind = Literal["started", "created", "modified", "deleted", "overflow"]


@dataclass(frozen=True)
class Change:
    """Something changed at `path`. `started` comes first: from then on everything is told.

    A rename is a `deleted` and a `created`. `overflow`: more changed than could be told, or there
    are more directories than are watched; list again what matters.
    """

    kind: ChangeKind
    path: str


@dataclass(frozen=True)
class Unpacked:
    """What an archive brought: `entries`, and `bytes` of their content. `skipped` entries were left
    out: links that lead out, devices, names that lead out."""

    entries: int
    bytes: int
    skipped: int


@dataclass(frozen=True)
class PartialUpload:
    """An upload that is on its way in pieces: `offset` bytes of `size` are here. It is forgotten
    `expires_in_s` seconds after its last piece. A piece has at most `piece_max` bytes."""

    id: str
    path: str
    size: int
    offset: int
    piece_max: int
    expires_in_s: float
