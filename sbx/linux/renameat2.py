"""renameat2(2): rename with a rule. Linux 3.15, and not on every file system.

EEXIST  RENAME_NOREPLACE, and the new name is there
ENOENT  RENAME_EXCHANGE, and one of the two is not there
EINVAL  the file system knows no such rule
"""

import errno
import os

from sbx.linux import libc

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def rename_new(source: int, name: bytes, target: int, new: bytes) -> None:
    """Rename `name` in the directory fd `source` to `new` in `target`, where that is not there yet.

    On a file system without the rule it is looked for first, and one that is made in that very
    moment is replaced as by rename(2). Raises OSError, EEXIST above all.
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
    """Let `name` in the directory fd `source` and `other` in `target` change places, so that
    neither is missing for a moment; False on a file system without the rule. Raises OSError."""
    try:
        libc.call("renameat2", source, name, target, other, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        return False
    return True
