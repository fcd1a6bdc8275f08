"""The size of the machine, as programs inside read it: the limits of the jail, not the host.

A library that adapts to its machine reads the files of cgroups, /proc/meminfo and the list of CPUs.
Inside, these are files on a tmpfs, which PID 1 writes before its seal. Python asks Linux directly
for the rest, so `limit_answers` changes these functions in the kernel.
"""

import os
from collections.abc import Mapping
from typing import Any

TOP = "/sys"
MEMINFO = "/proc/meminfo"
_MEMINFO_SOURCE = f"{TOP}/meminfo"  # of the bind mount, in a forked jail
_GROUP = f"{TOP}/fs/cgroup"
_CPUS = f"{TOP}/devices/system/cpu"
_MEMORY_MAX = f"{_GROUP}/memory.max"
_DIRECTORIES = (
    *(f"{TOP}/fs", _GROUP, f"{_GROUP}/memory", f"{_GROUP}/cpu"),
    *(f"{TOP}/devices", f"{TOP}/devices/system", _CPUS),
)
_PERIOD_US = 100_000
_NOT_COUNTED = (
    *("Buffers", "Cached", "SwapCached", "Active", "Inactive", "SwapTotal", "SwapFree", "Dirty"),
    *("AnonPages", "Mapped", "Shmem", "Slab", "SReclaimable", "SUnreclaim"),
)


def cover_meminfo(bind: Any) -> None:
    """Put an empty file over /proc/meminfo. `describe` writes it."""
    os.close(os.open(_MEMINFO_SOURCE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    bind(_MEMINFO_SOURCE, MEMINFO)


def give_meminfo(ids: tuple[int, int]) -> None:
    """Let the uid of the jail write the file of `cover_meminfo`, until the seal."""
    os.chown(_MEMINFO_SOURCE, *ids)


def describe(machine: Mapping[str, Any] | None) -> None:
    """Write the files. `machine` has the limits; None leaves out the files."""
    if machine is None:
        return
    for directory in _DIRECTORIES:
        os.mkdir(directory)
    for path, content in _files(**machine):
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o444)
        os.write(fd, content.encode())
        os.fchmod(fd, 0o444)
        os.close(fd)


def _files(memory_max: int, cpu_quota: float, tasks_max: int) -> list[tuple[str, str]]:
    quota_us = round(cpu_quota * _PERIOD_US)
    cpus = cpu_count(cpu_quota)
    online = f"0-{cpus - 1}\n" if cpus > 1 else "0\n"
    # of cgroup v1 and v2: a program chooses by /proc/self/cgroup, which is that of the host
    return [
        (_MEMORY_MAX, f"{memory_max}\n"),
        (f"{_GROUP}/memory/memory.limit_in_bytes", f"{memory_max}\n"),
        (f"{_GROUP}/cpu.max", f"{quota_us} {_PERIOD_US}\n"),
        (f"{_GROUP}/cpu/cpu.cfs_quota_us", f"{quota_us}\n"),
        (f"{_GROUP}/cpu/cpu.cfs_period_us", f"{_PERIOD_US}\n"),
        (f"{_GROUP}/pids.max", f"{tasks_max}\n"),
        (f"{_CPUS}/online", online),
        (f"{_CPUS}/possible", online),
        (f"{_CPUS}/present", online),
        (MEMINFO, _meminfo(memory_max >> 10)),
    ]


def cpu_count(cpu_quota: float) -> int:
    """Return the number of CPUs for a quota: at most those that this process may use."""
    return max(1, min(-int(-cpu_quota // 1), len(os.sched_getaffinity(0))))


def _meminfo(kib: int) -> str:
    sizes = dict.fromkeys(("MemTotal", "MemFree", "MemAvailable"), kib)
    sizes |= dict.fromkeys(_NOT_COUNTED, 0)
    return "".join(f"{name + ':':<16}{size:>8} kB\n" for name, size in sizes.items())


def limit_answers() -> None:
    """Let the functions of `os` that ask Linux directly answer with the limits."""
    try:
        with open(_MEMORY_MAX, encoding="ascii") as file:
            pages = int(file.read()) // os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return  # without walls, or a policy shows the files of the host
    affinity, sysconf, cpus = os.sched_getaffinity, os.sysconf, os.cpu_count()
    names = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
    physical = {*names, *(os.sysconf_names[name] for name in names)}

    def sched_getaffinity(pid: int, /) -> set[int]:
        return set(sorted(affinity(pid))[:cpus])

    def sysconf_within(name: str | int, /) -> int:
        return min(pages, sysconf(name)) if name in physical else sysconf(name)

    os.sched_getaffinity, os.sysconf = sched_getaffinity, sysconf_within
