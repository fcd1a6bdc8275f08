"""A walk over a tree that may be built, and changed meanwhile, to make walks endless."""

import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from sbx.workspace.beneath import Opener
from sbx.workspace.listing import shown
from sbx.workspace.refusals import translate

Relative = tuple[str, ...]

ENTRIES_MAX = 200_000
DEADLINE_S = 10.0


class _Below(NamedTuple):
    """A directory that is still to be read, by the one above it: in a tree that is deep and wide a
    tuple of all components for each would take gigabytes."""

    above: "_Below | None"
    name: str

    def relative(self, top: Relative) -> Relative:
        names = []
        one: _Below | None = self
        while one is not None:
            names.append(one.name)
            one = one.above
        return (*top, *reversed(names))


class Walk:
    """Breadth first over everything below a directory, symlinks not followed, mounts not crossed.

    Each directory is opened from the root anew, so a rename cannot lead out; one fd is held at a
    time. `complete` turns False, and the walk ends, at `max_entries` (`exhausted`) or after
    `deadline_s`, which is also for what the caller does in between: it asks `in_time`. What
    vanished is passed over; what cannot be read makes it not `complete`.
    """

    def __init__(self, *, max_entries: int = ENTRIES_MAX, deadline_s: float = DEADLINE_S) -> None:
        self._left = max_entries
        self._end = time.monotonic() + deadline_s
        self.exhausted = False
        self.complete = True

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self._end

    def cut(self) -> None:
        """Say that something was left out."""
        self.complete = False

    def below(
        self, opener: Opener, root: int, relative: Relative, *, view: str
    ) -> Iterator[tuple[Relative, os.stat_result]]:
        """Everything below the directory `relative`; raises NotFound and InvalidPath for itself."""
        pending: deque[_Below | None] = deque([None])
        while pending and self._goes_on():
            directory = pending.popleft()
            where = relative if directory is None else directory.relative(relative)
            try:
                fd = opener(root, where, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if directory is None:
                    raise translate(error, shown(view, relative)) from error
                self.complete &= isinstance(error, FileNotFoundError)
                continue
            try:
                for name, found in self._entries(fd):
                    if stat.S_ISDIR(found.st_mode):
                        pending.append(_Below(directory, name))
                    yield (*where, name), found
            finally:
                os.close(fd)

    def _goes_on(self) -> bool:
        if self.exhausted or not self.in_time:
            self.complete = False
            return False
        return True

    def _entries(self, directory: int) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(directory) as entries:
            while (entry := self._next(entries)) is not None:
                self.exhausted = self._left <= 0
                if not self._goes_on():
                    return
                self._left -= 1
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield os.fsencode(entry.name).decode("utf-8", "surrogateescape"), found

    def _next(self, entries: "Iterator[os.DirEntry[str]]") -> "os.DirEntry[str] | None":
        try:
            return next(entries, None)
        except OSError:  # a directory that is removed while it is read
            self.complete = False
            return None
