"""ioctl_ficlone(2): copy a file so that both share their blocks until one of them is written.

Btrfs, xfs, bcachefs, and overlayfs above one of these support it. ext4 and tmpfs do not.

EOPNOTSUPP  ENOTTY  EINVAL  the file system does not support such copies
EXDEV       the files are on different file systems
"""

import errno
import fcntl

_FICLONE = 0x40049409
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.EPERM)


def clone(source: int, target: int) -> bool:
    """Give the open file `target` the content of `source` at once.

    Return False, without any change, if the file system does not support it. Raise OSError for
    other errors, mainly ENOSPC and EDQUOT.
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True
