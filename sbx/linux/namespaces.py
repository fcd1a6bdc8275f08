"""namespaces(7), unshare(2), user_namespaces(7)."""

import os
from enum import IntFlag

from sbx.linux import libc


class Namespace(IntFlag):
    """CLONE_NEW* of linux/sched.h."""

    MOUNT = 0x00020000
    CGROUP = 0x02000000
    UTS = 0x04000000
    IPC = 0x08000000
    USER = 0x10000000
    PID = 0x20000000
    NET = 0x40000000


def unshare(namespaces: Namespace) -> None:
    """Move the calling process into new namespaces. USER is EINVAL in a process with threads."""
    libc.call("unshare", int(namespaces))


def map_ids_to_self(uid: int, gid: int) -> None:
    """Write the maps of a user namespace just entered: `uid` and `gid` keep their numbers.

    setgroups(2) is denied first, without which an unprivileged process may not write gid_map.
    """
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
