"""ioctl_iflags(2): whether a directory compares the names in it without their case.

ext4, f2fs and tmpfs have a flag of a directory for that (FS_CASEFOLD_FL). File systems without such
flags, as FAT and NTFS, do so always.
"""

import fcntl
import os
import struct

_GET_FLAGS = 0x80086601
_CASE_FOLD = 0x40000000


def may_fold_case(directory: int) -> bool:
    """Return whether `a` and `A` may be one name there; True where Linux has no answer."""
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
