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
