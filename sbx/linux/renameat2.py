"""renameat2(2): rename with flags. Linux 3.15. Not every file system supports the flags.

EEXIST  RENAME_NOREPLACE, and the new name exists
ENOENT  RENAME_EXCHANGE, and one of the two names does not exist
EINVAL  the file system does not support the flag
"""

import errno
import os

from sbx.linux import libc

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def rename_new(source: int, name: bytes, target: int, new: bytes) -> None:
    """Rename `name` in the directory fd `source` to `new` in `target`, if `new` does not exist yet.

    On a file system without RENAME_NOREPLACE, check first whether `new` exists. There, a file that
    is created between the check and the rename is replaced, as by rename(2). Raise OSError, mainly
    EEXIST.
    """
    try:
        libc.call("renameat2", source, name, target, new, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
    else:
        return
    try:
        os.stat(new, dir_fd=target, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)
        return
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def exchange(source: int, name: bytes, target: int, other: bytes) -> bool:
    """Exchange `name` in the directory fd `source` and `other` in `target` atomically.

    Neither name is missing at any time. Return False on a file system without RENAME_EXCHANGE.
    Raise OSError.
    """
    try:
        libc.call("renameat2", source, name, target, other, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        return False
    return True
