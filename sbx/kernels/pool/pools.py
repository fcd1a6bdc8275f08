"""The pools of one runtime: kernels that are kept ready, and the zygotes that they are forked from.

While no caller waits for a kernel, one task starts new kernels, one after the other. While anything
is kept, a timer adapts pools and zygotes to the recent demand about every 10 s.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import Struct, field

from sbx import errors
from sbx.aio import check_process, run_to_completion
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import ZygoteHandle
from sbx.kernels.command import KernelDied
from sbx.kernels.kernel import Kernel
from sbx.kernels.pool import scaling
from sbx.kernels.pool.warm_pool import LaunchRequest, Pool, PrewarmSpec, destroy
from sbx.kernels.pool.zygotes import Key, ZygoteGroup, unavailable
from sbx.linux import memory
from sbx.telemetry.starts import StartCounts

_log = logging.getLogger(__name__)
_FAST_DEADLINE_S = 10.0  # a thousand times the usual duration; then the cold path gets its chance
_FAST_SHARE = 0.5  # of the remaining time: the next path needs some, too
_YIELD_S = 1.0
_REST_S = 0.05  # the caller uses its new kernel now: a fork would slow its first cell or a stop
_AT_ONCE = (os.cpu_count() or 1) + 1  # more would only get ready at the same time, all of them late
_TRIES = 3
FINAL = (errors.BadRequest, errors.NotFound, errors.Conflict, errors.Denied)
FINAL_CODES = ("broker_died", "broker_silent", "used_after_fork", "path_replaced")


class StartAttempt(Struct):
    """The state of one order: the path that is tried now, the deadline by `time.monotonic`, why
    the faster paths failed, and the pool and zygote of a forked jail that failed."""

    until: float
    path: str = "cold"
    causes: list[str] = field(default_factory=list)
    suspect: tuple[Pool, errors.SbxError, ZygoteHandle | None] | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, round(self.until - time.monotonic(), 1))

    def fast(self) -> AbstractAsyncContextManager[None]:
        """Limit a fast path to its share of the time. Raise Broken `start_timeout`."""
        return start_deadline(min(_FAST_DEADLINE_S, self.left_s * _FAST_SHARE))


class KernelPools:
    """Keeps kernels ready for one runtime.

    `most` is the maximum number of zygotes, not counting one that is just being replaced; 0 leaves
    only the cold path. `deadline_s` limits a start over all its paths, and the start of a zygote.
    """

    def __init__(
        self,
        broker: BrokerClient,
        *,
        most: int,
        deadline_s: float,
        clock: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._broker = broker
        self._zygotes_max = most
        self._deadline_s = deadline_s
        self._clock = clock or asyncio.get_running_loop()
        self._pools: dict[Key, Pool] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._no_caller_waits = asyncio.Event()
        self._no_caller_waits.set()
        self._rest: asyncio.TimerHandle | None = None
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._work = asyncio.Event()
        self._refilling: asyncio.Task[None] | None = None
        self._tick: Any = None
        self._wake: Any = None
        self._short = False
        self._closed = False
        self.starts = StartCounts()

    async def warm(self, key: Key, count: int, furnished: PrewarmSpec | None = None) -> None:
        """Wait until `count` kernels are idle, and keep them for some time at least.

        With `furnished`, keep them prewarmed. Raise BadRequest for more than the policy keeps.
        Raise Unavailable, or the error of a fork, if the kernels cannot be started.
        """
        check_process(self._pid)
        if not self._zygotes_max:
            raise unavailable("the setting fast_path (SBX_FAST_PATH) is off")
        if count > key.max_idle:
            raise errors.BadRequest(
                f"pool.max_idle of the policy is {key.max_idle}: {count} kernels are not kept",
                code="limit_widened",
                hint="ask for fewer, or set pool.max_idle in the policy",
            )
        pool = self._pool(key)
        with pool.in_use():
            await pool.expect(count, furnished)
            for _ in range(2 * key.max_idle + _TRIES):
                if pool.settled:
                    return
                if self._is_short():
                    raise unavailable("the host is short of memory")
                if pool.lacks:
                    await self._add_idle(pool)
                else:
                    await self._move_in(pool)
        if not pool.settled:
            raise unavailable("kernels end as soon as they are idle")

    def idle(self, key: Key) -> int:
        """Return the number of kernels that wait in the pool of this key."""
        return self._pools[key].idle if key in self._pools else 0

    @property
    def all_idle(self) -> int:
        """The number of kernels that wait in all pools together."""
        return sum(pool.idle for pool in self._pools.values())

    async def close(self) -> None:
        """End idle kernels and zygotes. Kernels that were handed out belong to their owners."""
        self._closed = True
        for timer in (self._tick, self._wake, self._rest):
            if timer is not None:
                timer.cancel()
        await run_to_completion(self._end())

    async def _enter(self, kernel: Kernel, order: LaunchRequest, attempt: StartAttempt) -> Kernel:
        """Send the boot frames first: they wait in the jail's sockets until it has entered."""
        try:
            kernel.jail.give(order.plan)
            kernel.boot(order.config)
            await self._broker.enter(kernel.jail, order.sandbox, order.identities)
        except BaseException:
            await destroy(kernel)
            raise
        await kernel.ready(attempt.left_s)
        return kernel

    def _pool(self, key: Key) -> Pool:
        """Return the pool of this key; a new pool may end the least recently used one."""
        if (pool := self._pools.get(key)) is not None:
            return pool
        if self._closed:
            raise unavailable("the runtime is closed")
        if len(self._pools) >= self._zygotes_max:
            now, keys = self._clock.time(), list(self._pools)
            pools = (self._pools[candidate] for candidate in keys)
            index = scaling.least_used(
                (now - candidate.used_at, candidate.busy) for candidate in pools
            )
            if index is None:
                raise unavailable(f"all {self._zygotes_max} zygotes are in use (SBX_ZYGOTES_MAX)")
            self._drop(keys[index])
        lineage = ZygoteGroup(partial(self._start_zygote, key), self._clock, self._work.set)
        self._pools[key] = pool = Pool(key, lineage, self._clock, self._work.set)
        if self._refilling is None:
            self._refilling = asyncio.create_task(self._refill(), context=Context())
        if self._tick is None:
            self._tick = self._clock.call_later(scaling.TICK_S, self._begin_tending)
        return pool

    async def _start_zygote(self, key: Key) -> ZygoteHandle:
        return await self._broker.start_zygote(key.plan, key.walls(), key.uid, self._deadline_s)

    def _drop(self, key: Key) -> None:
        if (pool := self._pools.pop(key, None)) is not None:
            self._dismiss(pool.close())

    def _dismiss(self, ending: Coroutine[Any, Any, None]) -> None:
        """Let something end in the background; `close` waits for it."""
        task = asyncio.create_task(ending, context=Context())
        self._ending.add(task)
        task.add_done_callback(self._dismissed)

    def _dismissed(self, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a pool could not be tended or ended", exc_info=error)

    async def _add_idle(self, pool: Pool) -> None:
        await pool.add_idle()
        self.starts = self.starts.with_started_ahead()

    async def _move_in(self, pool: Pool) -> None:
        """Prewarm a kernel. Raise like `add_idle`. A failure counts against the zygote, like
        a failed start."""

        async def enter(kernel: Kernel, order: LaunchRequest) -> Kernel:
            attempt = StartAttempt(time.monotonic() + self._deadline_s, "pool")
            zygote = kernel.jail.zygote
            try:
                async with attempt.fast():
                    await self._enter(kernel, order, attempt)
                    await _rehearsed(kernel)
            except errors.SbxError as error:
                if not isinstance(error, FINAL) and error.code not in FINAL_CODES:
                    await pool.mark_untrusted(error, zygote)
                raise
            kernel.receipt = replace(kernel.receipt, path=attempt.path)
            return kernel

        await pool.move_in(enter)

    async def _refill(self) -> None:
        """Add one kernel after the other while a pool lacks one and no caller waits for a start.

        If there is always a caller that waits, add one a second: a caller that starts slow kernels
        all the time must not keep the pools of all others empty.
        """
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._fill()
            except OSError as error:  # for example no free descriptor: wait until the next look
                _log.warning("no idle kernel could be started: %s", error)
            except Exception:  # noqa: BLE001  # the boundary of a background task
                _log.exception("no idle kernel could be started")
                await asyncio.sleep(_YIELD_S)
            if self._wake is not None:
                self._wake.cancel()
                self._wake = None
            rests = [s for p in self._pools.values() if not p.settled and (s := p.lineage.rests_s)]
            if rests:
                self._wake = self._clock.call_later(min(rests), self._work.set)

    async def _fill(self) -> None:
        while (pool := self._lacking()) is not None:
            if not self._no_caller_waits.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_YIELD_S):
                        await self._no_caller_waits.wait()
                    continue  # look again for a pool that lacks kernels
            if self._is_short():
                return
            try:
                if pool.lacks:
                    await self._add_idle(pool)
                else:
                    await self._move_in(pool)
            except errors.SbxError as error:
                self.starts = self.starts.with_failed("refill", error.message)
                _log.warning("no idle kernel could be started: %s", error)

    def _lacking(self) -> Pool | None:
        if not self._broker.alive:
            return None
        for pool in self._pools.values():
            if not pool.settled and not pool.lineage.rests_s:
                return pool
        return None

    def _begin_tending(self) -> None:
        self._tick = None
        self._dismiss(self._tend())

    async def _tend(self) -> None:
        """Adapt the kept kernels to the demand, and end pools that were unused for a long time."""
        try:
            now = self._clock.time()
            for key, pool in list(self._pools.items()):
                if not pool.busy and now - pool.used_at >= scaling.UNUSED_S:
                    self._drop(key)
                    continue
                pool.lineage.tend()
                await pool.settle()
            if any(pool.idle for pool in self._pools.values()) and self._is_short():
                _log.warning("memory is short on this host: idle kernels are ended")
                for pool in list(self._pools.values()):
                    await pool.shrink(0)
        finally:
            if self._pools and self._tick is None and not self._closed:
                self._tick = self._clock.call_later(scaling.TICK_S, self._begin_tending)
            self._work.set()

    def _is_short(self) -> bool:
        available, total = memory.available()
        self._short = scaling.short_of_memory(
            available, total, memory.stalled(), was_short=self._short
        )
        return self._short

    async def _end(self) -> None:
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait([self._refilling])
        for key in list(self._pools):
            self._drop(key)
        while self._ending:
            await asyncio.wait(self._ending)

    @contextmanager
    def _caller_waits(self) -> Iterator[None]:
        self._waiting += 1
        self._no_caller_waits.clear()
        if self._rest is not None:
            self._rest.cancel()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and not self._closed:
                loop = asyncio.get_running_loop()
                self._rest = loop.call_later(_REST_S, self._no_caller_waits.set)


async def _rehearsed(kernel: Kernel) -> None:
    try:
        await kernel.rehearse()
    except BaseException as error:
        await destroy(kernel)
        if isinstance(error, KernelDied):
            message = f"the kernel ended in its rehearsal: {error}"
            raise errors.Broken(message, code="start_failed") from None
        raise


@asynccontextmanager
async def start_deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        message = f"no kernel started within {seconds:.3g} s"
        if seconds <= 0:
            message = "the whole time for the start was spent in the queue for it"
        raise errors.Broken(message, code="start_timeout") from None
