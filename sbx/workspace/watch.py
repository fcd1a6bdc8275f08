"""Report changes below directories by inotify, and map each inotify watch to its directory.

The code inside creates, renames and removes directories while they are watched. So a reported path
may be out of date. The number of directories and their depth are limited. Changes beyond a limit,
or lost events, are reported as an `overflow`.
"""

import errno
import os
import stat
from contextlib import suppress

from sbx.errors import SbxError, Unavailable
from sbx.linux import inotify
from sbx.linux.descriptors import closing
from sbx.protocol.files import ChangeKind, FileEvent
from sbx.workspace.errors import translate
from sbx.workspace.search import Places
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

DIRECTORIES_MAX = 4096
DEPTH_MAX = 128  # components per path; all are kept, and a path can have 2,000
CHANGES_MAX = 4096  # in one `read`; Linux keeps the rest
_NEW_S = 1.0  # to walk all new directories of one `read`
_MASK = (
    inotify.CREATE
    | inotify.DELETE
    | inotify.MODIFY
    | inotify.MOVED_FROM
    | inotify.MOVED_TO
    | inotify.DELETE_SELF
    | inotify.EXCL_UNLINK
)
_GONE = inotify.DELETE | inotify.MOVED_FROM
_CAME = inotify.CREATE | inotify.MOVED_TO


class Watching:
    """A watch of the directories of `places`, and with `recursive`, of those below them.

    `fd` is readable after a change. The methods are synchronous. Only one thread may call them at a
    time.
    """

    def __init__(
        self, places: Places, *, recursive: bool, max_directories: int = DIRECTORIES_MAX
    ) -> None:
        """Start to watch. Raises NotFound, InvalidPath `not_a_directory`, Unavailable
        `too_many_watches`."""
        self._recursive = recursive
        self._max_directories = max_directories
        self._watched: dict[int, tuple[Tree, Relative]] = {}
        self._missed = False
        self._new = Walk()
        try:
            self._queue = inotify.Inotify()
        except OSError as error:
            raise _too_many(error) from error
        try:
            for tree, relative in places:
                self._add(tree, relative)
                if recursive:
                    self._add_below(tree, relative)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        return self._queue.fd

    def read(self) -> list[FileEvent]:
        """Return the changes since the last call, each once.

        One call reads at most 64 KiB of events, because the code inside may write faster than the
        caller reads.
        """
        reported: dict[FileEvent, None] = {}
        self._new = Walk(max_entries=2 * CHANGES_MAX, deadline_s=_NEW_S)
        for event in self._queue.read():
            self._take(event, reported)
        self._missed |= not self._new.complete
        if self._missed:
            self._missed = False
            reported[FileEvent("overflow", self._top())] = None
        return list(reported)

    def take_missed(self) -> bool:
        """Return whether some directories are not watched. Call it before the first `read`."""
        missed, self._missed = self._missed, False
        return missed

    def close(self) -> None:
        self._queue.close()

    def _top(self) -> str:
        for tree, relative in self._watched.values():
            return tree.shown(relative)
        return "/workspace"

    def _take(self, event: inotify.Event, reported: dict[FileEvent, None]) -> None:
        if event.mask & inotify.OVERFLOW:
            self._missed = True
            return
        if event.mask & inotify.IGNORED:
            self._watched.pop(event.watch, None)
            return
        where = self._watched.get(event.watch)
        if where is None or not event.name:
            if where is not None and event.mask & inotify.DELETE_SELF and not where[1]:
                reported[FileEvent("deleted", where[0].shown(()))] = None
            return
        tree, above = where
        below = (*above, event.name.decode("utf-8", "surrogateescape"))
        kind: ChangeKind = "modified"
        if event.mask & _GONE:
            kind = "deleted"
        elif event.mask & _CAME:
            kind = "created"
        change = FileEvent(kind, tree.shown(below))
        if kind == "modified" and FileEvent("created", change.path) in reported:
            return
        reported.pop(FileEvent("modified" if kind != "modified" else "created", change.path), None)
        reported[change] = None
        if event.mask & inotify.IS_DIRECTORY and self._recursive:
            if event.mask & inotify.MOVED_FROM:
                self._forget_below(tree, below)
            elif event.mask & _CAME:
                self._add_new(tree, below, reported)

    def _add_new(self, tree: Tree, directory: Relative, reported: dict[FileEvent, None]) -> None:
        """Watch a new directory, and report the files that were in it before."""
        try:
            self._add(tree, directory)
            for below, status in tree.walk(self._new, directory):
                if len(reported) < CHANGES_MAX:
                    reported[FileEvent("created", tree.shown(below))] = None
                else:
                    self._new.cut()
                if stat.S_ISDIR(status.st_mode):
                    self._add(tree, below)
        except SbxError:  # removed or replaced: its parent reports that
            return

    def _add_below(self, tree: Tree, relative: Relative) -> None:
        walk = Walk()
        for below, status in tree.walk(walk, relative):
            if stat.S_ISDIR(status.st_mode):
                with suppress(SbxError):
                    self._add(tree, below)
        self._missed |= not walk.complete

    def _add(self, tree: Tree, relative: Relative) -> None:
        if len(self._watched) >= self._max_directories or len(relative) > DEPTH_MAX:
            self._missed = True
            return
        try:
            with closing(tree.opener(tree.fd, relative, os.O_PATH | os.O_DIRECTORY)) as fd:
                self._watched[self._queue.add(fd, _MASK)] = (tree, relative)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                if not self._watched:
                    raise _too_many(error) from error
                self._missed = True
                return
            raise translate(error, tree.shown(relative)) from error

    def _forget_below(self, tree: Tree, directory: Relative) -> None:
        """Stop watching a moved directory. If it appears elsewhere, it is watched again."""
        depth = len(directory)
        gone = [
            watch
            for watch, (of, relative) in self._watched.items()
            if of is tree and relative[:depth] == directory
        ]
        for watch in gone:
            del self._watched[watch]
            with suppress(OSError):
                self._queue.remove(watch)


def _too_many(error: OSError) -> Unavailable:
    return Unavailable(
        f"Linux refuses further watches for this user: {error.strerror}",
        code="too_many_watches",
        hint="end a watch, or raise fs.inotify.max_user_instances and max_user_watches (sysctl)",
    )
