"""mount(2), umount2(2), and mounts that are created before they are attached to a path.

A *detached* tree is an open file. `open_tree` clones it where it is visible. `restrict_tree` limits
its use. A process that receives the file (SCM_RIGHTS of unix(7)) attaches it with `attach`, in a
mount namespace that never saw the original location. Linux 5.12: open_tree(2), mount_setattr(2),
move_mount(2).
"""

import ctypes
import errno
import os
import stat
import sys
from enum import IntFlag

from sbx.linux import libc


class MountFlag(IntFlag):
    """MS_* of sys/mount.h."""

    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    REMOUNT = 32
    BIND = 4096
    REC = 16384
    PRIVATE = 1 << 18
    SLAVE = 1 << 19


# Combined once, here: each `|` of an IntFlag takes 5 µs, and 20 pages in a fork.
_SLAVE = MountFlag.REC | MountFlag.SLAVE
_PRIVATE = MountFlag.REC | MountFlag.PRIVATE
_BIND = MountFlag.BIND | MountFlag.REC
_TMPFS = MountFlag.NOSUID | MountFlag.NODEV
_RESIZED = MountFlag.REMOUNT | _TMPFS
_PROC = MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC
_DEVPTS = MountFlag.NOSUID | MountFlag.NOEXEC
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

_NR_OPEN_TREE, _NR_MOVE_MOUNT, _NR_MOUNT_SETATTR = 428, 429, 442  # on every architecture
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x04
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_STATX_MNT_ID, _MNT_ID_AT = 0x1000, 144  # the field, and its offset in struct statx
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_MOUNT_ATTR_IDMAP = 0x100000


class _MountAttr(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def receive_only(path: str) -> None:
    """Let mounts from outside still appear below `path`, but do not propagate its mounts
    (MS_SLAVE)."""
    _mount("none", path, None, _SLAVE)


def private(path: str) -> None:
    """Isolate `path`: neither receive mounts from outside nor propagate its own (MS_PRIVATE)."""
    _mount("none", path, None, _PRIVATE)


def bind(source: str, target: str) -> None:
    """Show the tree at `source`, with all mounts below it, at `target` as well."""
    _mount(source, target, None, _BIND)


def tmpfs(target: str, options: str) -> None:
    """Mount a new tmpfs(5) at `target`; `options` as in mount(8), such as `mode=0755,size=1m`."""
    _mount("tmpfs", target, "tmpfs", _TMPFS, options)


def resize_tmpfs(target: str, size: int, mode: str) -> None:
    """Set the size in bytes of the tmpfs(5) at `target`, and the mode (octal) of its top directory.

    Its files stay. It is nosuid and nodev afterwards, as `tmpfs` created it. Raise OSError EINVAL
    if it already contains more than `size`. Linux rounds the size up to whole pages; a size of 0
    would be no limit at all.
    """
    _mount("tmpfs", target, None, _RESIZED, f"size={size}")
    os.chmod(target, int(mode, 8))  # a remount accepts `mode=` and ignores it


def proc(target: str) -> None:
    """Mount the proc(5) of the caller's PID namespace at `target`.

    Raise OSError EPERM in a user namespace that cannot already see a complete proc(5), for example
    because parts of it are covered.
    """
    _mount("proc", target, "proc", _PROC)


def devpts(target: str, *, ptys_max: int) -> None:
    """Mount a new instance of devpts at `target`, with at most `ptys_max` pseudo-terminals.

    Beyond the limit, opening another one fails with ENOSPC. Without the limit, one instance can
    take all pseudo-terminals of the machine except the reserve of the first instance:
    `kernel.pty.max` and `kernel.pty.reserve`.
    """
    options = f"newinstance,ptmxmode=0666,mode=620,max={ptys_max}"
    _mount("devpts", target, "devpts", _DEVPTS, options)


def detach(target: str) -> None:
    """Unmount lazily: remove the mount from the tree now, and free it when its last user ends."""
    libc.call("umount2", target.encode(), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def open_tree(path: str) -> int:
    """Clone the tree at `path`, with all mounts below it, as a detached tree.

    Return a close-on-exec fd that the caller must close. An unattached tree disappears with its
    last fd. Raise OSError ELOOP if `path` itself is a symlink; symlinks on the way to it are
    followed. Needs CAP_SYS_ADMIN over the caller's mount namespace.
    """
    tree = libc.syscall(
        "open_tree",
        _NR_OPEN_TREE,
        _AT_FDCWD,
        path.encode(),
        # In a user namespace, a clone without the mounts below could reveal the files that those
        # mounts hide. Therefore Linux returns EINVAL without AT_RECURSIVE.
        _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_SYMLINK_NOFOLLOW,
    )
    if stat.S_ISLNK(os.fstat(tree).st_mode):  # Linux has cloned the symlink itself
        os.close(tree)
        raise OSError(errno.ELOOP, f"open_tree: {os.strerror(errno.ELOOP)}")
    return tree


def clone(mounted: int) -> int:
    """Clone the tree of an fd, with all mounts below it, as a detached tree.

    The fd is one of `open_tree` or an O_PATH fd. Before Linux 6.15, raise OSError EINVAL for a tree
    that is detached itself.
    """
    return libc.syscall(
        "open_tree",
        _NR_OPEN_TREE,
        mounted,
        b"",
        _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH,
    )


def restrict_tree(tree: int, *, read_only: bool, userns: int | None = None) -> None:
    """Make all mounts of a detached tree nosuid, nodev and private, and optionally read-only.

    Private, because the clone of a shared mount would propagate and receive later mounts.

    With `userns`, an fd of a user namespace, also make the mounts idmapped: the owner of a file on
    disk is shown as the id to which the namespace maps that number. Either all mounts change or
    none. Raise OSError EINVAL if a file system does not support idmapped mounts. Raise EPERM
    without CAP_SYS_ADMIN over the file system, and for a mount that is idmapped already.
    """
    flags = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if read_only else 0)
    attributes = _MountAttr(attr_set=flags, propagation=MountFlag.PRIVATE)
    if userns is not None:
        attributes.attr_set |= _MOUNT_ATTR_IDMAP
        attributes.userns_fd = userns
    libc.syscall(
        "mount_setattr",
        _NR_MOUNT_SETATTR,
        tree,
        b"",
        _AT_EMPTY_PATH | _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def make_read_only(path: str) -> None:
    """Make every mount at `path` and below it read-only and nosuid.

    This affects the mounts that the caller's mount namespace has at this time. Device nodes remain
    writable. Raise OSError EINVAL if `path` is not a mount point.
    """
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    libc.syscall(
        "mount_setattr",
        _NR_MOUNT_SETATTR,
        _AT_FDCWD,
        path.encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def set_read_only(mounted: int, *, on: bool) -> None:
    """Make one mount read-only or writable. The mounts below it stay unchanged.

    `mounted` is an fd of the top directory of the mount. Raise OSError EINVAL for any other fd.
    """
    attributes = _MountAttr(**{"attr_set" if on else "attr_clr": _MOUNT_ATTR_RDONLY})
    libc.syscall(
        "mount_setattr",
        _NR_MOUNT_SETATTR,
        mounted,
        b"",
        _AT_EMPTY_PATH,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def number_of(fd: int) -> int:
    """Return the number that Linux gives to the mount on which a file was opened.

    Two mounts of one file system have different numbers. statx(2), Linux 5.8.
    """
    buffer = ctypes.create_string_buffer(256)
    libc.call("statx", fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID, buffer)
    return int.from_bytes(buffer.raw[_MNT_ID_AT : _MNT_ID_AT + 8], sys.byteorder)


def attach(tree: int, target: int) -> None:
    """Attach a detached tree to the directory or file of the fd `target` (O_PATH is enough).

    Paths lead into the tree only after this call. A tree has one place: a second call moves it.
    Raise OSError EINVAL if the tree is attached in another mount namespace, and for a directory
    onto a file or a file onto a directory. `target` must have been opened in the caller's mount
    namespace.
    """
    libc.syscall(
        "move_mount",
        _NR_MOVE_MOUNT,
        tree,
        b"",
        target,
        b"",
        _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH,
    )


def _mount(
    source: str, target: str, kind: str | None, flags: MountFlag, options: str | None = None
) -> None:
    libc.call(
        "mount",
        source.encode(),
        target.encode(),
        kind and kind.encode(),
        int(flags),
        options and options.encode(),
    )
