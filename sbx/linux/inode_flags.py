"""ioctl_iflags(2): flags of an inode, and of a subvolume of btrfs (linux/btrfs.h).

ext4, f2fs and tmpfs have a flag on each directory that compares names without regard to case
(FS_CASEFOLD_FL). File systems without such flags, such as FAT and NTFS, always ignore case.

A file with FS_IMMUTABLE_FL or FS_APPEND_FL cannot be removed, also not by root. Only a process with
CAP_LINUX_IMMUTABLE changes these two. The owner of a subvolume of btrfs can make it read-only.
"""

import fcntl
import os
import stat
import struct
from contextlib import suppress

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_IMMUTABLE, _APPEND, _CASE_FOLD = 0x10, 0x20, 0x40000000
_SUBVOLUME_GET_FLAGS, _SUBVOLUME_SET_FLAGS = 0x80089419, 0x4008941A
_SUBVOLUME_READ_ONLY = 2


def may_fold_case(directory: int) -> bool:
    """Return whether `a` and `A` may be the same name in this directory.

    Return True if Linux does not report the flags of the directory.
    """
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return True
    try:
        return bool(_flags(fd, _GET_FLAGS) & _CASE_FOLD)
    except OSError:
        return True
    finally:
        os.close(fd)


def clear_protection(path_fd: int) -> None:
    """Clear the flags that keep the file or directory `path_fd` (O_PATH suffices) from removal, as
    far as the caller may. Do not open other kinds of files: an open may have effects."""
    mode = os.fstat(path_fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return
    with suppress(OSError):
        fd = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _clear(fd, _SUBVOLUME_GET_FLAGS, _SUBVOLUME_SET_FLAGS, _SUBVOLUME_READ_ONLY)
            _clear(fd, _GET_FLAGS, _SET_FLAGS, _IMMUTABLE | _APPEND)
        finally:
            os.close(fd)


def _clear(fd: int, get: int, set_: int, bits: int) -> None:
    with suppress(OSError):  # another file system, or no right: the removal reports the error
        flags = _flags(fd, get)
        if flags & bits:
            fcntl.ioctl(fd, set_, struct.pack("=Q", flags & ~bits))


def _flags(fd: int, request: int) -> int:
    flags = bytearray(8)
    fcntl.ioctl(fd, request, flags)
    return int(struct.unpack("=Q", flags)[0])
