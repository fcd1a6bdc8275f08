"""Periodic work on sandboxes: it closes idle ones, ends expired ones, collects garbage, and stops
idle kernels before the host swaps.

One task with the injected clock. A round is short, and a failed one is logged and repeated. Nothing
depends on its punctuality: each use of a sandbox checks its expiry.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from sbx.aio import Clock, in_thread
from sbx.errors import Conflict, SbxError
from sbx.linux import memory
from sbx.runtime.settings import Settings
from sbx.service.garbage import GarbageCollector
from sbx.service.models import TaskReport
from sbx.service.projects.projects import Projects
from sbx.service.reserve import Reserve
from sbx.service.sandbox import ServiceSandbox
from sbx.service.sandboxes import Sandboxes

ROUND_S = 1.0
_RESERVE_MAX = 1 << 30
_ENDED_MOST = 16  # kernels a round: their memory is available a moment later
_log = logging.getLogger(__name__)


class Reaper:
    """`available` returns (bytes that programs could take without swapping, bytes in all)."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        clock: Clock,
        settings: Settings,
        garbage: GarbageCollector,
        projects: Projects | None = None,
        available: Callable[[], tuple[int, int]] = memory.available,
        reserve: Reserve | None = None,
    ) -> None:
        self._sandboxes = sandboxes
        self._clock = clock
        self._settings = settings
        self._garbage = garbage
        self.collecting = False
        self._projects = projects
        self._available = available
        self._disk_reserve = reserve
        self._collect_at = clock.now() + settings.gc_interval
        self._collection: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            while True:
                await self._clock.sleep(ROUND_S)
                try:
                    await self.round()
                except Exception:  # noqa: BLE001  # the border: a background task
                    _log.exception("a round of the reaper failed, and will come again")
        finally:
            if self._collection is not None:
                self._collection.cancel()
                await asyncio.wait([self._collection])

    async def round(self) -> None:
        """Do all work that is due now; a collection continues next to later rounds."""
        every = self._sandboxes.every()
        for sandbox in every:
            sandbox.announce_expiry()
        await _all(sandbox.expire() for sandbox in every if sandbox.expired and not sandbox.over)
        await _all(sandbox.stop_idle() for sandbox in every if sandbox.idle)
        if self._projects is not None:
            await self._projects.close_idle()
        await self._make_room()
        if self._disk_reserve is not None and self._disk_reserve.full:
            await in_thread(self._disk_reserve.allocate)
        if self._settings.gc_interval > 0 and self._clock.now() >= self._collect_at:
            self._collect_at = self._clock.now() + self._settings.gc_interval
            if self._collection is None or self._collection.done():
                self._collection = asyncio.create_task(self._collect())

    async def _make_room(self) -> None:
        """End idle kernels, the least recently used first, while too little memory is available."""
        for _ in range(_ENDED_MOST):
            try:
                available, total = self._available()
            except (OSError, KeyError, ValueError) as error:
                _log.warning("how much memory is available cannot be read: %s", error)
                return
            if available >= self._reserve(total):
                return
            if not await self._sandboxes.kernels.evict_one("memory_pressure"):
                return

    def _reserve(self, total: int) -> int:
        chosen = self._settings.memory_reserve
        return min(total // 10, _RESERVE_MAX) if chosen is None else chosen

    async def collect(self, tasks: Iterable[str] | None = None) -> Sequence[TaskReport]:
        """Remove everything that is idle, expired or left over; `tasks` filters the reports.

        Raises Conflict `gc_running`.
        """
        if self.collecting:
            raise Conflict(
                "a collection is in progress",
                code="gc_running",
                details={"retry_after_s": 1.0},
            )
        self.collecting = True
        try:
            every = self._sandboxes.every()
            reports = [
                await _report("idle_session", (sandbox.stop_idle for sandbox in every)),
                await _report(
                    "expired_sandbox", (partial(self._delete_expired, sandbox) for sandbox in every)
                ),
                *await self._garbage.collect(),
            ]
        finally:
            self.collecting = False
        names = None if tasks is None else set(tasks)
        return [report for report in reports if names is None or report.task_name in names]

    async def _delete_expired(self, sandbox: ServiceSandbox) -> bool:
        if not sandbox.expired:
            return False
        await sandbox.expire()
        if sandbox.in_grace:
            return False
        return await self._sandboxes.end(sandbox, "expired")

    async def _collect(self) -> None:
        try:
            await self.collect()
        except Conflict:
            _log.debug("a requested collection is in progress")
        except Exception:  # noqa: BLE001  # the border: a background task
            _log.exception("a collection failed, and will be tried again")


async def _report(name: str, calls: Iterable[Callable[[], Awaitable[bool]]]) -> TaskReport:
    cleaned, failures = 0, []
    for call in calls:
        try:
            cleaned += await call()
        except SbxError as error:
            failures.append(error.message)
    return TaskReport(name, cleaned, 0, tuple(failures))


async def _all(acts: Iterable[Awaitable[object]]) -> None:
    for end in await asyncio.gather(*acts, return_exceptions=True):
        if isinstance(end, SbxError):
            _log.warning("a sandbox could not be seen to: %s", end)
        elif isinstance(end, Exception):
            _log.error("a sandbox could not be seen to", exc_info=end)
