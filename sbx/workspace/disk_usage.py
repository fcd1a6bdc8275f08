"""Measure the disk usage of any tree in bounded time, memory and fds."""

import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from msgspec import Struct, field

from sbx.linux.descriptors import closing
from sbx.workspace.safe_open import Opener, permit

_OPEN_MAX = 64  # directories on the way down that stay open


class DiskUsage(Struct, frozen=True):
    """The disk usage of a tree: `bytes` counts allocated blocks, so holes in files do not count.

    `files` counts everything that is not a directory. If not `complete`, the numbers are lower
    bounds: the limit of time or entries was reached, a directory of another user is unreadable, or
    deep directories were moved during the walk.
    """

    bytes: int
    files: int
    complete: bool
    directories: int = 0

    @property
    def inodes(self) -> int:
        """Return the inodes as a quota counts them, except that each hard link counts here."""
        return self.files + self.directories

    def plus(self, size: int, inodes: int, *, complete: bool = True) -> "DiskUsage":
        return DiskUsage(self.bytes + size, self.inodes + inodes, self.complete and complete)


class DirLevel(Struct):
    """A directory on the way down. `lifted` is its mode before the walk made it readable."""

    fd: int
    identity: tuple[int, int]
    lifted: int | None = None
    below: list[str] = field(default_factory=list)  # subdirectories still to visit


class EarlyStop(Struct, frozen=True):
    """The numbers of bytes and inodes above which a walk may stop."""

    bytes: int
    inodes: int


class FreeRoom:
    """The bytes that a tree may still grow by, for writes from outside.

    A measurement serves for 20 times as long as it took, because that of a large tree is slow; the
    writes since then are added. `sbx.runtime.files.disk_limit` watches the code inside.
    """

    def __init__(self, measure: Callable[[], DiskUsage], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._measure = measure
        self._used = 0
        self._valid_until = -math.inf

    def left(self, size: int = 0) -> int:
        """Return the bytes that are left; measure again if they are less than `size`."""
        began = time.monotonic()
        if began >= self._valid_until or self.max_bytes - self._used < size:
            self._used = self._measure().bytes
            now = time.monotonic()
            self._valid_until = now + 20 * (now - began)
        return max(0, self.max_bytes - self._used)

    def take(self, size: int) -> None:
        self._used += size


class _BoundsError(Exception):
    pass


class _Walk:
    """A depth-first walk.

    It goes down by name, and up to the open fd of the parent. So a directory that is renamed during
    the walk hides nothing. This holds for the first levels. Below them, the walk uses two fds and
    goes up by `..`, which must lead to the directory that it came from. It does not use paths from
    the root: with 100 000 levels, Linux refuses the paths and the walk would be quadratic. It keeps
    only names in memory, at most `max_entries` of them.

    Each directory counts once, even if it is moved. The code inside can remove the permissions of
    its directories, which stops an owner outside that is not root. The walk restores them while it
    reads the directory.
    """

    def __init__(
        self,
        opener: Opener,
        max_entries: int,
        deadline_s: float,
        enough: EarlyStop | None,
        since: float,
    ) -> None:
        self._open = opener
        self._since = since
        self._entries_left = max_entries
        self._enough = enough
        self._end = time.monotonic() + deadline_s
        self._linked: set[tuple[int, int]] = set()
        self._levels: list[DirLevel] = []
        self._visited: set[tuple[int, int]] = set()
        self.bytes = 0
        self.files = 0
        self.directories = 0
        self.complete = True

    def run(self, root: int) -> None:
        try:
            self._enter(root, ())
            while self._levels:
                level = self._levels[-1]
                if level.below:
                    self._descend(level, level.below.pop())
                else:
                    self._leave()
        finally:
            while self._levels:
                self._close(self._levels.pop())

    def _descend(self, level: DirLevel, name: str) -> None:
        try:
            self._enter(level.fd, (name,))
        except FileNotFoundError:
            return
        except OSError:
            self.complete = False

    def _enter(self, above: int, relative: tuple[str, ...]) -> None:
        fd, lifted = _opened(self._open, above, relative)
        level = DirLevel(fd, _identity(os.fstat(fd)), lifted)
        if level.identity in self._visited:
            self._close(level)
            return
        self._visited.add(level.identity)
        if len(self._levels) > _OPEN_MAX:
            os.close(self._levels[-1].fd)
            self._levels[-1].fd = -1
        self._levels.append(level)
        self._look(level)

    def _leave(self) -> None:
        """Go up. If a closed parent was moved away, skip the rest of the closed levels."""
        level = self._levels.pop()
        try:
            if self._levels and self._levels[-1].fd < 0:
                above = self._levels[-1]
                above.fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=level.fd)
                if _identity(os.fstat(above.fd)) != above.identity:
                    self.complete = False
                    os.close(above.fd)
                    above.fd = -1
                    while self._levels[-1].fd < 0:
                        self._levels.pop()
        finally:
            self._close(level)

    def _close(self, level: DirLevel) -> None:
        if level.fd < 0:
            return
        if level.lifted is not None:
            with suppress(OSError):
                os.fchmod(level.fd, level.lifted)
        os.close(level.fd)

    def _look(self, level: DirLevel) -> None:
        for name, status in _entries(level.fd):
            self._entries_left -= 1
            if self._entries_left < 0 or time.monotonic() > self._end:
                raise _BoundsError
            if stat.S_ISDIR(status.st_mode):
                level.below.append(name)
            if status.st_ctime < self._since:
                continue
            if stat.S_ISDIR(status.st_mode):
                self.directories += 1  # here, for a tenth of the cost of entering it
            else:
                self.files += 1
                if status.st_nlink > 1:
                    if _identity(status) in self._linked:
                        continue
                    self._linked.add(_identity(status))
            self.bytes += status.st_blocks * 512
            if self._enough is not None and (
                self.bytes > self._enough.bytes
                or self.files + self.directories > self._enough.inodes
            ):
                raise _BoundsError


def measure(
    opener: Opener,
    root: int,
    *,
    max_entries: int,
    deadline_s: float,
    enough: EarlyStop | None = None,
    since: float = -math.inf,
) -> DiskUsage:
    """Measure the tree at the directory fd `root`: its entries that changed at the time `since` or
    later (ctime). Never raises for a tree of user code."""
    walk = _Walk(opener, max_entries, deadline_s, enough, since)
    try:
        walk.run(root)
    except (_BoundsError, OSError):
        walk.complete = False
    return DiskUsage(walk.bytes, walk.files, walk.complete, walk.directories)


def _opened(opener: Opener, above: int, relative: tuple[str, ...]) -> tuple[int, int | None]:
    """Open a directory for reading and searching; return also its old mode if that was changed."""
    try:
        fd = opener(above, relative, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return _lifted(opener, above, relative)
    status = os.fstat(fd)
    if status.st_mode & 0o500 == 0o500 or status.st_uid != os.geteuid():
        return fd, None
    os.fchmod(fd, stat.S_IMODE(status.st_mode) | 0o700)
    return fd, stat.S_IMODE(status.st_mode)


def _lifted(opener: Opener, above: int, relative: tuple[str, ...]) -> tuple[int, int]:
    with closing(opener(above, relative, os.O_PATH | os.O_DIRECTORY)) as path_fd:
        mode = stat.S_IMODE(os.fstat(path_fd).st_mode)
        permit(path_fd)
        return os.open(f"/proc/self/fd/{path_fd}/.", os.O_RDONLY | os.O_DIRECTORY), mode


def _entries(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield os.fsencode(entry.name).decode("utf-8", "surrogateescape"), status


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
