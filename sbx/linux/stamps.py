"""The time stamps that Linux gives to files: fstatfs(2), clock_gettime(2).

A write sets mtime and ctime to the coarse clock, so two writes within one of its ticks may have the
same stamp. On a file system in memory, a write to a mapped page sets neither.
"""

import ctypes
import time

from sbx.linux import libc

TICK_NS = 10_000_000  # the longest tick, with CONFIG_HZ=100
_REALTIME_COARSE = 5  # linux/time.h
_STATFS_SIZE = 256  # larger than any struct statfs; f_type is its first field, one word long
_IN_MEMORY = (0x01021994, 0x858458F6)  # tmpfs, ramfs: linux/magic.h


def now_ns() -> int:
    """Return the stamp of a file that is written now, or a slightly earlier one."""
    return time.clock_gettime_ns(_REALTIME_COARSE)


def tells_every_write(fd: int) -> bool:
    """Return whether the file system of `fd` (O_PATH is enough) stamps a file at every write.

    Raise OSError.
    """
    buffer = ctypes.create_string_buffer(_STATFS_SIZE)
    libc.call("fstatfs", fd, buffer)
    return ctypes.c_ulong.from_buffer(buffer).value not in _IN_MEMORY
