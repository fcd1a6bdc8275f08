"""proc(5): what linux says of a process, read by its pid in the reader's own PID namespace."""

import errno
import functools
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

_KIB = 1024
_TICKS = os.sysconf("SC_CLK_TCK")


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status, as text. FileNotFoundError when the process is gone."""
    return _fields(f"/proc/{pid}/status")


class Credentials(NamedTuple):
    """What linux enforces for a process: `seccomp` 2 is filter mode, `filters` how many.

    `capabilities` are those of any of the sets permitted, effective and bounding.
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
    """Of /proc/PID/status, in a tenth of the time of `status`. Linux before 5.9 tells no number of
    filters: 1 then. FileNotFoundError when the process is gone."""
    fd = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = _CREDENTIALS.search(os.read(fd, 1 << 14))
    finally:
        os.close(fd)
    if found is None:
        raise OSError(f"/proc/{pid}/status is of no known form")
    uid, permitted, effective, bounding, no_new_privs, seccomp, filters = found.groups()
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
    """Return the umask of a process (Linux 4.7). Raises OSError when it is gone."""
    with open(f"/proc/{pid}/status", "rb") as file:
        found = _UMASK.search(file.read(1 << 14))
    if found is None:
        raise OSError(f"/proc/{pid}/status names no umask")
    return int(found[1], 8)


def read_string(pid: int, address: int, limit: int) -> bytes:
    """Return the C string at `address` in the memory of a process, without its final 0.

    Raises OSError: EFAULT for memory that is not mapped, ENAMETOOLONG for more than `limit` bytes,
    EACCES or EPERM where this process may not trace the other (ptrace(2)).
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
    """The number of a pidfd's process, as this process numbers it; -1 when it has been reaped."""
    return int(_fields(f"/proc/self/fdinfo/{pidfd}")["Pid"])


def children(pid: int) -> list[int]:
    """The children of a process, of all its threads; empty when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as words:
                found += [int(word) for word in words.read().split()]
    except OSError:
        pass
    return found


def descendants(pid: int) -> list[int]:
    """The process and all below it. Of a jail's PID 1: every process inside, since whoever loses
    its parent becomes a child of PID 1."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children(found[-1])
    return found


def activity(pid: int) -> tuple[bytes, ...]:
    """What changes when any thread of the process does something: its minor page faults, the time
    it had in user and in system mode (in ticks of 10 ms), its number of threads. Empty when the
    process is gone."""
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


def spent(pid: int) -> tuple[float, int]:
    """CPU seconds of a process and of the children that it waited for, and how many threads it has
    now; zeros when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(1024).rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS, int(fields[17])


def traffic(pid: int) -> dict[str, tuple[int, int]]:
    """Bytes received and sent by each interface of the network namespace of a process, in the
    words of netdevice(7). OSError when the process is gone."""
    with open(f"/proc/{pid}/net/dev", encoding="ascii", errors="replace") as lines:
        split = [line.partition(":") for line in lines]
    numbers = {name.strip(): rest.split() for name, colon, rest in split if colon}
    return {name: (int(told[0]), int(told[8])) for name, told in numbers.items()}


def resident(pid: int) -> int:
    """Bytes of anonymous and shared memory in RAM or swap, shared pages counted in full; 0 when
    the process is gone."""
    try:
        fields = status(pid)
    except OSError:
        return 0
    return sum(_bytes(fields.get(name, "0 kB")) for name in ("RssAnon", "RssShmem", "VmSwap"))


def proportional(pid: int) -> int:
    """The same, with each shared page divided among those who share it (smaps_rollup); falls back
    to `resident` where the process hides it."""
    try:
        fields = _fields(f"/proc/{pid}/smaps_rollup")
    except OSError:
        return resident(pid)
    return sum(_bytes(fields.get(name, "0 kB")) for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))


def shared(pid: int) -> int:
    """Of `resident`, what is shared memory: files in a tmpfs, memfds, System V segments."""
    try:
        return _bytes(status(pid).get("RssShmem", "0 kB"))
    except OSError:
        return 0


def tmpfs_used(pid: int, path: str) -> int:
    """Bytes that lie in the file system at `path`, as this process sees it; 0 when it is gone."""
    try:
        found = os.statvfs(f"/proc/{pid}/root{path}")
    except OSError:
        return 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class Descriptors(NamedTuple):
    """Some of the files that a process holds open: the bytes of each memfd_create(2) file by its
    inode number, the names of pipes, and the number of epoll instances.

    No count of resident pages shows a memfd, unless it is mapped as well.
    """

    memfds: Mapping[int, int]
    pipes: frozenset[str]
    epolls: int


def descriptors(pid: int) -> Descriptors:
    """Return the descriptors of a process. Empty when it is gone.

    Raises PermissionError if the process hides its files from the caller (PR_SET_DUMPABLE).
    """
    memfds: dict[int, int] = {}
    pipes: set[str] = set()
    epolls = 0
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        names = []
    for name in names:
        link = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
            target = os.readlink(link)
            if target.startswith("pipe:"):
                pipes.add(target)
            elif target == "anon_inode:[eventpoll]":
                epolls += 1
            elif target.startswith("/memfd:"):
                file = os.stat(link)
                memfds[file.st_ino] = file.st_blocks * 512
    return Descriptors(memfds, frozenset(pipes), epolls)


def count_descriptors(pid: int) -> int | None:
    """Return the number of descriptors, also of a process that hides them.

    0 when the process has ended. None if this Linux does not report the number (before 6.2).
    """
    try:
        if size := os.stat(f"/proc/{pid}/fd").st_size:
            return size
        # A zombie, and a process that is about to be one, has no memory.
        return 0 if reports_descriptors() or "VmRSS" not in status(pid) else None
    except OSError:
        return 0


@functools.cache
def reports_descriptors() -> bool:
    """Return whether Linux reports the number of descriptors of a process: since 6.2."""
    return os.stat("/proc/self/fd").st_size > 0


def unlinked(pid: int, device: int, deadline: float) -> dict[int, int]:
    """Bytes of each regular file of one file system that the process holds open or mapped and that
    has no name any more, by inode number: they take room on the disk and no walk meets them.

    Of what can be looked at until `deadline`, by time.monotonic. What is mapped only, and not open,
    shows to root alone. Raises PermissionError where the process hides its files from the caller.
    """
    found: dict[int, int] = {}
    for part in ("fd", "map_files"):
        try:
            names = os.listdir(f"/proc/{pid}/{part}")
        except (FileNotFoundError, ProcessLookupError):
            break
        except PermissionError:
            if part == "fd":
                raise
            break
        for name in names:
            if time.monotonic() > deadline:
                return found
            with suppress(OSError):
                file = os.stat(f"/proc/{pid}/{part}/{name}")
                if not file.st_nlink and file.st_dev == device and stat.S_ISREG(file.st_mode):
                    found[file.st_ino] = file.st_blocks * 512
    return found


def unlinked_of(pids: Sequence[int], device: int, at_most_s: float) -> tuple[int, int]:
    """The bytes and the number of such files of many processes, begun anywhere among them: where
    there are too many to be looked at in the time, others are looked at each time.

    Raises PermissionError where one of them hides its files from the caller.
    """
    deadline = time.monotonic() + at_most_s
    begin = int.from_bytes(os.urandom(2)) % max(1, len(pids))
    found: dict[int, int] = {}
    for pid in (*pids[begin:], *pids[:begin]):
        if time.monotonic() > deadline:
            break
        found |= unlinked(pid, device, deadline)
    return sum(found.values()), len(found)


def heap() -> Iterator[tuple[int, int]]:
    """Start and end of each range of this process's memory that no file is behind, and that it can
    write to."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        found = [line.split() for line in lines]
    for addresses, rights, *rest in found:
        if "w" in rights and (len(rest) < 4 or rest[3] == "[heap]"):
            start, end = addresses.split("-")
            yield int(start, 16), int(end, 16)


def namespaces(pid: int | Literal["self"]) -> dict[str, int]:
    """The inode numbers that name the namespaces of a process, by their names in namespaces(7)."""
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    return {name: os.stat(f"/proc/{pid}/ns/{name}").st_ino for name in names}


def _fields(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8", errors="replace") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _bytes(text: str) -> int:
    return int(text.split()[0]) * _KIB
