"""Open something beneath a directory fd, following no symlink and crossing no mount.

The code inside renames, links and swaps while the host opens: so nothing is checked first and
opened later. `by_openat2` lets linux refuse during its own walk; `by_walk`, for hosts without
openat2, holds every directory on the way by an fd. Both promise the same and fail alike:

    ELOOP   a symlink on the path      EXDEV    something is mounted on the path
    EAGAIN  a lease or rename storm    ENOTDIR  a component that is no directory

With O_PATH | O_NOFOLLOW a symlink that is last on the path is itself opened, not followed.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from sbx.linux import openat2

Opener = Callable[[int, tuple[str, ...], int], int]

_RESOLVE = (
    openat2.RESOLVE_BENEATH
    | openat2.RESOLVE_NO_SYMLINKS
    | openat2.RESOLVE_NO_MAGICLINKS
    | openat2.RESOLVE_NO_XDEV
)
_ATTEMPTS = 32


def opener() -> Opener:
    """The better of the two that this host has."""
    return by_openat2 if openat2.supported() else by_walk


def by_openat2(root: int, relative: tuple[str, ...], flags: int) -> int:
    path = b"/".join(map(encoded, relative)) or b"."
    for _ in range(_ATTEMPTS):
        try:
            return openat2.openat2(root, path, flags, resolve=_RESOLVE)
        except BlockingIOError:
            continue
    raise OSError(errno.EAGAIN, "openat2: the path does not hold still")


def by_walk(root: int, relative: tuple[str, ...], flags: int) -> int:
    names = [encoded(part) for part in relative] or [b"."]
    mount = mount_id(root)
    directory = root
    try:
        for name in names[:-1]:
            below = _step(directory, name, os.O_PATH | os.O_DIRECTORY, mount)
            if directory != root:
                os.close(directory)
            directory = below
        return _step(directory, names[-1], flags, mount)
    finally:
        if directory != root:
            os.close(directory)


def permit(fd: int) -> None:
    """Give the owner rwx on the directory that `fd` (O_PATH will do) holds; chmod 000 is no wall.

    By the fd's own magic link, which leads to exactly this inode: chmod by name would follow a
    symlink swapped in, and fchmod needs an fd that the mode does not permit to open.
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o700 != 0o700:
        with suppress(PermissionError):  # not the owner: what needed the right will say so
            os.chmod(f"/proc/self/fd/{fd}", mode | 0o700)


def _step(directory: int, name: bytes, flags: int, mount: int) -> int:
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
    except NotADirectoryError:
        # O_DIRECTORY | O_NOFOLLOW answers ENOTDIR for a symlink, openat2 says ELOOP.
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise _loop() from None
        raise
    try:
        if mount_id(fd) != mount:
            raise OSError(errno.EXDEV, "the path crosses a mount")
        if not flags & os.O_NOFOLLOW and stat.S_ISLNK(os.fstat(fd).st_mode):
            raise _loop()
    except OSError:
        os.close(fd)
        raise
    return fd


def mount_id(fd: int) -> int:
    """Which mount `fd` lies on; st_dev would miss a bind mount of the same file system."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key == "mnt_id":
                return int(value)
    raise OSError(errno.ENOSYS, "fdinfo has no mnt_id")


def encoded(component: str) -> bytes:
    """UTF-8 whatever the locale of the host, odd bytes as they came. Raises OSError (EINVAL)."""
    name = component.encode("utf-8", "surrogateescape")
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise OSError(errno.EINVAL, "not a plain path component")
    return name


def _loop() -> OSError:
    return OSError(errno.ELOOP, "the path contains a symlink")
