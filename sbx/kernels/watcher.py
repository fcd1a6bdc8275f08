"""What stands in for the memory limit of a cgroup where a host gives none: look, and kill.

Best effort, and called so in every receipt: between two looks a jail can take more than its limit
(at most RLIMIT_DATA a process). Files in /tmp, in /dev/shm and of memfd_create count; System V
segments that nobody has attached, and files on their way through a socket, do not.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from sbx.errors import SbxError
from sbx.kernels.kernel import Kernel
from sbx.linux import procfs
from sbx.protocol.runs import Cause

_log = logging.getLogger(__name__)
_PERIOD_S = 0.05  # at 2 GB/s, what one process can touch meanwhile is 100 MB
_IDLE_PERIOD_S = 1.0  # between runs only what they left behind can grow
_TMPFS = ("/tmp", "/dev/shm")  # noqa: S108  # the jail's own


class MemoryWatcher:
    """Watches the kernels of one sandbox together; `memory_max` in bytes is their common limit."""

    def __init__(self, memory_max: int) -> None:
        self._memory_max = memory_max
        self._kernels: set[Kernel] = set()
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Event()

    def watch(self, kernel: Kernel) -> None:
        """Watch one more; a kernel that has ended is forgotten by itself."""
        self._kernels.add(kernel)
        kernel.on_busy = self._busy.set
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        while self._kernels:
            self._kernels = {kernel for kernel in self._kernels if kernel.alive}
            used = await asyncio.to_thread(self._measure)
            total = sum(used.values())
            if total > self._memory_max:
                largest = max(used, key=lambda kernel: used[kernel])
                _log.info("a sandbox used %d bytes: its largest kernel is killed", total)
                try:
                    await largest.kill(Cause.MEMORY)
                except SbxError as error:
                    _log.warning("a kernel beyond its memory could not be killed: %s", error)
            await self._pause()

    async def _pause(self) -> None:
        """Until the next look: soon while anything runs, and as soon as something begins to."""
        if any(kernel.busy for kernel in self._kernels):
            await asyncio.sleep(_PERIOD_S)
            return
        self._busy.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_PERIOD_S):
                await self._busy.wait()

    def _measure(self) -> Mapping[Any, int]:
        """Bytes of each kernel's jail. Cheap counts first; shared pages are told apart only when
        the cheap ones, which count them once for each process, are beyond the limit."""
        pids = {kernel: kernel.processes() for kernel in self._kernels}
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


def _in_files(inside: list[int]) -> int:
    """Bytes of a jail that are memory and lie in files, mapped or not."""
    if not inside:
        return 0
    memfds = {inode: size for pid in inside for inode, size in procfs.memfds(pid).items()}
    return sum(memfds.values()) + sum(procfs.tmpfs_used(inside[0], top) for top in _TMPFS)
