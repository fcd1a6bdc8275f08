"""Data about files: entries of a workspace, and uploads."""

from dataclasses import dataclass
from typing import Literal

from sbx.errors import BadRequest

Kind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True)
class FileEntry:
    """One entry of a directory. Bytes of a name that are not UTF-8 are shown as `\\xNN`.

    `path` is absolute in the view of code inside. `size` is in bytes and only set for regular
    files. `modified_s` is in seconds of the epoch. FIFOs, sockets and devices are `other`.
    """

    name: str
    path: str
    kind: Kind
    size: int | None
    modified_s: float


class Listing(list[FileEntry]):
    """Entries by path. `complete` is False if the limit or an unreadable directory shortened it."""

    complete: bool = True


@dataclass(frozen=True)
class Upload:
    """`path` is in the view of code inside, `size` in bytes, `uploaded_at` in seconds of the
    epoch."""

    name: str
    size: int
    sha256: str
    path: str
    uploaded_at: float


@dataclass(frozen=True)
class Match:
    """A line that matched. `line` and `column` count from 1, the column in characters.

    `text` is the line, or its beginning if it is long.
    """

    path: str
    line: int
    column: int
    text: str


class Matches(list[Match]):
    """Matches by path and line.

    `complete` is False if a limit of matches, bytes, entries or time ended the search, or if
    something could not be read. `files` is the number of files that were read. `skipped` is the
    number of files that were not read, because they are not text, too large or not readable.
    """

    complete: bool = True
    files: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Copied:
    """The result of a copy: its `files` and `bytes`.

    `complete` is False if an entry was left out, because it is not a file, directory or symlink, or
    could not be read.
    """

    files: int
    bytes: int
    complete: bool


ChangeKind = Literal["started", "created", "modified", "deleted", "overflow"]


@dataclass(frozen=True)
class FileEvent:
    """A change at `path`. `started` comes first: every later change is reported.

    A rename is a `deleted` and a `created`. `overflow` means that more changed than could be
    reported, or that there are more directories than are watched. The client should then list the
    files again.
    """

    kind: ChangeKind
    path: str


@dataclass(frozen=True)
class Unpacked:
    """The result of unpacking an archive: its `entries`, and the `bytes` of their content.

    `skipped` entries were left out: links or names that lead out of the directory, and devices.
    """

    entries: int
    bytes: int
    skipped: int


@dataclass(frozen=True)
class PartialUpload:
    """An upload in pieces that is not finished: `offset` bytes of `size` have arrived.

    It is deleted `expires_in_s` seconds after its last piece. A piece has at most `piece_max`
    bytes.
    """

    id: str
    path: str
    size: int
    offset: int
    piece_max: int
    expires_in_s: float


def decode_text(path: str, content: bytes) -> str:
    """Return the text of a file. Raise BadRequest `not_text` if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            f"{path} is not UTF-8 text ({len(content)} bytes)",
            code="not_text",
            hint="use read_bytes",
        ) from None
