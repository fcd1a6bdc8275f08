"""The free space of a file system, as a sign that files have grown.

It costs one call for any number of files, and every program of the host changes it. So it decides
when files are measured, and limits a measurement that cannot tell whose growth it was.
"""

import asyncio
import os
import time
from collections.abc import Sequence

from sbx.aio import WorkerThreads, kept_with
from sbx.linux import procfs
from sbx.policy.tables import LimitsPolicy
from sbx.workspace.host_directory import HostDirectory

TICK_S = 0.1  # each is a call of a thread and of statvfs(2), 60 µs
_SHARED_S = 0.02  # for which watches share its result
_SHORT_CELL_S = 0.02  # its writes show at the next measurement
_ENTRIES = 200_000
_PAGE = 4096
_STEP, _STEP_NAMES = 64 << 20, 5_000  # at least, between two walks of a host directory
UNKNOWN_FACTOR = 4
UNKNOWN_WRITES = 1 << 62


class FreeSpaceProbe:
    """The space that the file system of `fd` may lose before the next measurement, whatever takes
    it: as much as the files had left at the last one, which took `taking_s`."""

    def __init__(
        self, fd: int, left: int, files_left: int, *, period_s: float, taking_s: float = 0.0
    ) -> None:
        self._fd = fd
        self._left = left
        self._files_left = files_left
        self._period_s = period_s
        # A slow tree is not walked all day.
        self._tick_s = max(TICK_S, min(period_s, taking_s))
        self._at_first: tuple[int, int] | None = None

    async def last(self, threads: WorkerThreads) -> None:
        """Return when it is time to look. Not at once is anything asked: most cells are over soon,
        and should not share the interpreter with a thread that is of no use to them."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._period_s
        await asyncio.sleep(_SHORT_CELL_S)
        while (wait_s := due - loop.time()) > 0:
            if await self._is_taken(threads):
                return
            await asyncio.sleep(min(self._tick_s, wait_s))

    async def _is_taken(self, threads: WorkerThreads) -> bool:
        try:
            free = await current(threads, self._fd)
        except OSError:
            return False
        if self._at_first is None:
            self._at_first = free
        taken, files_taken = (a - b for a, b in zip(self._at_first, free, strict=True))
        return taken > self._left or files_taken > self._files_left


class _Replies(dict[int, tuple[float, "asyncio.Future[tuple[int, int]]"]]):
    """The last reply of statvfs(2) for each file system, by its device, and when it was asked
    for."""


async def current(threads: WorkerThreads, fd: int) -> tuple[int, int]:
    """Return the free bytes and inodes of a file system. Raise OSError.

    All watches of an event loop share a reply for a moment: with one call for each, those of 100
    busy kernels took a tenth of a core.
    """
    loop = asyncio.get_running_loop()
    replies = kept_with(loop, _Replies)
    device, now = os.fstat(fd).st_dev, loop.time()
    at, reply = replies.get(device, (0.0, None))
    if reply is None or now - at > _SHARED_S:
        reply = asyncio.ensure_future(threads.call(lambda: free(fd)))
        replies[device] = now, reply
    return await asyncio.shield(reply)


def free(fd: int) -> tuple[int, int]:
    status = os.fstatvfs(fd)
    return status.f_bfree * status.f_frsize, status.f_ffree


class WriteCounter:
    """Counts the bytes that the processes of a jail wrote to any disk.

    It indicates the writer and does not prove it: Linux forgets the writes of a child whose parent
    does not wait for it, and counts those of others at their parent again.
    """

    def __init__(self) -> None:
        self._written: dict[int, int] = {}

    def note(self, pids: Sequence[int]) -> int:
        """Return the sum so far, after a look at these processes."""
        for pid in pids:
            try:
                self._written[pid] = max(self._written.get(pid, 0), procfs.written(pid))
            except PermissionError:  # of another user, or hidden: any number
                self._written[pid] = UNKNOWN_WRITES
            except OSError:
                continue
        return sum(self._written.values())


class HostGrowth:
    """Measures the growth of a directory of the host since its first kernel started.

    The directory may have any size, so it is walked only when its file system has lost as much as
    the directory may still grow by, from the most free space since the last walk. Then the entries
    that changed count, at most the loss or the writes of the jail, whichever is larger: another
    program may free space meanwhile. The user may work in the directory as well: if the processes
    of the jail did not write half as much, growth up to `UNKNOWN_FACTOR` times the limit counts as
    the limit.
    """

    def __init__(self, directory: HostDirectory, limits: LimitsPolicy) -> None:
        self._most = limits.workspace_max, limits.workspace_files
        self._since = time.time()
        self._free = self._free_at_walk = free(directory.fd)
        self._grown = 0, 0
        self._writes = WriteCounter()

    def left(self) -> tuple[int, int]:
        """Return the bytes and inodes that the file system may lose before the next walk."""
        (most, most_names), (size, names) = self._most, self._grown
        return max(_STEP, most - size), max(_STEP_NAMES, most_names - names)

    def measure(
        self, directory: HostDirectory, pids: Sequence[int], deadline_s: float
    ) -> tuple[int, int]:
        """Return the bytes and the entries to count. Raise OSError."""
        written = self._writes.note(pids)
        now = free(directory.fd)
        left = self.left()
        peaks = (max(pair) for pair in zip(self._free_at_walk, now, strict=True))
        self._free_at_walk = next(peaks), next(peaks)
        if any(
            was - is_now > most
            for was, is_now, most in zip(self._free_at_walk, now, left, strict=True)
        ):
            with directory.tree() as tree:
                changed = tree.measure(
                    max_entries=_ENTRIES, deadline_s=deadline_s, since=self._since
                )
            lost, lost_names = (a - b for a, b in zip(self._free, now, strict=True))
            self._grown = (
                min(changed.bytes, max(lost, written)),
                min(changed.inodes, max(lost_names, written // _PAGE)),
            )
            self._free_at_walk = now
        size, names = self._grown
        if 2 * written < size + _PAGE * names:
            size, names = (
                grown if grown > UNKNOWN_FACTOR * most else min(grown, most)
                for grown, most in zip(self._grown, self._most, strict=True)
            )
        return size, names
