"""syncfs(2): write all content and names of one file system to its disk. Linux 2.6.39.

Since Linux 5.8 it also reports (EIO, ENOSPC) data that could not be written back since `fd` was
opened.

EBADF  an fd of O_PATH
"""

from sbx.linux import libc


def syncfs(fd: int) -> None:
    """Return when all earlier writes to the file system of `fd` are on its disk."""
    libc.call("syncfs", fd)
