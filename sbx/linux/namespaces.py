"""namespaces(7), unshare(2), setns(2), user_namespaces(7)."""

import os
from collections.abc import Sequence
from contextlib import suppress
from enum import IntFlag

from sbx.linux import libc

_UIDS = 0xFFFFFFFF  # the number -1 is not a uid


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
    """Move the calling process into new namespaces. USER is EINVAL in a process with threads.

    PID moves only the children to come, and the first of them is PID 1 there.
    """
    libc.call("unshare", int(namespaces))


def join(fd: int, namespaces: Namespace) -> None:
    """Move the calling process into namespaces that exist: setns(2).

    `fd` is a pidfd, whose process lends all the `namespaces` named at once (linux 5.8), or a file
    of /proc/PID/ns, which must be of the kind named. USER and MOUNT are EINVAL in a process with
    threads, USER in one that is there already; PID moves only the children to come.
    """
    libc.call("setns", fd, int(namespaces))


def unmapped_uid() -> int | None:
    """Return the uid that stands for all users without one in the user namespace of the caller.

    None where every uid is mapped, as in the initial namespace: there it is a user like others.
    """
    with open("/proc/self/uid_map") as file:
        mapped = sum(int(line.split()[2]) for line in file)
    if mapped >= _UIDS:
        return None
    with open("/proc/sys/kernel/overflowuid") as file:
        return int(file.read())


def map_ids(inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Write the maps of a user namespace just entered: one uid and one gid, in this order.

    setgroups(2) is denied first, without which an unprivileged process may not write gid_map.
    `outside` are the effective ids that the caller had. A process that changed its ids is no longer
    dumpable, and gets EACCES here: see prctl.set_dumpable.
    """
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inside[0]} {outside[0]} 1")
    _write("/proc/self/gid_map", f"{inside[1]} {outside[1]} 1")


def map_ids_to_self(uid: int, gid: int) -> None:
    """As `map_ids`; `uid` and `gid` keep their numbers."""
    map_ids((uid, gid), (uid, gid))


def map_ranges(pid: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Write the maps of a user namespace that the process `pid` made: ids that keep their numbers.

    A range is the first id and how many; each is one of uids and of gids. For a caller with
    CAP_SETUID and CAP_SETGID in the namespace around, EPERM else. A map can be written once.
    """
    lines = "".join(f"{first} {first} {count}\n" for first, count in ranges)
    _write(f"/proc/{pid}/uid_map", lines)
    _write(f"/proc/{pid}/gid_map", lines)


def map_one(pid: int, inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Write the maps of a user namespace that the process `pid` made: one uid and one gid, in this
    order. Needs the same capabilities as `map_ranges`."""
    _write(f"/proc/{pid}/uid_map", f"{inside[0]} {outside[0]} 1")
    _write(f"/proc/{pid}/gid_map", f"{inside[1]} {outside[1]} 1")


def forbid_user_namespaces() -> None:
    """Let no user namespace be made in the caller's own or below it: unshare(USER) is ENOSPC.

    For good, once nobody there has CAP_SYS_RESOURCE over it any more, which the call needs too:
    EPERM or EACCES without. Others are not touched. Through /proc/sys, which must be writable.
    """
    _write("/proc/sys/user/max_user_namespaces", "0")


def limit_inotify(*, instances: int, watches: int) -> None:
    """Limit inotify(7) for each uid of the caller's user namespace and of those below it.

    Linux charges an instance to the user namespace of its maker and to each one above, and every
    namespace has its own maximum. For good, and under the conditions of `forbid_user_namespaces`.
    """
    with suppress(FileNotFoundError):  # a Linux without inotify
        _write("/proc/sys/user/max_inotify_instances", str(instances))
        _write("/proc/sys/user/max_inotify_watches", str(watches))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
