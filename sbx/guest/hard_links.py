"""Names of one file: the path guard creates and removes them by a descriptor, never by a path.

A program of the jail may put another file at a path while the guard looks at the first one. So the
file that was checked is the one that gets the new name (linkat(2) on /proc/self/fd).
"""

import errno
import os
import re
import secrets
import stat
from contextlib import suppress

from sbx.guest.guarded_paths import ResolvedPath

COPY_MAX = 64 << 20  # bytes
_FRESH = re.compile(r"\.sbx-[0-9a-f]{16}", re.IGNORECASE)


def link(path_fd: int, target: ResolvedPath) -> None:
    """Give the file of an O_PATH descriptor a further name. Raise OSError."""
    _link(path_fd, target.name, target.parent)


def move(path_fd: int, source: ResolvedPath, destination: ResolvedPath) -> None:
    """Move the file of an O_PATH descriptor, which `source` led to, as rename(2) does.

    Raise OSError: EXDEV if the file system has no hard links, and mv(1) then copies.
    """
    if _is(destination, path_fd):
        return  # like rename(2): two names of one file stay
    fresh = _fresh()
    try:
        _link(path_fd, fresh, destination.parent)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise OSError(errno.EXDEV, "no hard link can be made") from error
        raise
    try:
        _rename(fresh, destination)
        if _is(source, path_fd):
            os.unlink(source.name, dir_fd=source.parent)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=destination.parent)


def place_copy(path_fd: int, target: ResolvedPath) -> None:
    """Put a copy of the file of an O_PATH descriptor at `target`, in place of any other file.

    Raise OSError EXDEV for a file that `check_copied` refuses.
    """
    check_copied(path_fd)
    status = os.fstat(path_fd)
    fresh = _fresh()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    writing = os.open(fresh, flags, 0o600, dir_fd=target.parent)
    try:
        copy(path_fd, writing)
        os.fchmod(writing, status.st_mode & 0o777)
        os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
        _rename(fresh, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=target.parent)
        raise
    finally:
        os.close(writing)


def separate(path_fd: int, target: ResolvedPath, *, empty: bool = False) -> int:
    """Make `target` a separate file, and return a descriptor of it.

    The content is that of the file of an O_PATH descriptor that `target` led to. `empty`: without
    the content. The other names may lie outside of the directory, as for packages that pnpm and uv
    link from a store. Raise OSError EROFS for a file that is too large or belongs to another user.
    """
    status = os.fstat(path_fd)
    if status.st_uid != os.geteuid() or (status.st_size > COPY_MAX and not empty):
        raise OSError(errno.EROFS, "the file has further names")
    fresh = _fresh()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    writing = os.open(fresh, flags, 0o600, dir_fd=target.parent)
    try:
        if not empty:
            copy(path_fd, writing)
        os.fchown(writing, -1, status.st_gid)
        os.fchmod(writing, status.st_mode & 0o777)
        os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
        if not _is(target, path_fd):  # the user has saved the file in the meantime
            raise BlockingIOError(errno.EAGAIN, "the file was replaced")
        _rename(fresh, target)
    except BaseException:
        os.close(writing)
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=target.parent)
        raise
    return writing


def check_copied(path_fd: int) -> None:
    """Raise OSError EXDEV for anything but a regular file of at most COPY_MAX bytes: mv(1) and
    others then copy it themselves."""
    status = os.fstat(path_fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > COPY_MAX:
        raise OSError(errno.EXDEV, "cannot be copied here")


def copy(path_fd: int, writing: int) -> None:
    """Copy the first COPY_MAX bytes of a file that passed `check_copied`."""
    reading = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < COPY_MAX and (sent := os.sendfile(writing, reading, done, 1 << 20)):
            done += sent
    finally:
        os.close(reading)


def _link(path_fd: int, name: str, directory: int) -> None:
    os.link(f"/proc/self/fd/{path_fd}", name, dst_dir_fd=directory, follow_symlinks=True)


def _rename(name: str, target: ResolvedPath) -> None:
    os.rename(name, target.name, src_dir_fd=target.parent, dst_dir_fd=target.parent)


def _is(target: ResolvedPath, path_fd: int) -> bool:
    """Return whether the name leads to the file of a descriptor."""
    try:
        status = os.lstat(target.name, dir_fd=target.parent)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(path_fd))


def is_fresh(name: str) -> bool:
    """Return whether a guard makes such names, to rename them at once."""
    return _FRESH.fullmatch(name) is not None


def _fresh() -> str:
    return f".sbx-{secrets.token_hex(8)}"
