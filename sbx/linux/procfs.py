"""proc(5): what linux says of a process, read by its pid in the reader's own PID namespace."""

import os
from contextlib import suppress

_KIB = 1024


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status, as text. FileNotFoundError when the process is gone."""
    return _fields(f"/proc/{pid}/status")


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


def memfds(pid: int) -> dict[int, int]:
    """Bytes of each memfd_create(2) file that the process holds open, by inode number: memory that
    no count of resident pages shows unless it is mapped as well."""
    found = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{name}"
            with suppress(OSError):
                if os.readlink(link).startswith("/memfd:"):
                    file = os.stat(link)
                    found[file.st_ino] = file.st_blocks * 512
    except OSError:
        pass
    return found


def namespaces(pid: int) -> dict[str, int]:
    """The inode numbers that name the namespaces of a process, by their names in namespaces(7)."""
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    return {name: os.stat(f"/proc/{pid}/ns/{name}").st_ino for name in names}


def _fields(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8", errors="replace") as lines:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _bytes(text: str) -> int:
    return int(text.split()[0]) * _KIB
