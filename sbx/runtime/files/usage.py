"""What a live sandbox uses: counted by its cgroup where there is one, else by its processes.

Meter.now ──► Broker.usage (cgroup, network)        all jails of the sandbox
    │    └──► procfs, in a thread                    … where no cgroup counts
    └───────► Tree.measure, in a thread              the workspace of one conversation
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from sbx.errors import BadRequest, SbxError
from sbx.isolation.broker.client import JailsUsage
from sbx.linux import procfs
from sbx.policy import Policy
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, SandboxUsage, Source
from sbx.runtime.files.files import OpenFiles
from sbx.workspace import DiskUsage as Measured

_ENTRIES = 200_000
_MEASURE_S = 0.4
_MEASURED_AGAIN_S = 0.5
_DUTY = 10  # a measure that took long is believed for so many times as long
_SOURCES: dict[int, Source] = {2: "cgroup2", 1: "cgroup1"}


@dataclass(frozen=True, slots=True)
class SandboxUsageSource:
    """The sandbox, as one conversation of it may ask. `pids` are the processes of all its jails."""

    id: str
    jails: Callable[[], Awaitable[JailsUsage]]
    pids: Callable[[], list[int]]


@dataclass(frozen=True, slots=True)
class CountedUsage:
    cpu_s: float
    memory: int
    pids: int


class UsageReader:
    """Tells what the sandbox of a conversation uses."""

    def __init__(
        self, policy: Policy, opened: Callable[[], Awaitable[OpenFiles]], whole: SandboxUsageSource
    ) -> None:
        self._policy = policy
        self._opened = opened
        self._whole = whole
        self._highest = 0
        self._disk: Measured | None = None
        self._disk_until = 0.0
        self._measuring = asyncio.Lock()

    async def now(self) -> SandboxUsage:
        """Raises Closed, and Broken where the broker has ended."""
        opened = await self._opened()
        with opened.in_use():
            disk = await self._measured(opened)
            told = await self._whole.jails()
            counted = None
            if None in (told.cpu_s, told.memory, told.tasks):
                counted = await opened.call(lambda: _counted(self._whole.pids()))
        limits = self._policy.limits
        cpu_s, memory, pids = told.cpu_s, told.memory, told.tasks
        if counted is not None:
            cpu_s = counted.cpu_s if cpu_s is None else cpu_s
            memory = counted.memory if memory is None else memory
            pids = counted.pids if pids is None else pids
        self._highest = max(self._highest, memory or 0)
        network = told.network
        return SandboxUsage(
            at=time.time(),
            source="proc" if counted is not None else _SOURCES[told.version],
            kernels=told.jails,
            cpu_s=cpu_s,
            memory=memory,
            memory_peak=self._highest if told.memory_peak is None else told.memory_peak,
            pids=pids,
            disk=None if disk is None else disk.bytes,
            disk_files=None if disk is None else disk.files,
            disk_complete=disk is not None and disk.complete,
            network_received=None if network is None else network[0],
            network_sent=None if network is None else network[1],
            loopback=None if network is None else network[2],
            memory_max=limits.memory_max,
            pids_max=limits.tasks_max,
            cpu_quota=limits.cpu_quota,
            disk_max=limits.workspace_max,
        )

    async def stream(self, interval_s: float) -> AsyncGenerator[SandboxUsage, None]:
        """One now, and one after each interval, until it is closed. Raises BadRequest."""
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
        """What the files take; the last measure while that is young, for a large tree costs."""
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


def _counted(pids: list[int]) -> CountedUsage:
    """By the processes that live now: shared pages divided among those who share them."""
    spent = [procfs.spent(pid) for pid in pids]
    return CountedUsage(
        cpu_s=sum(cpu_s for cpu_s, _ in spent),
        memory=sum(procfs.proportional(pid) for pid in pids),
        pids=sum(threads for _, threads in spent),
    )
