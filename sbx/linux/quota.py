"""Project quotas: quotactl_fd(2) of Linux 5.14, and ioctl_xfs_fsgetxattr(2) for the owning project.

A project is a number that files carry. A file that is created in a directory with
`FS_XFLAG_PROJINHERIT` inherits the project of the directory. Linux refuses (EDQUOT on ext4, ENOSPC
on xfs) every change that would take the files of one project beyond its limits, except by a process
with CAP_SYS_RESOURCE. Only a process in the initial user namespace can change the project of a
file. Therefore no process in a jail can leave its project. rename(2) and link(2) into such a
directory return EXDEV for a file of another project.

ENOSYS  the call does not exist, or the file system has no quotas
ESRCH   quotas are not turned on for it
EPERM   setting limits needs CAP_SYS_ADMIN in the initial user namespace
ENOTTY  EOPNOTSUPP  the file system does not support projects
"""

import ctypes
import errno
import fcntl
import struct
from typing import NamedTuple

from sbx.linux import libc

_NR_QUOTACTL_FD = 443  # the same on every architecture
_PROJECT = 2
_GETQUOTA, _SETQUOTA, _XGETQSTATV = 0x800007, 0x800008, 0x5808
_ENFORCED = 1 << 5  # FS_QUOTA_PDQ_ENFD; ext4 without the quota option counts projects without it
_STATV = struct.Struct("=bBHI")
_STATV_SIZE = 256
_DQBLK = struct.Struct("=8QII")
_BLOCK = 1024  # the unit of limits, whatever the block size of the file system is
_BLOCK_LIMITS_AND_INODE_LIMITS = 1 | 4

_FSXATTR = struct.Struct("=5I8s")
_FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
_PROJINHERIT = 0x200


class Used(NamedTuple):
    """The current use of a project and its limits, in bytes and inodes. A limit of 0 means no
    limit."""

    bytes: int
    inodes: int
    bytes_max: int
    inodes_max: int


def enforced(fd: int) -> bool:
    """Return whether the file system of `fd` (O_PATH is enough) enforces the limits of projects.

    Raise OSError as listed above.
    """
    buffer = ctypes.create_string_buffer(_STATV.pack(1, 0, 0, 0), _STATV_SIZE)
    _quotactl(fd, _XGETQSTATV, 0, buffer)
    return bool(_STATV.unpack_from(buffer)[2] & _ENFORCED)


def limit(fd: int, project: int, *, bytes_max: int, inodes_max: int) -> None:
    """Set the hard limits of a project on the file system of `fd`. Raise OSError."""
    blocks = -(-bytes_max // _BLOCK)
    request = _DQBLK.pack(blocks, 0, 0, inodes_max, 0, 0, 0, 0, _BLOCK_LIMITS_AND_INODE_LIMITS, 0)
    _quotactl(fd, _SETQUOTA, project, ctypes.create_string_buffer(request, len(request)))


def used(fd: int, project: int) -> Used:
    """Return the use and the limits of a project.

    Raise OSError: ESRCH for a project that has neither files nor limits.
    """
    buffer = ctypes.create_string_buffer(_DQBLK.size)
    _quotactl(fd, _GETQUOTA, project, buffer)
    blocks, _, taken, inodes_max, _, inodes, *_ = _DQBLK.unpack(buffer.raw)
    return Used(taken, inodes, blocks * _BLOCK, inodes_max)


def project(fd: int) -> int:
    """Return the project that an open file or directory (not O_PATH) is charged to.

    0 means that it belongs to no project. All files of a file system without projects have 0.
    """
    try:
        return _attributes(fd)[3]
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return 0
        raise


def assign(fd: int, project: int, *, inherited: bool) -> None:
    """Charge an open file or directory to a project. With `inherited`, new files in it inherit it.

    Raise OSError: EDQUOT if the project has no room for the file, EINVAL in a user namespace.
    """
    flags, extent, extents, _, cow, rest = _attributes(fd)
    flags = flags | _PROJINHERIT if inherited else flags & ~_PROJINHERIT
    fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, _FSXATTR.pack(flags, extent, extents, project, cow, rest))


def join(fd: int, other: int) -> None:
    """Charge an open file to the project of another open file. Raise OSError."""
    target_project = project(other)
    if project(fd) != target_project:
        assign(fd, target_project, inherited=False)


def _attributes(fd: int) -> tuple[int, int, int, int, int, bytes]:
    reply = fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, bytes(_FSXATTR.size))
    attributes: tuple[int, int, int, int, int, bytes] = _FSXATTR.unpack(reply)
    return attributes


def _quotactl(fd: int, command: int, identity: int, data: object) -> None:
    request = ctypes.c_uint(command << 8 | _PROJECT)
    libc.syscall("quotactl_fd", _NR_QUOTACTL_FD, fd, request, ctypes.c_uint(identity), data)
