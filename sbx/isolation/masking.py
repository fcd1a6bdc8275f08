"""Cover the sockets and FIFOs of the host in a directory that a jail is shown.

A read-only mount does not prevent a connection to a socket or a write to a FIFO: neither writes to
the file system. So an empty, read-only file is mounted on each of them, inside: a connection is
refused then, and nothing can be removed or renamed there.

    walk    everything below the directory, symlinks not followed, with a limit of entries, depth
            and time; only what Linux itself shows as a socket or a FIFO is opened, by O_PATH
    pin     in a directory that code inside can write to, each directory above a socket is mounted
            onto itself. Code inside cannot rename it then, neither to hide the socket from the walk
            for another jail of the same directory, which may be under way
    cover   by the file that is open, never by its path: one that is renamed meanwhile is covered
            all the same
    again   until a walk meets nothing to be covered

What the host makes there later is not covered. Neither is a socket that the host removes and makes
again, because Linux unmounts the cover of a removed name. The outcome is not `complete` if the
directory is larger than the limits, or has a directory that cannot be listed.
"""

import errno
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from sbx.linux import mounts, openat2

ENTRIES_MAX = 500_000
DEPTH_MAX = 128
MASKS_MAX = 2_048
WALK_S = 5.0
_ROUNDS = 5
_BATCH = 512
_RESOLVE = openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
_HELD = os.O_PATH | os.O_NOFOLLOW
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.EAGAIN)


class Masks(NamedTuple):
    """How many sockets and FIFOs were covered, and whether all of them were."""

    masked: int
    complete: bool


class MaskingLimits:
    """The entries and the time that are left for all walks of one child together."""

    def __init__(self, *, entries: int = ENTRIES_MAX, seconds: float = WALK_S) -> None:
        self._entries = entries
        self._end = time.monotonic() + seconds
        self.complete = True

    def spend(self, entries: int) -> bool:
        """Count entries; False when none, or no time, is left."""
        self._entries -= entries
        if self._entries < 0 or time.monotonic() > self._end:
            self.complete = False
        return self.complete

    def cut(self) -> None:
        """Note that something was left out."""
        self.complete = False


class Cover:
    """The empty file that is shown in place of a socket: a detached mount, and then its clones."""

    def __init__(self, tree: int) -> None:
        self._tree = tree
        self._is_attached = False

    def put(self, target: int) -> None:
        """Cover the file that the fd `target` holds. Raises OSError: ENOENT for a removed one."""
        if not self._is_attached:  # before Linux 6.15 a detached mount cannot be cloned
            mounts.attach(self._tree, target)
            self._is_attached = True
            return
        clone = mounts.clone(self._tree)
        try:
            mounts.attach(clone, target)
        finally:
            os.close(clone)


def make_cover(directory: str) -> int:
    """Make an empty, read-only file on a separate tmpfs, as a detached mount.

    The tmpfs covers `directory`, so the caller has a mount namespace that no other process uses.
    """
    mounts.tmpfs(directory, "mode=0755,size=64k,nr_inodes=8")
    os.close(os.open(f"{directory}/empty", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
    tree = mounts.open_tree(f"{directory}/empty")
    mounts.restrict_tree(tree, read_only=True)
    return tree


def mask(top: int, cover: Cover, limits: MaskingLimits, *, pin: bool) -> Masks:
    """Cover every socket and FIFO below the directory `top`, an fd. Raises OSError."""
    covered = 0
    for _ in range(_ROUNDS):
        paths = find(top, limits)
        if not paths:
            return Masks(covered, limits.complete)
        if covered + len(paths) > MASKS_MAX:
            limits.cut()
            paths = paths[: MASKS_MAX - covered]
        if pin:
            _pin(top, paths)
        done = sum(_cover(top, path, cover) for path in paths)
        covered += done
        if covered >= MASKS_MAX:
            break
    limits.cut()  # a process creates, or moves, them faster than they are covered
    return Masks(covered, False)


def find(top: int, limits: MaskingLimits) -> list[bytes]:
    """Return the paths, relative to `top`, of every socket and FIFO below it."""
    paths: list[bytes] = []
    pending: list[tuple[bytes, int]] = [(b".", 0)]
    while pending and limits.complete:
        path, depth = pending.pop()
        try:
            directory = openat2.openat2(top, path, _LISTED, resolve=_RESOLVE)
        except OSError as error:
            if error.errno not in _VANISHED and _can_be_passed(top, path, error):
                limits.cut()
            continue
        try:
            below = _look(directory, path, paths, limits)
        finally:
            os.close(directory)
        if below and depth >= DEPTH_MAX:
            limits.cut()
            continue
        pending += [(directory, depth + 1) for directory in below]
    return paths


def _look(directory: int, path: bytes, paths: list[bytes], limits: MaskingLimits) -> list[bytes]:
    """Add the sockets and FIFOs of one directory to `found`; the directories in it."""
    below = []
    seen = 0
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            seen += 1
            if seen == _BATCH:
                if not limits.spend(seen):
                    break
                seen = 0
            if entry.is_file(follow_symlinks=False):
                continue
            if entry.is_dir(follow_symlinks=False):
                below.append(_join(path, entry.name))
            elif not entry.is_symlink():
                # The kind in the directory is that below a cover: look at the visible file.
                with suppress(OSError):
                    fd = os.open(entry.name, _HELD, dir_fd=directory)
                    try:
                        if _is_to_be_covered(fd):
                            paths.append(_join(path, entry.name))
                    finally:
                        os.close(fd)
    limits.spend(seen)
    return below


def _join(path: bytes, name: str) -> bytes:
    return os.fsencode(name) if path == b"." else path + b"/" + os.fsencode(name)


def _is_to_be_covered(fd: int) -> bool:
    """Device nodes are not: every mount of a jail is nodev."""
    return stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFSOCK, stat.S_IFIFO)


def _can_be_passed(top: int, path: bytes, error: OSError) -> bool:
    """Return whether the jail might reach files in a directory that cannot be listed.

    The jail has no more rights than the caller, so it cannot if the caller can neither search the
    directory nor change its mode.
    """
    if error.errno != errno.EACCES:
        return True
    try:
        fd = openat2.openat2(top, path, _HELD, resolve=_RESOLVE)
    except OSError:
        return True
    try:
        if os.fstat(fd).st_uid == os.geteuid() or os.geteuid() == 0:
            return True
        os.close(os.open("./.", _HELD, dir_fd=fd))
    except PermissionError:
        return False
    finally:
        os.close(fd)
    return True


def _pin(top: int, paths: Iterable[bytes]) -> None:
    """Mount each directory above these onto itself, the outermost first: code inside cannot rename
    a mount point."""
    above = {path[:end] for path in paths for end in range(len(path)) if path[end] == ord("/")}
    for path in sorted(above, key=len):
        with suppress(OSError):  # it was renamed meanwhile: the next walk finds it again
            _pin_directory(top, path)


def _pin_directory(top: int, path: bytes) -> None:
    above = path.rpartition(b"/")[0] or b"."
    directory = openat2.openat2(top, path, _HELD | os.O_DIRECTORY, resolve=_RESOLVE)
    try:
        parent = openat2.openat2(top, above, _HELD | os.O_DIRECTORY, resolve=_RESOLVE)
        try:
            if mounts.number_of(directory) != mounts.number_of(parent):
                return
        finally:
            os.close(parent)
        clone = mounts.clone(directory)
        try:
            mounts.attach(clone, directory)
        finally:
            os.close(clone)
    finally:
        os.close(directory)


def _cover(top: int, path: bytes, cover: Cover) -> bool:
    try:
        fd = openat2.openat2(top, path, _HELD, resolve=_RESOLVE)
    except OSError as error:
        if error.errno not in _VANISHED:
            raise
        return False
    try:
        if not _is_to_be_covered(fd):
            return False
        cover.put(fd)
    except FileNotFoundError:  # removed meanwhile
        return False
    finally:
        os.close(fd)
    return True
