"""The open files of a process: their limit and their numbers: setrlimit(2), fcntl(2)."""

import errno
import fcntl
import os
import resource
from typing import Self


class closing:  # noqa: N801  # like contextlib.closing
    """Close a descriptor at the end of the block."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class OwnedDescriptor:
    """An object that owns the descriptor `fd` until `close` or the end of a `with` block."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def duplicate_above(fd: int, lowest: int) -> int:
    """Return a copy of `fd` with the lowest free number from `lowest` on. It is closed by exec.

    Raise OSError EMFILE if no number is free.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # fcntl(2): `lowest` is not below RLIMIT_NOFILE
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None


def raise_nofile_limit(maximum: int) -> int:
    """Raise the soft limit of this process to its hard limit, but at most to `maximum`; return the
    limit.

    Many hosts set a soft limit of 1024 because of select(2). Jails have their own limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = maximum if hard == resource.RLIM_INFINITY else min(hard, maximum)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
