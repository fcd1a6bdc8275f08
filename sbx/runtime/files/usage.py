"""The usage of a live sandbox, counted by its cgroup if it has one, else by its processes.

UsageReader.now ──► Broker.usage (cgroup, network)        all jails of the sandbox
    │    └──► procfs, in a thread                    … where no cgroup counts
    └───────► Tree.measure, in a thread              the workspace of one conversation
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from msgspec import Struct

from sbx.errors import BadRequest, SbxError
from sbx.isolation.broker.client import JailsUsage
from sbx.linux import procfs
from sbx.policy import Policy
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, SandboxUsage, Source
from sbx.runtime.files.files import OpenFiles
from sbx.runtime.granted import MemoryLimit
from sbx.workspace.disk_usage import DiskUsage as Measured

_ENTRIES = 200_000
_MEASURE_S = 0.4
_MEASURED_AGAIN_S = 0.5
_DUTY = 10  # a measurement is used for so many times as long as it took
_SOURCES: dict[int, Source] = {2: "cgroup2", 1: "cgroup1"}


class SandboxUsageSource(Struct, frozen=True):
    """The sandbox of a conversation. `pids` are the processes of all its jails."""

    id: str
    jails: Callable[[], Awaitable[JailsUsage]]
    pids: Callable[[], list[int]]
    memory: MemoryLimit


class UsageReader:
    """Reads the usage of the sandbox of a conversation."""

    def __init__(
        self,
        policy: Policy,
        opened: Callable[[], Awaitable[OpenFiles]],
        sandbox: SandboxUsageSource,
    ) -> None:
        self._policy = policy
        self._opened = opened
        self._sandbox = sandbox
        self._highest = 0
        self._disk: Measured | None = None
        self._disk_until = 0.0
        self._measuring = asyncio.Lock()

    async def now(self) -> SandboxUsage:
        """Read the usage now. Raise Closed, and Broken if the broker has ended."""
        opened = await self._opened()
        with opened.in_use():
            disk = await self._measured(opened)
            usage = await self._sandbox.jails()
            values: list[Any] = [usage.cpu_s, usage.memory, usage.tasks]
            if by_process := None in values:
                counted = await opened.call(lambda: _count(self._sandbox.pids()))
                pairs = zip(values, counted, strict=True)
                values = [other if value is None else value for value, other in pairs]
        limits = self._policy.limits
        cpu_s, memory, pids = values
        self._highest = max(self._highest, memory or 0)
        received, sent, loopback = usage.network or (None, None, None)
        return SandboxUsage(
            at=time.time(),
            source="proc" if by_process else _SOURCES[usage.version],
            kernels=usage.jails,
            cpu_s=cpu_s,
            memory=memory,
            memory_peak=self._highest if usage.memory_peak is None else usage.memory_peak,
            pids=pids,
            disk=None if disk is None else disk.bytes,
            disk_files=None if disk is None else disk.files,
            disk_complete=disk is not None and disk.complete,
            network_received=received,
            network_sent=sent,
            loopback=loopback,
            memory_max=self._sandbox.memory.bytes,
            pids_max=limits.tasks_max,
            cpu_quota=limits.cpu_quota,
            disk_max=limits.workspace_max,
        )

    async def stream(self, interval_s: float) -> AsyncGenerator[SandboxUsage, None]:
        """Yield the usage now and after each interval. Raise BadRequest `invalid_interval`."""
        if isinstance(interval_s, bool) or not INTERVAL_MIN_S <= interval_s <= INTERVAL_MAX_S:
            raise BadRequest(
                f"an interval is {INTERVAL_MIN_S:g} to {INTERVAL_MAX_S:g} seconds, "
                f"not {interval_s!r}",
                code="invalid_interval",
            )
        due = asyncio.get_running_loop().time()
        while True:
            yield await self.now()
            now = asyncio.get_running_loop().time()
            due = max(due + interval_s, now)
            await asyncio.sleep(due - now)

    async def _measured(self, opened: OpenFiles) -> Measured | None:
        """Return the disk usage: the last one for a while, as a walk may take long."""
        tree = opened.measured
        if tree is None:
            return None
        async with self._measuring:
            began = time.monotonic()
            if self._disk is None or began > self._disk_until:
                try:
                    self._disk = await opened.call(
                        lambda: tree.measure(max_entries=_ENTRIES, deadline_s=_MEASURE_S)
                    )
                except (OSError, SbxError):
                    self._disk = Measured(0, 0, complete=False)
                over = time.monotonic()
                self._disk_until = over + max(_MEASURED_AGAIN_S, _DUTY * (over - began))
        return self._disk


def _count(pids: list[int]) -> tuple[float, int, int]:
    """Return CPU seconds, memory (parts of shared pages), and threads of these processes."""
    spent = [_spent(pid) for pid in pids]
    memory = sum(procfs.proportional(pid) for pid in pids)
    return sum(cpu_s for cpu_s, _ in spent), memory, sum(threads for _, threads in spent)


def _spent(pid: int) -> tuple[float, int]:
    """Return (CPU seconds, number of threads) of a process; zeros if it has ended.

    The CPU seconds include the children that the process has waited for.
    """
    import psutil  # 5 ms, which most sandboxes do not need

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            threads = process.num_threads()
    except psutil.Error:
        return 0.0, 0
    return times.user + times.system + times.children_user + times.children_system, threads
