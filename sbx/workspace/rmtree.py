"""Remove any tree that user code can build, in bounded time, memory and fds.

    make it unreachable   rename it to an opaque name, best in a directory outside every view
    flatten               rename directories below the children of the top up to the top
    report the rest       return False; a later `empty_directory` continues from there

It does not recurse (1 200 levels break `shutil.rmtree`), does not use long paths (Linux refuses
paths with 100 000 levels), does not open an fd per level, follows no symlink and crosses no mount.
Flattening moves each directory once, so the work is linear in the number of names.

A read-only subvolume of btrfs and an immutable file lose that flag. A subvolume is flattened in
itself, because rename(2) leads only the subvolumes out of it.
"""

import errno
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator

from sbx.linux.descriptors import closing
from sbx.linux.inode_flags import clear_protection
from sbx.workspace.safe_open import opener, permit

_REMEMBERED = 10_000  # moved-up directories in memory; the next pass finds the others


def remove_tree(parent: int, name: str, deadline_s: float, *, trash: int | None = None) -> bool:
    """Remove `name` of any kind in the directory fd `parent` within `deadline_s` seconds.

    It is first renamed to an opaque name in the directory fd `trash`, by default `parent`. Return
    True if nothing remains, also if `name` did not exist. Return False if it could not be renamed
    and is still in place, or if the deadline passed and the rest is in `trash`. No tree makes this
    function raise. A process that still has fds inside can only use up the time.
    """
    trash = parent if trash is None else trash
    opaque = f".sbx-removed-{secrets.token_hex(16)}"
    try:
        _make_removable(parent, name)
        os.rename(name, opaque, src_dir_fd=parent, dst_dir_fd=trash)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        os.unlink(opaque, dir_fd=trash)
    except OSError:
        return _remove_directory(trash, opaque, time.monotonic() + deadline_s)
    return True


def remove_held(directory: int, parent: int, name: str, deadline_s: float) -> bool:
    """Remove the directory fd `directory`, which had this name in `parent`; return its success.

    If code inside sees the name, it can give it to a directory of another user, which only sbx has
    the right to empty. So the open directory is emptied, and the directory of that name is removed
    only if it is empty.
    """
    if not empty_directory(directory, deadline_s):
        return False
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError:
        return False
    return True


def empty_directory(directory: int, deadline_s: float) -> bool:
    """Empty the directory fd `directory` (O_PATH suffices); return whether it is empty."""
    end = time.monotonic() + deadline_s
    try:
        with closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)) as top:
            return TreeRemover(top, end).run()
    except OSError:
        return False


def _remove_directory(parent: int, name: str, end: float) -> bool:
    try:
        with closing(_open_directory(parent, name)) as top:
            emptied = TreeRemover(top, end).run()
        if emptied:
            os.rmdir(name, dir_fd=parent)
    except OSError:
        return False
    return emptied


class _DeadlineError(Exception):
    pass


class TreeRemover:
    """Empty one directory, the top, with at most three open fds: top, one child, one scan.

    `outer`: the top of the tree, if `top` is a subvolume in it.
    """

    def __init__(self, top: int, end: float, outer: int | None = None) -> None:
        self._top = top
        self._end = end
        self._outer = outer
        self._device = os.fstat(top).st_dev
        self._prefix = f".sbx-{secrets.token_hex(8)}-"
        self._serial = 0
        self._steps = 0  # removals and moves: a pass without any is the last
        self._moved_up: deque[str] = deque()

    def run(self) -> bool:
        try:
            while True:
                before = self._steps
                if not self._pass():
                    return True
                if self._steps == before:
                    return False
        except _DeadlineError:
            return False

    def _pass(self) -> bool:
        """Scan the top once; return False if it was empty.

        A scan may miss names that are added or moved at the same time, so only a pass that sees no
        name proves that the top is empty.
        """
        any_name = False
        for name, is_directory in _names(self._top):
            any_name = True
            self._remove(self._top, name, is_directory)
            while self._moved_up:
                self._remove(self._top, self._moved_up.popleft(), True, full=True)
        return any_name

    def _remove(self, parent: int, name: str, is_directory: bool, *, full: bool = False) -> None:
        """Remove one name, or move it to the top. `full`: it is a directory that is not empty."""
        if time.monotonic() > self._end:
            raise _DeadlineError
        try:
            if not is_directory:
                _permitted(lambda: os.unlink(name, dir_fd=parent), parent, name)
            elif full or not _removed_empty(parent, name):
                if parent != self._top:
                    self._move_up(parent, name)
                    return
                self._hollow_out(name)
                os.rmdir(name, dir_fd=parent)
            self._steps += 1
        except OSError:
            return  # vanished, replaced or not permitted: a later pass decides

    def _hollow_out(self, name: str) -> None:
        with closing(_open_directory(self._top, name)) as directory:
            if os.fstat(directory).st_dev != self._device:
                within = TreeRemover(directory, self._end, self._outer or self._top)
                within.run()
                self._steps += within._steps
                return
            for below, is_directory in _names(directory):
                self._remove(directory, below, is_directory)

    def _move_up(self, parent: int, name: str) -> None:
        self._serial += 1
        above = f"{self._prefix}{self._serial}"
        if self._outer is not None and _moved(parent, name, self._outer, above):
            self._steps += 1
            return  # it is a subvolume; the remover of the whole tree finds it there
        if not _moved(parent, name, self._top, above):
            return
        self._steps += 1
        if len(self._moved_up) < _REMEMBERED:
            self._moved_up.append(above)


def _moved(parent: int, name: str, target: int, new_name: str) -> bool:
    """Move a directory. Return False if it lies on another device than `target`."""
    try:
        _permitted(
            lambda: os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=target), parent, name
        )
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    return True


def _removed_empty(parent: int, name: str) -> bool:
    try:
        _permitted(lambda: os.rmdir(name, dir_fd=parent), parent, name)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _permitted(act: Callable[[], None], parent: int, name: str) -> None:
    """Do `act`; if Linux forbids it, clear what protects `name`, and try once more."""
    try:
        act()
    except OSError as error:
        # A directory that changes parents must itself be writable.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        _make_removable(parent, name)
        act()


def _names(directory: int) -> Iterator[tuple[str, bool]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _open_directory(parent: int, name: str) -> int:
    """Open the directory `name` for reading and writing, even after chmod 000. Raises OSError."""
    with closing(_open_path(parent, name, os.O_DIRECTORY)) as path_fd:
        clear_protection(path_fd)
        permit(path_fd)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=path_fd)


def _make_removable(parent: int, name: str) -> None:
    """Clear what keeps the name from being removed or moved, as far as the caller may."""
    with closing(_open_path(parent, name, os.O_NOFOLLOW)) as path_fd:
        clear_protection(path_fd)
        if stat.S_ISDIR(os.fstat(path_fd).st_mode):
            permit(path_fd)


def _open_path(parent: int, name: str, flag: int) -> int:
    component = os.fsencode(name).decode("utf-8", "surrogateescape")
    return opener()(parent, (component,), os.O_PATH | flag)
