"""How much disk a tree takes, found in bounded time, memory and fds, however it was built."""

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from sbx.workspace.beneath import Opener


@dataclass(frozen=True)
class Usage:
    """What a tree takes: `bytes` on disk (allocated blocks, so holes in files count nothing).

    `files` counts everything that is not a directory. Not `complete` means *at least* this: the
    time or the entries ran out, a directory is unreadable (chmod 000 of an unprivileged owner), or
    directories moved while they were walked.
    """

    bytes: int
    files: int
    complete: bool


@dataclass
class _Level:
    identity: tuple[int, int]
    below: list[str] = field(default_factory=list)  # subdirectories still to visit


class _BoundsError(Exception):
    pass


class _Walk:
    """Depth first with two fds: down by a name, up by `..`, which must lead where we came from.

    Not by paths from the root: 100 000 levels make paths that linux does not take, and a walk
    that is quadratic. Only names are remembered, at most `max_entries` of them.
    """

    def __init__(self, opener: Opener, max_entries: int, deadline_s: float) -> None:
        self._open = opener
        self._entries_left = max_entries
        self._end = time.monotonic() + deadline_s
        self._linked: set[tuple[int, int]] = set()
        self.bytes = 0
        self.files = 0
        self.complete = True

    def run(self, root: int) -> None:
        directory = self._open(root, (), os.O_RDONLY | os.O_DIRECTORY)
        try:
            levels = [self._level(directory)]
            while levels:
                if levels[-1].below:
                    child = self._descend(directory, levels[-1].below.pop())
                    if child is None:
                        continue
                    os.close(directory)
                    directory = child
                    levels.append(self._level(directory))
                    continue
                levels.pop()
                if levels:
                    parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
                    os.close(directory)
                    directory = parent
                    if _identity(os.fstat(directory)) != levels[-1].identity:
                        raise _BoundsError  # renamed under us: what lies here is not ours to walk
        finally:
            os.close(directory)

    def _descend(self, directory: int, name: str) -> int | None:
        try:
            return self._open(directory, (name,), os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        except OSError:
            self.complete = False
            return None

    def _level(self, directory: int) -> _Level:
        level = _Level(_identity(os.fstat(directory)))
        for name, found in _entries(directory):
            self._entries_left -= 1
            if self._entries_left < 0 or time.monotonic() > self._end:
                raise _BoundsError
            if stat.S_ISDIR(found.st_mode):
                level.below.append(name)
            else:
                self.files += 1
                if found.st_nlink > 1:
                    if _identity(found) in self._linked:
                        continue
                    self._linked.add(_identity(found))
            self.bytes += found.st_blocks * 512
        return level


def measure(opener: Opener, root: int, *, max_entries: int, deadline_s: float) -> Usage:
    """Add up the tree at the directory fd `root`; never raises for what user code can build."""
    walk = _Walk(opener, max_entries, deadline_s)
    try:
        walk.run(root)
    except (_BoundsError, OSError):
        walk.complete = False
    return Usage(walk.bytes, walk.files, walk.complete)


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
