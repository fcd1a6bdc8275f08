"""Write a file chunk by chunk, and read an open file."""

import contextlib
import os
import secrets
import stat
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from sbx.linux import quota
from sbx.linux.descriptors import OwnedDescriptor, closing
from sbx.linux.renameat2 import rename_new
from sbx.workspace.errors import is_a_directory, not_a_file, translated, wrong_path
from sbx.workspace.safe_open import Opener

CHUNK = 1 << 20  # bytes

Owner = tuple[int, int]  # uid and gid on the host

T = TypeVar("T")

# A file that is received chunk by chunk, for a source that must not block a thread while it waits.
# Send None to begin, then each chunk, then None to end. The generator returns the outcome. If it is
# closed before the end, or an error occurs, nothing of the file remains.
FileWriter = Generator[None, bytes | None, T]


def drive(intake: FileWriter[T], chunks: Iterable[bytes]) -> T:
    """Send all of `chunks` to `intake`, and return its outcome."""
    with contextlib.closing(intake):
        try:
            intake.send(None)
            for chunk in chunks:
                intake.send(chunk)
            intake.send(None)
        except StopIteration as end:
            outcome: T = end.value
            return outcome
    raise AssertionError("an intake continues after its end")


def read_chunks(fd: int) -> Iterator[bytes]:
    """Yield the rest of an open file. Raise OSError."""
    while chunk := os.read(fd, CHUNK):
        yield chunk


class ReceivedFile(Struct, frozen=True):
    """A complete file with a temporary name in the directory `staging`, and its SHA-256."""

    staging: int
    name: str
    sha256: str

    def chunks(self) -> Iterator[bytes]:
        """Yield the content. Raise OSError."""
        with closing(os.open(self.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.staging)) as fd:
            yield from read_chunks(fd)


class StagedFile:
    """A file with a random temporary name until `commit` gives it its real name in one step.

    Leaving the context without a commit unlinks it, and a file with the real name stays unchanged.
    Its directory should be one that the code inside never sees. If the code sees the directory, it
    may replace the temporary file. So it can only forge content that it could have written itself.
    """

    def __init__(
        self, directory: int, *, beside: int | None = None, received: ReceivedFile | None = None
    ) -> None:
        """Create the file, or open a file that was `received` in this directory, which remains
        there without a commit. With `beside`, charge it to the quota of that directory."""
        self._directory = directory
        self._is_new = received is None
        self._name: str | None = received.name if received else f".sbx-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NOCTTY
        if self._is_new:
            flags |= os.O_CREAT | os.O_EXCL
        self.fd = os.open(self._name, flags, 0o600, dir_fd=directory)
        self.size = os.fstat(self.fd).st_size
        if beside is not None:
            quota.join(self.fd, beside)

    def write(self, data: bytes) -> None:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(self.fd, remaining) :]
        self.size += len(data)

    def commit(
        self,
        parent: int,
        name: bytes,
        *,
        mode: int,
        owner: Owner | None,
        new: bool = False,
        sync: bool = True,
    ) -> None:
        """Rename the file to `name` in the directory `parent`.

        A file or symlink of that name is replaced. With `new`, it raises FileExistsError.
        """
        assert self._name is not None
        if owner is not None:
            os.fchown(self.fd, *owner)
        os.fchmod(self.fd, mode & 0o777)
        if sync:
            os.fsync(self.fd)
        temporary = os.fsencode(self._name)
        if new:
            rename_new(self._directory, temporary, parent, name)
        else:
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=parent)
        self._name = None
        if sync:
            os.fsync(parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.fd)
        if self._name is not None and self._is_new:
            try:
                os.unlink(self._name, dir_fd=self._directory)
            except OSError:
                # The code inside replaced or removed the file, or the disk fails. There is nothing
                # to clean up, and the original error is more useful.
                self._name = None


class OpenFile(OwnedDescriptor):
    """A regular file that is open for reading. `size` is its size when it was opened.

    `path` is its path as the code inside saw it then. Reads use positions, so several ranges may be
    read in turn. Bytes appended later are not read. A file that shrinks returns less than `size`
    bytes.
    """

    def __init__(self, fd: int, path: str, size: int, modified_s: float) -> None:
        super().__init__(fd)
        self.path = path
        self.size = size
        self.modified_s = modified_s

    def chunks(self, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield `length` bytes from `start`, or all, in pieces of at most CHUNK bytes."""
        end = self.size if length is None else min(self.size, start + length)
        while start < end:
            piece = os.pread(self.fd, min(CHUNK, end - start), start)
            if not piece:
                return
            yield piece
            start += len(piece)


def open_regular(
    opener: Opener, root: int, relative: tuple[str, ...], *, shown: str, owner_uid: int
) -> OpenFile:
    """Open a regular file beneath `root`. Refuse any other node without opening it.

    First open it with O_PATH, because opening a FIFO or a device can block or have effects. Then
    open it for reading and check it again, because the name may lead to another file by now. With
    O_NONBLOCK, a lease of the code inside (fcntl(2), F_SETLEASE) does not stall the host for
    `lease-break-time`.
    """
    with translated(shown):
        with closing(opener(root, relative, os.O_PATH)) as fd:
            _check(os.fstat(fd), shown, owner_uid)
        fd = opener(root, relative, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        _check(status, shown, owner_uid)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(fd, shown, status.st_size, status.st_mtime)


def _check(status: os.stat_result, shown: str, owner_uid: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise is_a_directory(shown)
    if not stat.S_ISREG(status.st_mode):
        raise not_a_file(shown)
    if status.st_nlink > 1 and status.st_uid != owner_uid:
        # A hard link to a file of another owner: it may be a file of the host.
        raise wrong_path(shown, "hardlink", "is a hard link to a file of another owner")
