"""ioctl_iflags(2): whether a directory compares file names without regard to case.

ext4, f2fs and tmpfs have a flag for this on each directory (FS_CASEFOLD_FL). File systems without
such flags, such as FAT and NTFS, always ignore case.
"""

import fcntl
import os
import struct

_GET_FLAGS = 0x80086601
_CASE_FOLD = 0x40000000


def may_fold_case(directory: int) -> bool:
    """Return whether `a` and `A` may be the same name in this directory.

    Return True if Linux does not report the flags of the directory.
    """
    flags = bytearray(8)
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return True
    try:
        fcntl.ioctl(fd, _GET_FLAGS, flags)
    except OSError:
        return True
    finally:
        os.close(fd)
    return bool(struct.unpack("=Q", flags)[0] & _CASE_FOLD)
