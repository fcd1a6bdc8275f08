"""Walk a tree that hostile code may build, and change during the walk, to make walks endless."""

import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from sbx.linux.descriptors import closing
from sbx.workspace.errors import translate
from sbx.workspace.listing import shown
from sbx.workspace.safe_open import Opener

Relative = tuple[str, ...]

ENTRIES_MAX = 200_000
DEADLINE_S = 10.0


class _Below(NamedTuple):
    """A pending directory, with a reference to its parent. In a deep and wide tree, a tuple of all
    components for each directory would take gigabytes."""

    above: "_Below | None"
    name: str

    def relative(self, top: Relative) -> Relative:
        names = []
        directory: _Below | None = self
        while directory is not None:
            names.append(directory.name)
            directory = directory.above
        return (*top, *reversed(names))


class Walk:
    """A breadth-first walk below a directory that follows no symlink and crosses no mount.

    Each directory is opened from the root again, so a rename cannot lead out. One fd is open at a
    time. The walk ends at `max_entries` (`exhausted`) or after `deadline_s`, and `complete` becomes
    False. The deadline includes the work of the caller, which checks `in_time`. Nodes that
    disappear are skipped. A directory that cannot be read makes the walk incomplete.
    """

    def __init__(self, *, max_entries: int = ENTRIES_MAX, deadline_s: float = DEADLINE_S) -> None:
        self._entries_left = max_entries
        self._end = time.monotonic() + deadline_s
        self.exhausted = False
        self.complete = True

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self._end

    def cut(self) -> None:
        """Record that something was left out."""
        self.complete = False

    def below(
        self, opener: Opener, root: int, relative: Relative, *, view: str
    ) -> Iterator[tuple[Relative, os.stat_result]]:
        """Yield everything below the directory `relative`. Raises NotFound, InvalidPath for it."""
        pending: deque[_Below | None] = deque([None])
        while pending and self._may_continue():
            directory = pending.popleft()
            where = relative if directory is None else directory.relative(relative)
            try:
                fd = opener(root, where, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if directory is None:
                    raise translate(error, shown(view, relative)) from error
                self.complete &= isinstance(error, FileNotFoundError)
                continue
            with closing(fd):
                for name, status in self._entries(fd):
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(_Below(directory, name))
                    yield (*where, name), status

    def _may_continue(self) -> bool:
        if self.exhausted or not self.in_time:
            self.complete = False
            return False
        return True

    def _entries(self, directory: int) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(directory) as entries:
            while (entry := self._next(entries)) is not None:
                self.exhausted = self._entries_left <= 0
                if not self._may_continue():
                    return
                self._entries_left -= 1
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield os.fsencode(entry.name).decode("utf-8", "surrogateescape"), status

    def _next(self, entries: "Iterator[os.DirEntry[str]]") -> "os.DirEntry[str] | None":
        try:
            return next(entries, None)
        except OSError:  # the directory was removed during the read
            self.complete = False
            return None
