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
    """Move the calling process into new namespaces.

    Raise OSError EINVAL for USER in a process with several threads. PID moves only later children,
    and the first of them becomes PID 1 of the new namespace.
    """
    libc.call("unshare", int(namespaces))


def join(fd: int, namespaces: Namespace) -> None:
    """Move the calling process into existing namespaces: setns(2).

    `fd` is either a pidfd or a file of /proc/PID/ns. A pidfd joins all the named `namespaces` of
    its process at once (Linux 5.8). A file must be of the named kind. Raise OSError EINVAL for USER
    and MOUNT in a process with several threads, and for USER in a process that is in that namespace
    already. PID moves only later children.
    """
    libc.call("setns", fd, int(namespaces))


def unmapped_uid() -> int | None:
    """Return the uid that stands for all unmapped users in the user namespace of the caller.

    Return None if every uid is mapped, as in the initial namespace: there this uid is a normal
    user.
    """
    with open("/proc/self/uid_map") as file:
        mapped = sum(int(line.split()[2]) for line in file)
    if mapped >= _UIDS:
        return None
    with open("/proc/sys/kernel/overflowuid") as file:
        return int(file.read())


def map_ids(inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Write the maps of the user namespace that the caller has just entered: one uid and one gid.

    The order of each pair is uid, gid. setgroups(2) is denied first, because otherwise an
    unprivileged process may not write gid_map. `outside` are the effective ids that the caller had
    before. A process that changes its ids loses its dumpable attribute and gets EACCES here: see
    prctl.set_dumpable.
    """
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inside[0]} {outside[0]} 1")
    _write("/proc/self/gid_map", f"{inside[1]} {outside[1]} 1")


def map_ids_to_self(uid: int, gid: int) -> None:
    """Call `map_ids` so that `uid` and `gid` keep their numbers."""
    map_ids((uid, gid), (uid, gid))


def map_ranges(pid: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Write the maps of a user namespace that the process `pid` created. All ids keep their
    numbers.

    A range is its first id and its length. Each range applies to uids and to gids. The caller needs
    CAP_SETUID and CAP_SETGID in the parent namespace; otherwise raise OSError EPERM. A map can be
    written only once.
    """
    lines = "".join(f"{first} {first} {count}\n" for first, count in ranges)
    _write(f"/proc/{pid}/uid_map", lines)
    _write(f"/proc/{pid}/gid_map", lines)


def map_one(pid: int, inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Write the maps of a user namespace that the process `pid` created: one uid and one gid.

    The order of each pair is uid, gid. Needs the same capabilities as `map_ranges`.
    """
    _write(f"/proc/{pid}/uid_map", f"{inside[0]} {outside[0]} 1")
    _write(f"/proc/{pid}/gid_map", f"{inside[1]} {outside[1]} 1")


def forbid_user_namespaces() -> None:
    """Forbid new user namespaces in the caller's user namespace and below it.

    unshare(USER) then fails with ENOSPC. This is permanent once no process in the namespace has
    CAP_SYS_RESOURCE over it. The call itself needs this capability; without it, raise OSError EPERM
    or EACCES. Other user namespaces are not affected. The call writes to /proc/sys, which must be
    writable.
    """
    _write("/proc/sys/user/max_user_namespaces", "0")


def limit_inotify(*, instances: int, watches: int) -> None:
    """Limit inotify(7) for each uid of the caller's user namespace and of those below it.

    Linux charges an instance to the user namespace of its creator and to each one above, and every
    namespace has its own maximum. The limit is permanent under the same conditions as
    `forbid_user_namespaces`.
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
