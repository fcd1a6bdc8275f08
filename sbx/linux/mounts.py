"""mount(2), umount2(2)."""

from enum import IntFlag

from sbx.linux import libc


class MountFlag(IntFlag):
    """MS_* of sys/mount.h."""

    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    REMOUNT = 32
    BIND = 4096
    REC = 16384
    SLAVE = 1 << 19


_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8


def receive_only(path: str) -> None:
    """Let mounts from outside still arrive below `path`, and none of ours leave (MS_SLAVE)."""
    _mount("none", path, None, MountFlag.REC | MountFlag.SLAVE)


def bind(source: str, target: str) -> None:
    """Show the tree at `source`, with all that is mounted below it, at `target` as well."""
    _mount(source, target, None, MountFlag.BIND | MountFlag.REC)


def tmpfs(target: str, options: str) -> None:
    """A fresh tmpfs(5) at `target`; `options` as in mount(8), for instance `mode=0755,size=1m`."""
    _mount("tmpfs", target, "tmpfs", MountFlag.NOSUID | MountFlag.NODEV, options)


def detach(target: str) -> None:
    """Unmount lazily: gone from the tree at once, from memory when its last user ends."""
    libc.call("umount2", target.encode(), _MNT_DETACH | _UMOUNT_NOFOLLOW)


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
