"""ioctl_ficlone(2): a copy of a file that shares its blocks until one of the two is written.

Btrfs, xfs, bcachefs, overlayfs above one of these; not ext4, nor tmpfs.

EOPNOTSUPP  ENOTTY  EINVAL  EXDEV  the file system has no such copies, or these are two of them
"""

import errno
import fcntl

_FICLONE = 0x40049409
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.EPERM)


def clone(source: int, target: int) -> bool:
    """Give the open file `target` the content of `source`, at once; False where that cannot be had,
    and nothing has changed. Raises OSError, ENOSPC and EDQUOT above all."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise
    return True
