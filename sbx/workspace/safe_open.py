"""Open a path beneath a directory fd, without following a symlink or crossing a mount.

The code inside renames, links and replaces files while the host opens them. A check before the open
would race with it, so the open itself must refuse. `by_openat2` lets Linux refuse during its own
path walk. `by_walk`, for hosts without openat2, holds an fd of each directory on the way. Both
behave the same and fail with the same errors:

    ELOOP   a symlink on the path          EXDEV    a mount point on the path
    EAGAIN  a lease, or constant renames   ENOTDIR  a component that is not a directory

With O_PATH | O_NOFOLLOW, a symlink that is the last component is itself opened, not followed.
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
    """Return `by_openat2` if this host has openat2, else `by_walk`."""
    return by_openat2 if openat2.supported() else by_walk


def by_openat2(root: int, relative: tuple[str, ...], flags: int) -> int:
    path = b"/".join(map(encoded, relative)) or b"."
    for _ in range(_ATTEMPTS):
        try:
            return openat2.openat2(root, path, flags, resolve=_RESOLVE)
        except BlockingIOError:
            continue
    raise OSError(errno.EAGAIN, "openat2: the path keeps changing")


def by_walk(root: int, relative: tuple[str, ...], flags: int) -> int:
    names = [encoded(part) for part in relative] or [b"."]
    mount = mount_id(root)
    directory = root
    try:
        for name in names[:-1]:
            child = _step(directory, name, os.O_PATH | os.O_DIRECTORY, mount)
            if directory != root:
                os.close(directory)
            directory = child
        return _step(directory, names[-1], flags, mount)
    finally:
        if directory != root:
            os.close(directory)


def permit(fd: int) -> None:
    """Give the owner rwx on the directory `fd` (O_PATH suffices): chmod 000 must not stop the host.

    Use the magic link of the fd, which leads to exactly this inode. A chmod by name would follow a
    symlink that replaced the directory, and fchmod needs an fd that the mode may forbid to open.
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o700 != 0o700:
        with suppress(PermissionError):  # not the owner: the next operation reports the error
            os.chmod(f"/proc/self/fd/{fd}", mode | 0o700)


def _step(directory: int, name: bytes, flags: int, mount: int) -> int:
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
    except NotADirectoryError:
        # O_DIRECTORY | O_NOFOLLOW fails with ENOTDIR for a symlink, openat2 with ELOOP.
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
    """Return the mount id of `fd`; st_dev would miss a bind mount of the same file system."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key == "mnt_id":
                return int(value)
    raise OSError(errno.ENOSYS, "fdinfo has no mnt_id")


def encoded(component: str) -> bytes:
    """Return the component as UTF-8 in every locale of the host; invalid bytes stay unchanged.

    Raises OSError (EINVAL) for a text that is not a plain component.
    """
    name = component.encode("utf-8", "surrogateescape")
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise OSError(errno.EINVAL, "not a plain path component")
    return name


def _loop() -> OSError:
    return OSError(errno.ELOOP, "the path contains a symlink")
