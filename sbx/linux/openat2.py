"""openat2(2): open a path with rules about its resolution. Linux 5.6, syscall 437.

A check of a path before it is opened loses a race against a process that renames a directory or
plants a symlink in between. With RESOLVE_BENEATH and the similar flags, Linux itself enforces the
rules while it resolves the path.

    ELOOP   RESOLVE_NO_SYMLINKS met a symlink (with O_PATH | O_NOFOLLOW, a symlink at the end of
            the path is opened, not followed)
    EXDEV   RESOLVE_BENEATH would have left the directory, RESOLVE_NO_XDEV crossed a mount
    EAGAIN  `..` raced with a rename, or O_NONBLOCK met a lease: the caller may try again
    ENOSYS  an older Linux; EPERM from the seccomp filters of some container runtimes
"""

import ctypes
import functools
import os

from sbx.linux import libc

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

_NR_OPENAT2 = 437  # the same on every architecture
_AT_FDCWD = -100


class _OpenHow(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


def openat2(dir_fd: int, path: bytes, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """Open `path` relative to `dir_fd` and return the new fd, which is close-on-exec.

    `mode` must be 0 unless `flags` create a file. Raise OSError as listed above.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    while True:
        try:
            return libc.syscall(
                "openat2", _NR_OPENAT2, dir_fd, path, ctypes.byref(how), ctypes.sizeof(how)
            )
        except InterruptedError:  # as Python's own open does (PEP 475)
            continue


@functools.cache
def supported() -> bool:
    """Return whether this Linux has openat2 and allows this process to use it."""
    try:
        os.close(openat2(_AT_FDCWD, b"/", os.O_PATH | os.O_DIRECTORY))
    except OSError:
        return False
    return True
