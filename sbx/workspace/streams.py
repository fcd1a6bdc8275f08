"""A file on its way in, and a file on its way out."""

import os
import secrets
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Self, TypeVar

from sbx.linux import quota
from sbx.linux.renameat2 import rename_new
from sbx.workspace.beneath import Opener
from sbx.workspace.refusals import is_a_directory, not_a_file, translated, wrong_path

CHUNK = 256 * 1024  # bytes

Owner = tuple[int, int]  # uid and gid on the host

T = TypeVar("T")

# A file taken in a step at a time, for a source that must not block a thread while it waits: send
# None to begin, then each chunk, then None to end; what it returns is the outcome. Closed before
# its end, or after any error, it leaves nothing.
Intake = Generator[None, bytes | None, T]


def drive(intake: Intake[T], chunks: Iterable[bytes]) -> T:
    """Feed all of `chunks` to `intake`; its outcome."""
    with closing(intake):
        try:
            intake.send(None)
            for chunk in chunks:
                intake.send(chunk)
            intake.send(None)
        except StopIteration as end:
            outcome: T = end.value
            return outcome
    raise AssertionError("an intake goes on after its end")


class StagedFile:
    """A file under a random temporary name, until `commit` gives it its real one in one step.

    Left without a commit it is unlinked, and what had the real name before is untouched. Its
    directory is best one that the code inside never sees; where it is, the code may swap the
    temporary file and so forge what it could have written itself, and no more.
    """

    def __init__(self, directory: int, *, beside: int | None = None) -> None:
        """`beside`: a directory whose quota it is charged to, instead of that of its own."""
        self._directory = directory
        self._name: str | None = f".sbx-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NOCTTY
        self.fd = os.open(self._name, flags, 0o600, dir_fd=directory)
        self.size = 0
        if beside is not None:
            quota.join(self.fd, beside)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fd, rest) :]
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
        """Make it `name` in the directory `parent`, replacing a file or symlink of that name; with
        `new` that raises FileExistsError."""
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
        if self._name is not None:
            try:
                os.unlink(self._name, dir_fd=self._directory)
            except OSError:
                # Swapped or removed by the code inside, or a failing disk: there is nothing of
                # ours left to clean, and the error that brought us here says more.
                self._name = None


class OpenFile:
    """A regular file held open for reading: it gives at most the `size` it had when opened.

    `path` is where the code inside saw it then. Reads by position, so several ranges may be read
    in turn. A file that grows meanwhile is not followed, and one that shrinks gives less than
    `size`.
    """

    def __init__(self, fd: int, path: str, size: int, modified_s: float) -> None:
        self.fd = fd
        self.path = path
        self.size = size
        self.modified_s = modified_s

    def chunks(self, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes from `start`, `length` of them or all, in pieces of at most CHUNK."""
        end = self.size if length is None else min(self.size, start + length)
        while start < end:
            piece = os.pread(self.fd, min(CHUNK, end - start), start)
            if not piece:
                return
            yield piece
            start += len(piece)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_regular(
    opener: Opener, root: int, relative: tuple[str, ...], *, shown: str, owner_uid: int
) -> OpenFile:
    """Open a regular file beneath `root`; everything that is not one is refused, unopened.

    First by O_PATH, because opening a FIFO or a device can block or act; then for real and looked
    at again, because the name may lead to another file by now. O_NONBLOCK also keeps a lease held
    inside (fcntl(2), F_SETLEASE) from stalling the host for `lease-break-time`.
    """
    with translated(shown):
        fd = opener(root, relative, os.O_PATH)
        try:
            _check(os.fstat(fd), shown, owner_uid)
        finally:
            os.close(fd)
        fd = opener(root, relative, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(fd)
        _check(found, shown, owner_uid)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(fd, shown, found.st_size, found.st_mtime)


def _check(found: os.stat_result, shown: str, owner_uid: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise is_a_directory(shown)
    if not stat.S_ISREG(found.st_mode):
        raise not_a_file(shown)
    if found.st_nlink > 1 and found.st_uid != owner_uid:
        # A second name of somebody else's file: it may be one of the host.
        raise wrong_path(shown, "hardlink", "is a hard link to a file of another owner")
