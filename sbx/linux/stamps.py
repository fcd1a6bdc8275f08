"""How linux stamps files with the time: fstatfs(2), clock_gettime(2).

A write sets mtime and ctime to the coarse clock, so two writes in one tick of it may have the same.
On a file system in memory a write to a mapped page sets neither.
"""

import ctypes
import time

from sbx.linux import libc

TICK_NS = 10_000_000  # the longest there is, where CONFIG_HZ is 100
_REALTIME_COARSE = 5  # linux/time.h
_STATFS_SIZE = 256  # more than struct statfs has anywhere; f_type comes first, as long as a word
_IN_MEMORY = (0x01021994, 0x858458F6)  # tmpfs, ramfs: linux/magic.h


def now_ns() -> int:
    """What a file that is written now is stamped with, or a little less."""
    return time.clock_gettime_ns(_REALTIME_COARSE)


def tells_every_write(fd: int) -> bool:
    """Whether the file system of `fd` (O_PATH will do) stamps files for whatever is written to
    them. Raises OSError."""
    told = ctypes.create_string_buffer(_STATFS_SIZE)
    libc.call("fstatfs", fd, told)
    return ctypes.c_ulong.from_buffer(told).value not in _IN_MEMORY
