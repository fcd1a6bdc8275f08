"""syncfs(2): all of one file system to its disk, content and names alike. Linux 2.6.39.

Since linux 5.8 it also tells (EIO, ENOSPC) of what could not be written back since `fd` was opened.

EBADF  an fd of O_PATH
"""

from sbx.linux import libc


def syncfs(fd: int) -> None:
    """Return when all that was written to the file system of `fd` so far is on its disk."""
    libc.call("syncfs", fd)
