"""What linux tells of processes below this one: proc(5), clock_getcpuclockid(3), pidfd_open(2)."""

import os
import select
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sbx.linux import procfs

_MIB_IN_KIB = 1024
_CPUCLOCK_SCHED = 2


def descendants() -> list[int]:
    """Every process below this one."""
    return [pid for pid in procfs.descendants(os.getpid()) if pid != os.getpid()]


def by_pid_namespace(pids: Iterable[int]) -> dict[int, list[int]]:
    """These processes, by the inode of their PID namespace: a jail has one, as its receipt says."""
    found: dict[int, list[int]] = {}
    for pid in pids:
        with suppress(OSError):  # it is gone
            found.setdefault(os.stat(f"/proc/{pid}/ns/pid").st_ino, []).append(pid)
    return found


def pss_mib(pids: Iterable[int]) -> float:
    """MiB of RAM and swap, each shared page divided among those who share it."""
    return sum(_pss_kib(pid) for pid in pids) / _MIB_IN_KIB


def cpu_s(pid: int) -> float | None:
    """Seconds of CPU that a process has taken so far, to the nanosecond; None when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return None


def is_broker(pid: int) -> bool:
    """Whether this process is the broker of a runtime. Raise OSError if it has ended."""
    with open(f"/proc/{pid}/cmdline", "rb") as words:
        return b"sbx.isolation.broker.server" in words.read()


@contextmanager
def watched(pids: Iterable[int]) -> Iterator[list[int]]:
    """File descriptors that stand for these processes."""
    fds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def ended(fds: Iterable[int]) -> bool:
    """Whether every watched process has ended."""
    fds = list(fds)
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return len(poll.poll(0)) == len(fds)


def _pss_kib(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            told = [line.split() for line in lines]
    except (ProcessLookupError, FileNotFoundError):  # it is a zombie, or gone
        return 0
    return sum(int(words[1]) for words in told if words[0] in ("Pss:", "SwapPss:"))
