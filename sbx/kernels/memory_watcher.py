"""Replace the memory limit of a cgroup on a host without one: look, and kill.

Best effort, and named so in every receipt: between two looks a jail can take more than its limit
(at most RLIMIT_DATA per process). Files in /tmp, in /dev/shm and of memfd_create count, System V
segments, message queues and semaphores, page tables, and the queues of sockets. Where a jail has a
memfd whose size no process shows, the growth of all such memory of the host counts: see
`HiddenGrowth`.

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
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from sbx.aio import in_thread
from sbx.errors import SbxError
from sbx.isolation.broker.jail import KernelAccounts
from sbx.kernels.kernel import Kernel
from sbx.kernels.watch import keep_watching
from sbx.linux import hidden_files, procfs
from sbx.protocol.runs import Cause
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
_PERIOD_S = 0.05  # at 2 GB/s, one process can touch 100 MB in this time
_IDLE_PERIOD_S = 1.0  # between runs, only processes and files of earlier runs can grow
_TMPFS = ("/tmp", "/dev/shm")  # noqa: S108  # the jail's
_PIPES_MAX = 512  # half of the pages of a user
_SEARCH_S = 1.0
_SOCKET_MAX = 16 << 20  # tcp_rmem, tcp_wmem, and twice rmem_max and wmem_max of 4 MiB
_EPOLLS_MAX = 1024  # each watches at most the files of one process
# Linux before 6.2 does not count the descriptors of a process that hides them. One such process,
# an agent for keys, is legitimate.
_PIPES_IF_HIDDEN = 256


class HiddenGrowth:
    """Measures the holdings of a jail that no process shows: a file in flight through a socket, or
    mapped and closed, or of a process that hides its files, and shared memory without a file.

    Their size cannot be read. So the growth of the whole host since the last look without such a
    place counts, less the measured growth of the jail. An honest program passes a descriptor in a
    moment, so only two looks in a row with such a place count. A program that keeps one pays for
    the growth of others, too.
    """

    def __init__(self) -> None:
        self._base: int | None = None
        self.hiding = False

    def possible(self, host: int, measured: int) -> int:
        """Return the bytes that are hidden if the jail caused all unmeasured growth."""
        return 0 if self._base is None else max(0, host - measured - self._base)

    def charge(self, places: int, host: int, measured: int) -> int:
        """Return the bytes to charge after a look that found so many hiding places."""
        confirmed, self.hiding = self.hiding and places > 0, places > 0
        if not places or self._base is None:
            self._base = host - measured
        return self.possible(host, measured) if confirmed else 0

    def skip(self, drift: int) -> None:
        """Leave out a growth of the host while the jail did nothing."""
        if self._base is not None:
            self._base += drift


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
        self._hidden = HiddenGrowth()
        self._search_due = 0.0
        self._accounts: dict[Kernel, KernelAccounts | None] = {}

    def watch(self, kernel: Kernel) -> None:
        """Watch another kernel. A kernel that has ended is removed automatically."""
        self._kernels.add(kernel)
        kernel.on_busy = self._busy.set
        if self._task is None or self._task.done():
            looking = keep_watching(self._look, self._end_all)
            self._task = asyncio.create_task(looking, context=background_context())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        try:
            await self._look_until_all_have_ended()
        finally:
            self._close_accounts(self._accounts)

    async def _end_all(self) -> None:
        for kernel in self._kernels:
            await _kill(kernel, Cause.CRASHED)

    async def _look_until_all_have_ended(self) -> None:
        while self._kernels:
            self._kernels = {kernel for kernel in self._kernels if kernel.alive}
            self._close_accounts(self._accounts.keys() - self._kernels)
            if self._descriptors:
                greedy = await asyncio.to_thread(self._find_greedy)
                # A process that ends hides its files, and each then counts as a pipe. With a single
                # look, the sockets of an ending process were mistaken for pipes.
                for kernel in greedy & self._suspects:
                    _log.info("a jail held too many pipes or epoll instances: it is killed")
                    await _kill(kernel, Cause.DESCRIPTORS)
                self._suspects = greedy
            if self._memory_max < math.inf:
                await self._open_accounts()
                used = await in_thread(self._measure)  # to its end: it reads the accounts
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

    async def _open_accounts(self) -> None:
        """Open the accounts of kernels whose first run lasts longer than a look."""
        for kernel in [kernel for kernel in self._kernels - self._accounts.keys() if kernel.busy]:
            self._accounts[kernel] = None
            try:
                self._accounts[kernel] = await kernel.jail.accounts()
            except (OSError, SbxError) as error:
                _log.debug("sockets and System V memory of a jail do not count: %s", error)

    def _close_accounts(self, kernels: Iterable[Kernel]) -> None:
        for kernel in list(kernels):
            if (accounts := self._accounts.pop(kernel, None)) is not None:
                accounts.close()

    def _measure(self) -> Mapping[Any, int]:
        """Return the bytes of each kernel's jail.

        Use cheap counts first, which count a shared page once for each process. Separate the shared
        pages only if the cheap counts are beyond the limit. Read the queues of sockets only if as
        many sockets could hold the rest of the limit.
        """
        pids = {kernel: kernel.jail.processes() for kernel in self._kernels}
        in_files = {kernel: self._in_files(kernel, inside) for kernel, inside in pids.items()}
        files = {kernel: size for kernel, (size, _, _) in in_files.items()}
        used = {
            kernel: files[kernel] + sum(procfs.resident(pid) for pid in inside)
            for kernel, inside in pids.items()
        }
        sockets = {kernel: self._sockets(kernel, used[kernel], pids[kernel]) for kernel in pids}
        hidden = self._in_hiding(pids, in_files, sum(used.values()) + sum(sockets.values()))
        extra = {kernel: sockets[kernel] + hidden.get(kernel, 0) for kernel in pids}
        if sum(used.values()) + sum(extra.values()) <= self._memory_max:
            return used
        return {
            kernel: sum(procfs.proportional(pid) for pid in inside)
            + max(0, files[kernel] - sum(procfs.shared(pid) for pid in inside))
            + extra[kernel]
            for kernel, inside in pids.items()
        }

    def _in_files(self, kernel: Kernel, inside: list[int]) -> "_InFiles":
        """Return the bytes of a jail's memory that lie in files, mapped or not, or in System V."""
        if not inside:
            return _InFiles(0, 0, frozenset())
        memfds: dict[int, int] = {}
        places = 0
        for pid in inside:
            try:
                descriptors = procfs.descriptors(pid)
            except PermissionError:  # Linux also answers so while a process ends
                places += hidden_files.is_hidden(pid)
                continue
            memfds |= descriptors.memfds
            places += descriptors.in_flight
        size = sum(memfds.values()) + sum(procfs.tmpfs_used(inside[0], top) for top in _TMPFS)
        if (accounts := self._accounts.get(kernel)) is not None:
            size += accounts.system_v()
        return _InFiles(size, places, memfds.keys())

    def _sockets(self, kernel: Kernel, used: int, inside: list[int]) -> int:
        accounts = self._accounts.get(kernel)
        if accounts is None or not inside:
            return 0
        try:
            if procfs.sockets(inside[0]) * _SOCKET_MAX + used <= self._memory_max:
                return 0
            return accounts.sockets()
        except OSError:
            return 0

    def _in_hiding(
        self, pids: Mapping[Kernel, list[int]], in_files: Mapping[Kernel, "_InFiles"], used: int
    ) -> Mapping[Kernel, int]:
        """Return the bytes to charge to the kernel with most hiding places. Their mappings are read
        once in a second, or if they may matter."""
        host, measured = procfs.shared_of_host(), sum(each.size for each in in_files.values())
        places = {kernel: each.places for kernel, each in in_files.items()}
        possible, now = self._hidden.possible(host, measured), time.monotonic()
        if used + possible <= self._memory_max and now < self._search_due:
            return {}
        self._search_due = now + _SEARCH_S
        for kernel, inside in pids.items():
            for pid in inside:
                hides, resident = hidden_files.maps_nameless(pid, in_files[kernel].memfds)
                places[kernel] += hides
                measured += resident
        charge = self._hidden.charge(sum(places.values()), host, measured)
        return {max(places, key=lambda kernel: places[kernel]): charge} if charge else {}


class _InFiles(NamedTuple):
    size: int
    places: int
    memfds: Collection[int]


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
