"""Replace the memory limit of a cgroup on a host without one: look, and kill.

Best effort, and named so in every receipt: between two looks a jail can take more than its limit
(at most RLIMIT_DATA per process). Files in /tmp, in /dev/shm and of memfd_create count. System V
segments that no process has attached, and files on their way through a socket, do not count.

The watcher also limits pipes and epoll instances of jails with the uid of the host user. Linux
counts the pages of pipes and the watches of epoll per user, and has no limit for a process:

    fs.pipe-user-pages-soft   16,384 pages. 1,024 pipes of a jail take them, and every new pipe of
                              the user holds 8 KiB instead of 64.
    fs.epoll.max_user_watches   4 % of the memory. 100 processes of a jail took 5.5 million in 12 s;
                              then epoll_ctl fails in every program of the user.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from sbx.errors import SbxError
from sbx.kernels.kernel import Kernel
from sbx.linux import procfs
from sbx.protocol.runs import Cause
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
_PERIOD_S = 0.05  # at 2 GB/s, one process can touch 100 MB in this time
_IDLE_PERIOD_S = 1.0  # between runs, only processes and files of earlier runs can grow
_TMPFS = ("/tmp", "/dev/shm")  # noqa: S108  # the jail's
_PIPES_MAX = 512  # half of the pages of a user
_EPOLLS_MAX = 1024  # each watches at most the files of one process
# Linux before 6.2 does not count the descriptors of a process that hides them. One such process,
# an agent for keys, is legitimate.
_PIPES_IF_HIDDEN = 256


class Watcher:
    """Watches the kernels of one sandbox together; `memory_max` in bytes is their common limit.

    With `descriptors` it also limits the pipes and epoll instances of each jail. A jail that needs
    too much memory with half of `tasks_max` processes is reported as one with too many processes.
    """

    def __init__(self, memory_max: float, *, tasks_max: int, descriptors: bool) -> None:
        self._memory_max = memory_max
        self._tasks_max = tasks_max
        self._descriptors = descriptors
        self._kernels: set[Kernel] = set()
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Event()
        self._suspects: set[Kernel] = set()  # too many descriptors at the last look

    def watch(self, kernel: Kernel) -> None:
        """Watch another kernel. A kernel that has ended is removed automatically."""
        self._kernels.add(kernel)
        kernel.on_busy = self._busy.set
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), context=background_context())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        while self._kernels:
            self._kernels = {kernel for kernel in self._kernels if kernel.alive}
            if self._descriptors:
                greedy = await asyncio.to_thread(self._find_greedy)
                # A process that ends hides its files, and each then counts as a pipe. With a single
                # look, the sockets of an ending process were mistaken for pipes.
                for kernel in greedy & self._suspects:
                    _log.info("a jail held too many pipes or epoll instances: it is killed")
                    await _kill(kernel, Cause.DESCRIPTORS)
                self._suspects = greedy
            if self._memory_max < math.inf:
                used = await asyncio.to_thread(self._measure)
                total = sum(used.values())
                if total > self._memory_max:
                    largest = max(used, key=lambda kernel: used[kernel])
                    _log.info("a sandbox used %d bytes: its largest kernel is killed", total)
                    await _kill(largest, self._cause(len(largest.jail.processes())))
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next look: shortly while anything runs, else until a run starts."""
        if self._suspects or any(kernel.busy for kernel in self._kernels):
            await asyncio.sleep(_PERIOD_S)
            return
        self._busy.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_PERIOD_S):
                await self._busy.wait()

    def _cause(self, processes: int) -> Cause:
        return Cause.PIDS if processes >= self._tasks_max // 2 else Cause.MEMORY

    def _find_greedy(self) -> set[Kernel]:
        """Return the kernels whose jails hold too many pipes or epoll instances."""
        return {kernel for kernel in self._kernels if _is_greedy(kernel.jail.processes())}

    def _measure(self) -> Mapping[Any, int]:
        """Return the bytes of each kernel's jail.

        Use cheap counts first, which count a shared page once for each process. Separate the shared
        pages only if the cheap counts are beyond the limit.
        """
        pids = {kernel: kernel.jail.processes() for kernel in self._kernels}
        files = {kernel: _in_files(inside) for kernel, inside in pids.items()}
        used = {
            kernel: files[kernel] + sum(procfs.resident(pid) for pid in inside)
            for kernel, inside in pids.items()
        }
        if sum(used.values()) <= self._memory_max:
            return used
        return {
            kernel: sum(procfs.proportional(pid) for pid in inside)
            + max(0, files[kernel] - sum(procfs.shared(pid) for pid in inside))
            for kernel, inside in pids.items()
        }


async def _kill(kernel: Kernel, cause: Cause) -> None:
    try:
        await kernel.kill(cause)
    except SbxError as error:
        _log.warning("a kernel beyond its limit of %s could not be killed: %s", cause, error)


def _is_greedy(inside: list[int]) -> bool:
    """Return whether the processes of a jail hold too many pipes or epoll instances.

    A pipe that several of them hold counts once. If a process hides its files, each of them counts
    as a pipe.
    """
    if sum(map(_count, inside)) <= _PIPES_MAX:
        return False
    pipes: set[str] = set()
    hidden = epolls = 0
    for pid in inside:
        try:
            descriptors = procfs.descriptors(pid)
        except PermissionError:  # Linux also answers so while a process ends
            hidden += _count(pid)
            continue
        pipes |= descriptors.pipes
        epolls += descriptors.epolls
    return len(pipes) + hidden > _PIPES_MAX or epolls > _EPOLLS_MAX


def _count(pid: int) -> int:
    count = procfs.count_descriptors(pid)
    return _PIPES_IF_HIDDEN if count is None else count


def _memfds(pid: int) -> Mapping[int, int]:
    try:
        return procfs.descriptors(pid).memfds
    except PermissionError:
        return {}


def _in_files(inside: list[int]) -> int:
    """Return the bytes of a jail's memory that lie in files, mapped or not."""
    if not inside:
        return 0
    memfds = {inode: size for pid in inside for inode, size in _memfds(pid).items()}
    return sum(memfds.values()) + sum(procfs.tmpfs_used(inside[0], top) for top in _TMPFS)
