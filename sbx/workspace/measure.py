"""How much disk a tree takes, found in bounded time, memory and fds, however it was built."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from sbx.workspace.beneath import Opener, permit

_HELD = 64  # directories on the way that are held open


@dataclass(frozen=True)
class Usage:
    """What a tree takes: `bytes` on disk (allocated blocks, so holes in files count nothing).

    `files` counts everything that is not a directory. Not `complete` means *at least* this: the
    time or the entries ran out, a directory is another user's and unreadable, or directories far
    down moved while they were walked.
    """

    bytes: int
    files: int
    complete: bool
    directories: int = 0

    @property
    def inodes(self) -> int:
        """As a quota counts, but for names of one file, each of which is counted here."""
        return self.files + self.directories


@dataclass
class _Level:
    """A directory on the way; `lifted` is the mode that it has when nobody looks."""

    fd: int
    identity: tuple[int, int]
    lifted: int | None = None
    below: list[str] = field(default_factory=list)  # subdirectories still to visit


@dataclass(frozen=True)
class Enough:
    """Beyond so many bytes or inodes a walk need not go on."""

    bytes: int
    inodes: int


class _BoundsError(Exception):
    pass


class _Walk:
    """Depth first: down by a name, and back to the fd of the directory above, so that a directory
    which is renamed meanwhile hides nothing.

    That is so for the first levels. Below them two fds must do: up by `..`, which must lead where
    we came from. Not by paths from the root: 100 000 levels make paths that linux does not take,
    and a walk that is quadratic. Only names are remembered, at most `max_entries` of them.

    A directory is counted once, wherever it is moved. The code inside can take the rights to its
    own directories away, also from an owner outside who is not root: they are lifted for as long
    as the directory is looked at.
    """

    def __init__(
        self, opener: Opener, max_entries: int, deadline_s: float, enough: Enough | None
    ) -> None:
        self._open = opener
        self._entries_left = max_entries
        self._enough = enough
        self._end = time.monotonic() + deadline_s
        self._linked: set[tuple[int, int]] = set()
        self._levels: list[_Level] = []
        self._met: set[tuple[int, int]] = set()
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

    def _descend(self, level: _Level, name: str) -> None:
        try:
            self._enter(level.fd, (name,))
        except FileNotFoundError:
            return
        except OSError:
            self.complete = False

    def _enter(self, above: int, relative: tuple[str, ...]) -> None:
        fd, lifted = _opened(self._open, above, relative)
        level = _Level(fd, _identity(os.fstat(fd)), lifted)
        if level.identity in self._met:
            self._close(level)
            return
        self._met.add(level.identity)
        if len(self._levels) > _HELD:
            os.close(self._levels[-1].fd)
            self._levels[-1].fd = -1
        self._levels.append(level)
        self._look(level)

    def _leave(self) -> None:
        """Back up; a directory that is not held and was moved away ends what is left of it."""
        left = self._levels.pop()
        try:
            if self._levels and self._levels[-1].fd < 0:
                above = self._levels[-1]
                above.fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=left.fd)
                if _identity(os.fstat(above.fd)) != above.identity:
                    self.complete = False
                    os.close(above.fd)
                    above.fd = -1
                    while self._levels[-1].fd < 0:
                        self._levels.pop()
        finally:
            self._close(left)

    def _close(self, level: _Level) -> None:
        if level.fd < 0:
            return
        if level.lifted is not None:
            with suppress(OSError):
                os.fchmod(level.fd, level.lifted)
        os.close(level.fd)

    def _look(self, level: _Level) -> None:
        for name, found in _entries(level.fd):
            self._entries_left -= 1
            if self._entries_left < 0 or time.monotonic() > self._end:
                raise _BoundsError
            if stat.S_ISDIR(found.st_mode):
                self.directories += 1  # here, where one costs a tenth of what it takes to enter it
                level.below.append(name)
            else:
                self.files += 1
                if found.st_nlink > 1:
                    if _identity(found) in self._linked:
                        continue
                    self._linked.add(_identity(found))
            self.bytes += found.st_blocks * 512
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
    enough: Enough | None = None,
) -> Usage:
    """Add up the tree at the directory fd `root`; never raises for what user code can build."""
    walk = _Walk(opener, max_entries, deadline_s, enough)
    try:
        walk.run(root)
    except (_BoundsError, OSError):
        walk.complete = False
    return Usage(walk.bytes, walk.files, walk.complete, walk.directories)


def _opened(opener: Opener, above: int, relative: tuple[str, ...]) -> tuple[int, int | None]:
    """A directory open for reading and passing, and the mode that it had where that took a lift."""
    try:
        fd = opener(above, relative, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return _lifted(opener, above, relative)
    found = os.fstat(fd)
    if found.st_mode & 0o500 == 0o500 or found.st_uid != os.geteuid():
        return fd, None
    os.fchmod(fd, stat.S_IMODE(found.st_mode) | 0o700)
    return fd, stat.S_IMODE(found.st_mode)


def _lifted(opener: Opener, above: int, relative: tuple[str, ...]) -> tuple[int, int]:
    held = opener(above, relative, os.O_PATH | os.O_DIRECTORY)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        permit(held)
        return os.open(f"/proc/self/fd/{held}/.", os.O_RDONLY | os.O_DIRECTORY), mode
    finally:
        os.close(held)


def _entries(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield os.fsencode(entry.name).decode("utf-8", "surrogateescape"), found


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
