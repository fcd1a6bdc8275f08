"""From an order to a live kernel, by the fastest path that serves: pool → fork → cold.

    pool   a parked jail is given its plan: mounts, cgroup, uid, seal
    fork   the same with a jail forked on order, when none is parked
    cold   bubblewrap and a new interpreter: when it is asked for, and when nothing else works

What fails on one path is destroyed, logged and counted, and the next path is tried; the receipt of
the kernel says why. A refusal that every path would give is raised by the first. When nobody waits
for a kernel, one task parks new ones, one after the other; about every 10 s, while anything is
kept, pools and zygotes are looked at and fitted to what was asked of them lately.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sbx import errors
from sbx.isolation.forked import check_process
from sbx.isolation.launch import Broker, Zygote
from sbx.isolation.patience import to_the_end
from sbx.kernels import upkeep
from sbx.kernels.kernel import Kernel, KernelDied
from sbx.kernels.order import Order
from sbx.kernels.pool import Berth, Furnished, Pool, destroy
from sbx.kernels.zygotes import Clock, Key, Lineage, unavailable
from sbx.linux import memory
from sbx.telemetry import metrics, spans
from sbx.telemetry.starts import Starts

_log = logging.getLogger(__name__)
_FAST_DEADLINE_S = 10.0  # a thousand times what it takes; then the cold path gets its chance
_FAST_SHARE = 0.5  # of the time that is left: the next path needs some, too
_YIELD_S = 1.0
_REST_S = 0.05  # who has a kernel uses it now: a fork beside it makes a first cell or a stop slower
_AT_ONCE = (os.cpu_count() or 1) + 1  # more would only get ready together, and all of them late
_TRIES = 3
_COLD_TRIES = 5  # while all kernels were killed every 1.3 s, 3 were too few
_FINAL = (errors.BadRequest, errors.NotFound, errors.Conflict, errors.Denied)
_FINAL_CODES = ("broker_died", "broker_silent", "used_after_fork", "path_replaced")


@dataclass(slots=True)
class _Tried:
    """By which path one order is tried now, until when by `time.monotonic`, why the faster ones did
    not serve, and whose forked jail came up wrong."""

    until: float
    path: str = "cold"
    causes: list[str] = field(default_factory=list)
    suspect: tuple[Pool, errors.SbxError, Zygote | None] | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, round(self.until - time.monotonic(), 1))

    def fast(self) -> AbstractAsyncContextManager[None]:
        """A fast path has this long; raises Broken `start_timeout`."""
        return _deadline(min(_FAST_DEADLINE_S, self.left_s * _FAST_SHARE))


class Starter:
    """Starts the kernels of one runtime, and keeps what makes that fast.

    `most`: how many zygotes at once, not counting one that is just being replaced; 0 leaves only
    the cold path. `deadline_s`: what a start may take, by however many paths, and a zygote's.
    """

    def __init__(
        self, broker: Broker, *, most: int, deadline_s: float, clock: Clock | None = None
    ) -> None:
        self._pid = os.getpid()
        self._broker = broker
        self._most = most
        self._deadline_s = deadline_s
        self._clock = clock or asyncio.get_running_loop()
        self._pools: dict[Key, Pool] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()
        self._rest: asyncio.TimerHandle | None = None
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._work = asyncio.Event()
        self._refilling: asyncio.Task[None] | None = None
        self._tick: Any = None
        self._wake: Any = None
        self._short = False
        self._closed = False
        self.starts = Starts()

    async def start(self, order: Order) -> Kernel:
        """A sealed kernel that can run cells. Raises what the last path raised; nothing is left."""
        check_process(self._pid)
        began = time.monotonic()
        tried = _Tried(began + self._deadline_s)
        with self._somebody_waits():
            kernel = None
            if order.key is not None and self._most:
                if order.key.unfit:
                    tried.causes.append(order.key.unfit)
                else:
                    kernel = await self._fast(order, order.key, tried)
            if kernel is None:
                kernel = await self._cold(order, tried)
        kernel.receipt = replace(kernel.receipt, path=tried.path, fallback="; ".join(tried.causes))
        self.starts = self.starts.with_served(tried.path)
        took_s = time.monotonic() - began
        metrics.acquired(tried.path, took_s)
        spans.record("sbx.acquire", took_s, path=tried.path, sandbox=order.sandbox)
        return kernel

    def take_berth(self, key: Key | None, furnished: Furnished) -> Berth | None:
        """A kernel in a home for a new sandbox, the caller's from here on; None where none is
        ready, and from then on some may be. Nothing is started for it."""
        check_process(self._pid)
        if key is None or key.unfit or not self._most or not key.max_idle:
            return None
        try:
            pool = self._pool(key)
        except errors.Unavailable:
            return None  # whoever starts a kernel is told
        with self._somebody_waits(), pool.in_use():
            return pool.take_berth(furnished)

    def served_ahead(self, sandbox: str) -> None:
        """A kernel out of a berth begins to serve: nobody waited for it."""
        self.starts = self.starts.with_served("pool")
        metrics.acquired("pool", 0.0)
        spans.record("sbx.acquire", 0.0, path="pool", sandbox=sandbox)

    async def warm(self, key: Key, count: int, furnished: Furnished | None = None) -> None:
        """Return when `count` kernels are parked, which are then kept for a while at least; in a
        berth where it is said how those are made.

        Raises BadRequest for more than the policy keeps, and Unavailable or what a fork raised
        when they cannot be had.
        """
        check_process(self._pid)
        if not self._most:
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
                    await self._park(pool)
                else:
                    await self._move_in(pool)
        if not pool.settled:
            raise unavailable("kernels end as soon as they are parked")

    def parked(self, key: Key) -> int:
        """How many kernels wait in the pool of this key."""
        return self._pools[key].parked if key in self._pools else 0

    @property
    def all_parked(self) -> int:
        """How many kernels wait in all pools together."""
        return sum(pool.parked for pool in self._pools.values())

    async def close(self) -> None:
        """End parked kernels and zygotes; kernels that were given out are their owners'."""
        self._closed = True
        for timer in (self._tick, self._wake, self._rest):
            if timer is not None:
                timer.cancel()
        await to_the_end(self._end())

    # -- the three paths ------------------------------------------------------------------------

    async def _fast(self, order: Order, key: Key, tried: _Tried) -> Kernel | None:
        """By pool or by fork; None when neither serves, with the causes."""
        tried.path = "fork"
        try:
            pool = self._pool(key)
        except errors.Unavailable as error:
            self._failed(error, tried)
            return None
        with pool.in_use():
            if order.pooled and (parked := pool.take()) is not None:
                tried.path = "pool"
                try:
                    async with self._room, tried.fast():
                        return await self._enter(parked, order, tried)
                except errors.SbxError as error:
                    self._failed(error, tried)
                    tried.suspect = (pool, error, parked.jail.zygote)
                    if isinstance(error, errors.CannotEnforce):
                        return None  # a jail forked now would refuse the same
                tried.path = "fork"
            jail, before = None, pool.lineage.zygote
            try:
                async with self._room, tried.fast():
                    jail = await pool.lineage.fork()
                    kernel = await self._enter(await Kernel.attach(jail), order, tried)
            except errors.SbxError as error:
                self._failed(error, tried)
                if jail is not None:
                    tried.suspect = (pool, error, jail.zygote)
                elif before is not None and error.code == "start_timeout":
                    tried.suspect = (pool, error, before)  # it was there, and has forked nothing
                return None
            if tried.causes:
                self._dismiss(pool.shrink(0))  # what else is parked may be like the one that failed
            return kernel

    async def _enter(self, kernel: Kernel, order: Order, tried: _Tried) -> Kernel:
        """The boot frames go first: they wait in the jail's sockets until it has entered."""
        try:
            kernel.jail.give(order.plan)
            kernel.boot(order.config)
            await self._broker.enter(kernel.jail, order.sandbox, order.identities)
        except BaseException:
            await destroy(kernel)
            raise
        await kernel.ready(tried.left_s)
        return kernel

    async def _cold(self, order: Order, tried: _Tried) -> Kernel:
        """Launch another kernel if one is killed before it is ready, perhaps together with others.
        One whose memory ran out would only repeat that."""
        tried.path = "cold"
        for left in reversed(range(_COLD_TRIES)):
            try:
                kernel = await self._launch(order, tried)
            except errors.SbxError as error:
                self.starts = self.starts.with_failed("cold", error.message)
                is_killed = error.code == "start_failed" and not error.details.get("oom_kills")
                if not is_killed or not left or not tried.left_s:
                    raise
                _log.warning("no kernel by the path cold, which is tried again: %s", error)
            else:
                break
        if tried.suspect is not None:
            # The order can be served, so it was the zygote. Had this failed, too, it might be the
            # caller's own workspace, which is no reason to make others wait.
            pool, failure, zygote = tried.suspect
            self._dismiss(pool.distrust(failure, zygote))
        return kernel

    async def _launch(self, order: Order, tried: _Tried) -> Kernel:
        async with _deadline(tried.left_s):
            jail = await self._broker.launch(order.sandbox, order.plan, order.identities)
        return await Kernel.start(jail, order.config, tried.left_s)

    def _failed(self, error: errors.SbxError, tried: _Tried) -> None:
        """Note it; raises it again when the next path would only repeat it."""
        self.starts = self.starts.with_failed(tried.path, error.message)
        if isinstance(error, _FINAL) or error.code in _FINAL_CODES:
            raise error
        level = logging.INFO if error.code == "zygote_unavailable" else logging.WARNING
        _log.log(level, "no kernel by the path %s: %s", tried.path, error)
        tried.causes.append(f"{tried.path}: {error.message}")

    # -- pools ----------------------------------------------------------------------------------

    def _pool(self, key: Key) -> Pool:
        """The pool of this key; a new one may end the one that was used longest ago."""
        if (pool := self._pools.get(key)) is not None:
            return pool
        if self._closed:
            raise unavailable("the runtime is closed")
        if len(self._pools) >= self._most:
            now, keys = self._clock.time(), list(self._pools)
            pools = (self._pools[one] for one in keys)
            index = upkeep.least_used((now - one.used_at, one.busy) for one in pools)
            if index is None:
                raise unavailable(f"all {self._most} zygotes are in use (SBX_ZYGOTES_MAX)")
            self._drop(keys[index])
        lineage = Lineage(partial(self._start_zygote, key), self._clock, self._work.set)
        self._pools[key] = pool = Pool(key, lineage, self._clock, self._work.set)
        if self._refilling is None:
            self._refilling = asyncio.create_task(self._refill(), context=Context())
        if self._tick is None:
            self._tick = self._clock.call_later(upkeep.TICK_S, self._begin_tending)
        return pool

    async def _start_zygote(self, key: Key) -> Zygote:
        return await self._broker.start_zygote(key.plan, key.walls(), key.uid, self._deadline_s)

    def _drop(self, key: Key) -> None:
        if (pool := self._pools.pop(key, None)) is not None:
            self._dismiss(pool.close())

    def _dismiss(self, ending: Coroutine[Any, Any, None]) -> None:
        """Let something end by itself; `close` waits for it."""
        task = asyncio.create_task(ending, context=Context())
        self._ending.add(task)
        task.add_done_callback(self._dismissed)

    def _dismissed(self, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a pool could not be tended or ended", exc_info=error)

    async def _park(self, pool: Pool) -> None:
        await pool.park()
        self.starts = self.starts.with_parked()

    async def _move_in(self, pool: Pool) -> None:
        """Raises as `park`; what could not move in costs its zygote what a failed start does."""

        async def enter(kernel: Kernel, order: Order) -> Kernel:
            tried = _Tried(time.monotonic() + self._deadline_s, "pool")
            zygote = kernel.jail.zygote
            try:
                async with tried.fast():
                    await self._enter(kernel, order, tried)
                    await _rehearsed(kernel)
            except errors.SbxError as error:
                if not isinstance(error, _FINAL) and error.code not in _FINAL_CODES:
                    await pool.distrust(error, zygote)
                raise
            kernel.receipt = replace(kernel.receipt, path=tried.path)
            return kernel

        await pool.move_in(enter)

    async def _refill(self) -> None:
        """Park one kernel after the other while a pool lacks one, and nobody waits for a start.

        Where somebody always does, one a second: who starts slow kernels all the time must not
        keep everybody's pool empty.
        """
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._fill()
            except OSError as error:  # no descriptor to be had, or the like: until the next look
                _log.warning("no kernel could be parked: %s", error)
            except Exception:  # noqa: BLE001  # a background task's border
                _log.exception("no kernel could be parked")
                await asyncio.sleep(_YIELD_S)
            if self._wake is not None:
                self._wake.cancel()
                self._wake = None
            rests = [s for p in self._pools.values() if not p.settled and (s := p.lineage.rests_s)]
            if rests:
                self._wake = self._clock.call_later(min(rests), self._work.set)

    async def _fill(self) -> None:
        while (pool := self._lacking()) is not None:
            if not self._nobody_waits.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_YIELD_S):
                        await self._nobody_waits.wait()
                    continue  # and see anew what is lacking
            if self._is_short():
                return
            try:
                if pool.lacks:
                    await self._park(pool)
                else:
                    await self._move_in(pool)
            except errors.SbxError as error:
                self.starts = self.starts.with_failed("park", error.message)
                _log.warning("no kernel could be parked: %s", error)

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
        """Fit what is kept to what was asked for, and end what nobody has used for long."""
        try:
            now = self._clock.time()
            for key, pool in list(self._pools.items()):
                if not pool.busy and now - pool.used_at >= upkeep.UNUSED_S:
                    self._drop(key)
                    continue
                pool.lineage.tend()
                await pool.settle()
            if any(pool.parked for pool in self._pools.values()) and self._is_short():
                _log.warning("memory is short on this host: parked kernels are ended")
                for pool in list(self._pools.values()):
                    await pool.shrink(0)
        finally:
            if self._pools and self._tick is None and not self._closed:
                self._tick = self._clock.call_later(upkeep.TICK_S, self._begin_tending)
            self._work.set()

    def _is_short(self) -> bool:
        available, total = memory.available()
        self._short = upkeep.short_of_memory(
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
    def _somebody_waits(self) -> Iterator[None]:
        self._waiting += 1
        self._nobody_waits.clear()
        if self._rest is not None:
            self._rest.cancel()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and not self._closed:
                loop = asyncio.get_running_loop()
                self._rest = loop.call_later(_REST_S, self._nobody_waits.set)


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
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        message = f"there was no kernel within {seconds:g} s"
        raise errors.Broken(message, code="start_timeout") from None
