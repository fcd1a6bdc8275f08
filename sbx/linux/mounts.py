"""mount(2), umount2(2), and mounts that are made before they have a place.

A *detached* tree is an open file: `open_tree` clones it where it can be seen, `restrict_tree` says
what may be done with it, and whoever is given the file (SCM_RIGHTS of unix(7)) puts it in place by
`attach`, in a mount namespace that never saw where it came from. Linux 5.12: open_tree(2),
mount_setattr(2), move_mount(2).
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

    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    REMOUNT = 32
    BIND = 4096
    REC = 16384
    PRIVATE = 1 << 18
    SLAVE = 1 << 19


# Put together here, once: each `|` of an IntFlag takes 5 µs, and 20 pages in a fork.
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
_STATX_MNT_ID, _MNT_ID_AT = 0x1000, 144  # which field, and its place in struct statx
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
    """Let mounts from outside still arrive below `path`, and none of ours leave (MS_SLAVE)."""
    _mount("none", path, None, _SLAVE)


def private(path: str) -> None:
    """Let no mount made outside arrive below `path`, and none of ours leave (MS_PRIVATE)."""
    _mount("none", path, None, _PRIVATE)


def bind(source: str, target: str) -> None:
    """Show the tree at `source`, with all that is mounted below it, at `target` as well."""
    _mount(source, target, None, _BIND)


def tmpfs(target: str, options: str) -> None:
    """A fresh tmpfs(5) at `target`; `options` as in mount(8), for instance `mode=0755,size=1m`."""
    _mount("tmpfs", target, "tmpfs", _TMPFS, options)


def resize_tmpfs(target: str, size: int, mode: str) -> None:
    """Give the tmpfs(5) at `target` another size in bytes, and its top directory `mode` (octal).

    What is in it stays. It is nosuid and nodev afterwards, as `tmpfs` made it. EINVAL when more is
    in it already than `size`. Linux rounds up to whole pages; 0 would be no limit at all.
    """
    _mount("tmpfs", target, None, _RESIZED, f"size={size}")
    os.chmod(target, int(mode, 8))  # a remount takes `mode=`, and changes nothing


def proc(target: str) -> None:
    """The proc(5) of the caller's PID namespace at `target`.

    EPERM in a user namespace that cannot see a whole one already: parts of it covered, say.
    """
    _mount("proc", target, "proc", _PROC)


def devpts(target: str, *, ptys_max: int) -> None:
    """Mount a new instance of devpts at `target`, with at most `ptys_max` pseudo-terminals.

    Without that limit, one instance can take all pseudo-terminals of the machine but the reserve of
    the first instance: `kernel.pty.max` and `kernel.pty.reserve`. ENOSPC beyond it.
    """
    options = f"newinstance,ptmxmode=0666,mode=620,max={ptys_max}"
    _mount("devpts", target, "devpts", _DEVPTS, options)


def detach(target: str) -> None:
    """Unmount lazily: gone from the tree at once, from memory when its last user ends."""
    libc.call("umount2", target.encode(), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def open_tree(path: str) -> int:
    """Clone the tree at `path`, with all that is mounted below it, as a detached tree.

    Gives a close-on-exec fd of it, for the caller to close; unless attached, the tree goes with its
    last fd. ELOOP when `path` itself is a symlink; those on the way to it are followed. Needs
    CAP_SYS_ADMIN over the caller's mount namespace.
    """
    tree = libc.syscall(
        "open_tree",
        _NR_OPEN_TREE,
        _AT_FDCWD,
        path.encode(),
        # In a user namespace, a clone that left out what lies below could show what that hides:
        # EINVAL without AT_RECURSIVE.
        _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_SYMLINK_NOFOLLOW,
    )
    if stat.S_ISLNK(os.fstat(tree).st_mode):  # not followed, and cloned like any other file
        os.close(tree)
        raise OSError(errno.ELOOP, f"open_tree: {os.strerror(errno.ELOOP)}")
    return tree


def clone(mounted: int) -> int:
    """Clone what the fd of `open_tree` or O_PATH shows, with all that is mounted below it, as a
    detached tree. Before Linux 6.15 EINVAL for a tree that is detached itself."""
    return libc.syscall(
        "open_tree",
        _NR_OPEN_TREE,
        mounted,
        b"",
        _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH,
    )


def restrict_tree(tree: int, *, read_only: bool, userns: int | None = None) -> None:
    """Make all mounts of a detached tree nosuid and nodev, and read-only if asked.

    And private: a clone of a shared mount would pass on what is mounted in it, and receive.

    With `userns`, an fd of a user namespace, the mounts are idmapped as well: an owner on disk is
    shown as the id to which the namespace maps that number. All mounts change, or none. EINVAL
    where a file system has no idmapped mounts; EPERM without CAP_SYS_ADMIN over the file system,
    and for a mount that is idmapped already.
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
    """Make every mount at `path` and below it read-only and nosuid, as the caller's mount namespace
    has them now. Device nodes can still be written to. EINVAL where `path` is no mount point."""
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
    """Make the one mount whose top directory the fd names read-only, or writable; what is mounted
    below it stays as it is. EINVAL where the fd names no top of a mount."""
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
    """Which mount a file was opened on, as linux numbers them: statx(2), linux 5.8. Two mounts of
    one file system differ."""
    found = ctypes.create_string_buffer(256)
    libc.call("statx", fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID, found)
    return int.from_bytes(found.raw[_MNT_ID_AT : _MNT_ID_AT + 8], sys.byteorder)


def attach(tree: int, target: int) -> None:
    """Put a detached tree onto the directory or file that the fd `target` (O_PATH) names.

    Only then do paths lead into it. A tree has one place, so attached again it moves; what is
    attached in another mount namespace is EINVAL, as is a directory onto a file, or a file onto a
    directory. `target` must have been opened in the caller's mount namespace.
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
