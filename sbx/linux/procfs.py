"""proc(5): facts about a process, read by its pid in the PID namespace of the reader."""

import errno
import functools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Literal, NamedTuple

_KIB = 1024
_INODE = 1024  # of a tmpfs, as Linux charges for it: BOGO_INODE_SIZE


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status as text. Raise FileNotFoundError if it has ended."""
    return _fields(f"/proc/{pid}/status")


class Credentials(NamedTuple):
    """The restrictions that Linux enforces for a process.

    `seccomp` 2 is filter mode, and `filters` is the number of filters. `capabilities` is the union
    of the sets permitted, effective and bounding.
    """

    uid: int
    capabilities: int
    no_new_privs: bool
    seccomp: int
    filters: int


_CREDENTIALS = re.compile(
    rb"\nUid:\t(\d+).*"
    rb"\nCapPrm:\t([0-9a-f]+)\nCapEff:\t([0-9a-f]+)\nCapBnd:\t([0-9a-f]+)\n"
    rb".*\nNoNewPrivs:\t(\d)\nSeccomp:\t(\d)\n(?:Seccomp_filters:\t(\d+)\n)?",
    re.DOTALL,
)


def credentials(pid: int | Literal["thread-self"]) -> Credentials:
    """Read the credentials from /proc/PID/status, in a tenth of the time that `status` takes.

    Linux before 5.9 does not report the number of filters: `filters` is 1 then. Raise
    FileNotFoundError if the process has ended.
    """
    fd = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        match = _CREDENTIALS.search(os.read(fd, 1 << 14))
    finally:
        os.close(fd)
    if match is None:
        raise OSError(f"/proc/{pid}/status has an unknown form")
    uid, permitted, effective, bounding, no_new_privs, seccomp, filters = match.groups()
    return Credentials(
        int(uid),
        int(permitted, 16) | int(effective, 16) | int(bounding, 16),
        no_new_privs == b"1",
        int(seccomp),
        int(filters or b"1"),
    )


_UMASK = re.compile(rb"^Umask:\t([0-7]+)$", re.MULTILINE)
_PAGE = 4096


def umask(pid: int) -> int:
    """Return the umask of a process (Linux 4.7). Raise OSError if it has ended."""
    with open(f"/proc/{pid}/status", "rb") as file:
        match = _UMASK.search(file.read(1 << 14))
    if match is None:
        raise OSError(f"/proc/{pid}/status contains no umask")
    return int(match[1], 8)


def read_string(pid: int, address: int, limit: int) -> bytes:
    """Return the C string at `address` in the memory of a process, without its final NUL.

    Raise OSError: EFAULT for memory that is not mapped, ENAMETOOLONG for more than `limit` bytes,
    EACCES or EPERM if this process may not trace the other (ptrace(2)).
    """
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while len(text) < limit:
            at = address + len(text)
            try:
                piece = os.pread(fd, _PAGE - at % _PAGE, at)  # the next page may not be mapped
            except (OSError, OverflowError) as error:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT)) from error
            head, end, _ = piece.partition(b"\0")
            text += head
            if end:
                return text
            if not piece:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    finally:
        os.close(fd)


def pid_of(pidfd: int) -> int:
    """Return the pid of a pidfd's process in the PID namespace of this process; -1 if it was
    reaped."""
    return int(_fields(f"/proc/self/fdinfo/{pidfd}")["Pid"])


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process; an empty list if it has ended."""
    pids: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as words:
                pids += [int(word) for word in words.read().split()]
    except OSError:
        pass
    return pids


def descendants(pid: int) -> list[int]:
    """Return the process and all processes below it.

    For the PID 1 of a jail these are all processes inside, because a process that loses its parent
    becomes a child of PID 1.
    """
    pids, todo = [], [pid]
    while todo:
        pids.append(todo.pop())
        todo += children(pids[-1])
    return pids


def activity(pid: int) -> tuple[bytes, ...]:
    """Return counters that change when any thread of the process runs.

    They are its minor page faults, its time in user mode and in system mode (in ticks of 10 ms),
    and its number of threads. Return an empty tuple if the process has ended.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        fields = os.read(fd, 1024).rpartition(b")")[2].split()
    except OSError:
        return ()
    finally:
        os.close(fd)
    return fields[7], fields[11], fields[12], fields[17]


def traffic(pid: int) -> dict[str, tuple[int, int]]:
    """Return the bytes received and sent by each interface in the network namespace of a process.

    The keys are the names of netdevice(7). Raise OSError if the process has ended.
    """
    with open(f"/proc/{pid}/net/dev", encoding="ascii", errors="replace") as lines:
        split = [line.partition(":") for line in lines]
    numbers = {name.strip(): rest.split() for name, colon, rest in split if colon}
    return {name: (int(counters[0]), int(counters[8])) for name, counters in numbers.items()}


def sockets(pid: int) -> int:
    """Return the number of sockets in the network namespace of a process. Raise OSError."""
    return int(_fields(f"/proc/{pid}/net/sockstat")["sockets"].removeprefix("used "))


def written(pid: int) -> int:
    """Return the bytes that a process, and its children that it waited for, wrote to disks. Raise
    OSError if the process has ended, PermissionError if it hides this."""
    return int(_fields(f"/proc/{pid}/io")["write_bytes"])


def resident(pid: int) -> int:
    """Return the bytes of anonymous and shared memory of a process in RAM or swap, and of its page
    tables.

    Shared pages count in full. Return 0 if the process has ended.
    """
    try:
        fields = status(pid)
    except OSError:
        return 0
    names = ("RssAnon", "RssShmem", "VmSwap", "VmPTE")
    return sum(_bytes(fields.get(name, "0 kB")) for name in names)


def proportional(pid: int) -> int:
    """Return the same as `resident`, with each shared page divided among its users (smaps_rollup).

    Return `resident` if the process hides smaps_rollup.
    """
    try:
        fields = _fields(f"/proc/{pid}/smaps_rollup") | {"VmPTE": status(pid).get("VmPTE", "0 kB")}
    except OSError:
        return resident(pid)
    names = ("Pss_Anon", "Pss_Shmem", "SwapPss", "VmPTE")
    return sum(_bytes(fields.get(name, "0 kB")) for name in names)


def shared(pid: int) -> int:
    """Return the shared part of `resident`: files in a tmpfs, memfds, System V segments."""
    try:
        return _bytes(status(pid).get("RssShmem", "0 kB"))
    except OSError:
        return 0


def tmpfs_used(pid: int, path: str) -> int:
    """Return the used bytes of the file system at `path` in the view of a process.

    A name, also of an empty file, counts as `_INODE` bytes. Return 0 if the process has ended.
    """
    try:
        usage = os.statvfs(f"/proc/{pid}/root{path}")
    except OSError:
        return 0
    names = usage.f_files - usage.f_ffree
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize + names * _INODE


def shared_of_host() -> int:
    """Return the bytes of all tmpfs files, memfds and System V segments of the machine."""
    return _bytes(_fields("/proc/meminfo")["Shmem"])


class Descriptors(NamedTuple):
    """Some of the open files of a process.

    `memfds` maps the inode number of each memfd_create(2) file to its bytes, `pipes` has the names
    of pipes, `epolls` is the number of epoll instances, and `in_flight` the number of descriptors
    that wait in its Unix sockets. A count of resident pages does not include a memfd unless it is
    also mapped.
    """

    memfds: Mapping[int, int]
    pipes: frozenset[str]
    epolls: int
    in_flight: int = 0


def descriptors(pid: int) -> Descriptors:
    """Return the descriptors of a process; empty if it has ended.

    Raise PermissionError if the process hides its files from the caller (PR_SET_DUMPABLE).
    """
    memfds: dict[int, int] = {}
    pipes: set[str] = set()
    epolls = in_flight = 0
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        names = []
    for name in names:
        link = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError, ProcessLookupError):  # closed in the meantime
            target = os.readlink(link)
            if target.startswith("pipe:"):
                pipes.add(target)
            elif target.startswith("socket:"):
                in_flight += count_in_flight(pid, name)
            elif target == "anon_inode:[eventpoll]":
                epolls += 1
            elif target.startswith("/memfd:"):
                file = os.stat(link)
                memfds[file.st_ino] = file.st_blocks * 512
    return Descriptors(memfds, frozenset(pipes), epolls, in_flight)


_SCM_FDS = re.compile(rb"^scm_fds:\s*(\d+)", re.MULTILINE)


def count_in_flight(pid: int, fd: str) -> int:
    """Return the number of descriptors that wait in a Unix socket (Linux 5.6), else 0."""
    with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
        match = _SCM_FDS.search(file.read(4096))
    return int(match[1]) if match is not None else 0


def count_descriptors(pid: int) -> int | None:
    """Return the number of descriptors, also of a process that hides them.

    Return 0 if the process has ended. Return None if this Linux does not report the number (before
    6.2).
    """
    try:
        if size := os.stat(f"/proc/{pid}/fd").st_size:
            return size
        # A zombie, and a process that is about to become one, has no memory.
        return 0 if reports_descriptors() or "VmRSS" not in status(pid) else None
    except OSError:
        return 0


@functools.cache
def reports_descriptors() -> bool:
    """Return whether Linux reports the number of descriptors of a process (since 6.2)."""
    return os.stat("/proc/self/fd").st_size > 0


def heap() -> Iterator[tuple[int, int]]:
    """Yield start and end of each writable range of this process's memory that no file backs."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        ranges = [line.split() for line in lines]
    for addresses, rights, *rest in ranges:
        if "w" in rights and (len(rest) < 4 or rest[3] == "[heap]"):
            start, end = addresses.split("-")
            yield int(start, 16), int(end, 16)


def namespaces(pid: int | Literal["self"]) -> dict[str, int]:
    """Return the inode numbers of the namespaces of a process, by their names in namespaces(7)."""
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    return {name: os.stat(f"/proc/{pid}/ns/{name}").st_ino for name in names}


def _fields(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8", errors="replace") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _bytes(text: str) -> int:
    return int(text.split()[0]) * _KIB
