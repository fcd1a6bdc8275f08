"""Project quotas: quotactl_fd(2) of linux 5.14, and ioctl_xfs_fsgetxattr(2) for who is charged.

A project is a number that files carry. What is made in a directory with `FS_XFLAG_PROJINHERIT`
carries that directory's, and linux refuses (EDQUOT on ext4, ENOSPC on xfs) what would take the
files of one project beyond its limits, for everybody without CAP_SYS_RESOURCE. Only in the initial
user namespace can a file be given another project, so nobody inside a jail can get out of theirs.
rename(2) and link(2) into such a directory are EXDEV for a file of another project.

ENOSYS  no such call, or a file system without quotas
ESRCH   quotas are not turned on for it
EPERM   setting limits takes CAP_SYS_ADMIN in the initial user namespace
ENOTTY  EOPNOTSUPP  the file system knows no projects
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
_ENFORCED = 1 << 5  # FS_QUOTA_PDQ_ENFD; ext4 counts projects without it where it is not asked to
_STATV = struct.Struct("=bBHI")
_STATV_SIZE = 256
_DQBLK = struct.Struct("=8QII")
_BLOCK = 1024  # of limits, whatever the file system's own is
_BLOCK_LIMITS_AND_INODE_LIMITS = 1 | 4

_FSXATTR = struct.Struct("=5I8s")
_FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
_PROJINHERIT = 0x200


class Used(NamedTuple):
    """What a project takes now, and may: bytes and inodes; 0 is no limit."""

    bytes: int
    inodes: int
    bytes_max: int
    inodes_max: int


def enforced(fd: int) -> bool:
    """Whether the file system that `fd` (O_PATH will do) lies on holds projects to their limits.

    Raises OSError as listed above.
    """
    told = ctypes.create_string_buffer(_STATV.pack(1, 0, 0, 0), _STATV_SIZE)
    _quotactl(fd, _XGETQSTATV, 0, told)
    return bool(_STATV.unpack_from(told)[2] & _ENFORCED)


def limit(fd: int, project: int, *, bytes_max: int, inodes_max: int) -> None:
    """Set the hard limits of a project there. Raises OSError."""
    blocks = -(-bytes_max // _BLOCK)
    asked = _DQBLK.pack(blocks, 0, 0, inodes_max, 0, 0, 0, 0, _BLOCK_LIMITS_AND_INODE_LIMITS, 0)
    _quotactl(fd, _SETQUOTA, project, ctypes.create_string_buffer(asked, len(asked)))


def used(fd: int, project: int) -> Used:
    """Raises OSError; ESRCH for a project that has neither files nor limits."""
    told = ctypes.create_string_buffer(_DQBLK.size)
    _quotactl(fd, _GETQUOTA, project, told)
    blocks, _, taken, inodes_max, _, inodes, *_ = _DQBLK.unpack(told.raw)
    return Used(taken, inodes, blocks * _BLOCK, inodes_max)


def project(fd: int) -> int:
    """Which project an open file or directory (not O_PATH) is charged to: 0 is nobody's, and what
    all of a file system without projects has."""
    try:
        return _attributes(fd)[3]
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return 0
        raise


def assign(fd: int, project: int, *, inherited: bool) -> None:
    """Charge an open file or directory to a project; `inherited`: what will be made in it, too.

    Raises OSError: EDQUOT where the project has no room for it, EINVAL in a user namespace.
    """
    flags, extent, extents, _, cow, rest = _attributes(fd)
    flags = flags | _PROJINHERIT if inherited else flags & ~_PROJINHERIT
    fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, _FSXATTR.pack(flags, extent, extents, project, cow, rest))


def join(fd: int, other: int) -> None:
    """Charge an open file to the project that another is charged to. Raises OSError."""
    wanted = project(other)
    if project(fd) != wanted:
        assign(fd, wanted, inherited=False)


def _attributes(fd: int) -> tuple[int, int, int, int, int, bytes]:
    told = fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, bytes(_FSXATTR.size))
    found: tuple[int, int, int, int, int, bytes] = _FSXATTR.unpack(told)
    return found


def _quotactl(fd: int, command: int, identity: int, data: object) -> None:
    asked = ctypes.c_uint(command << 8 | _PROJECT)
    libc.syscall("quotactl_fd", _NR_QUOTACTL_FD, fd, asked, ctypes.c_uint(identity), data)
