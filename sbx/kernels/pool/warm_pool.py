"""The kernels of one policy that are kept ready, warm and empty.

    idle       for an existing workspace, which the kernel enters when it is taken
    prewarmed  for a new sandbox: sealed in a cgroup and an empty workspace without an owner

Neither kind has an owner or has run user code. A kernel that was handed out never comes back. A
kernel that ends while it waits is dropped. Both kinds count towards the number of kernels to keep.
The number of prewarmed kernels follows the recent demand for new sandboxes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Protocol

from msgspec import Struct

from sbx import errors
from sbx.aio import run_to_completion
from sbx.isolation.broker.jail import ZygoteHandle
from sbx.isolation.launch_plan import LaunchPlan
from sbx.kernels.kernel import Kernel
from sbx.kernels.pool import scaling
from sbx.kernels.pool.zygotes import Key, ZygoteGroup

_log = logging.getLogger(__name__)


class LaunchRequest(Struct, frozen=True):
    """A request for a kernel, independent of the path by which it starts.

    `key` None: the cold path. `pooled`: it may be an idle one.
    `identities` are the (device, inode) that host paths of the plan must still have.
    """

    sandbox: str
    plan: LaunchPlan
    identities: Mapping[str, tuple[int, int]]
    config: Mapping[str, Any]
    key: Key | None
    pooled: bool = True


class PrewarmSlot(Protocol):
    """A sandbox's cgroup and an empty workspace, made before they have an owner."""

    @property
    def order(self) -> LaunchRequest:
        """The order for a kernel that moves in."""

    async def give_up(self) -> None:
        """Remove all of it; its kernel has ended. Raise nothing: leftovers are swept later."""


class PrewarmedKernel(Struct, frozen=True, eq=False):
    """A sealed kernel without an owner, for a new sandbox whose request equals `fits`."""

    kernel: Kernel
    slot: PrewarmSlot
    fits: object

    async def give_up(self) -> None:
        await destroy(self.kernel)
        await self.slot.give_up()


class PrewarmSpec(Struct, frozen=True):
    """A kind of new sandbox that callers request, and the function that prepares one."""

    fits: object
    make: Callable[[], Awaitable[PrewarmSlot]]


class Pool:
    """Idle kernels, first in, first out, and their lineage.

    `changed` is called when a jail was taken or has ended, so there may be work to do.
    """

    def __init__(
        self,
        key: Key,
        lineage: ZygoteGroup,
        clock: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
    ) -> None:
        self.lineage = lineage
        self._key = key
        self._clock = clock
        self._changed = changed
        self._idle: deque[Kernel] = deque()
        self._prewarmed: deque[PrewarmedKernel] = deque()
        self._watching: dict[Kernel, asyncio.Task[None]] = {}
        self._furnished: PrewarmSpec | None = None
        self._moving = asyncio.Lock()
        self._moved = 0  # kernels that are neither idle nor prewarmed yet
        self._users = 0
        self._closed = False
        self.used_at = clock.time()
        self.demand = scaling.PoolDemand(0, 0, self.used_at)
        self.new = scaling.PoolDemand(0, 0, self.used_at)

    @property
    def idle(self) -> int:
        """The number of waiting kernels, including the prewarmed ones."""
        return len(self._idle) + len(self._prewarmed)

    @property
    def lacks(self) -> bool:
        """Whether the pool should hold more kernels."""
        return not self._closed and self.idle + self._moved < self.demand.target

    @property
    def needs_prewarmed(self) -> bool:
        """Whether an idle kernel should be prewarmed, or a prewarmed one that fits no request
        should be given up for one that does."""
        if self._furnished is None or self._closed:
            return False
        return bool(self._idle) if self._has_room else self._is_foreign

    @property
    def _has_room(self) -> bool:
        return len(self._prewarmed) < min(self.new.target, self.demand.target)

    @property
    def _is_foreign(self) -> bool:
        """Whether prewarmed kernels wait, but none fits the last request.

        Policies that differ only in limits share a pool. A changed policy leaves prewarmed kernels
        that no caller will request.
        """
        furnished = self._furnished
        return furnished is not None and bool(self._prewarmed) and not self._fitting(furnished)

    def _fitting(self, furnished: PrewarmSpec) -> list[PrewarmedKernel]:
        return [prewarmed for prewarmed in self._prewarmed if prewarmed.fits == furnished.fits]

    @property
    def busy(self) -> bool:
        """Whether a caller is getting a kernel from this pool now, or one is being added."""
        return self._users > 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.used_at = self._clock.time()
        with self._busy():
            yield

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    def take(self) -> Kernel | None:
        """Hand an idle kernel over to the caller, or return None."""
        kernel = self._take()
        if kernel is not None:
            self.demand = scaling.taken(self.demand, self.idle)
        else:
            self.demand = scaling.missed(self.demand, self._key.min_idle, self._key.max_idle)
        self._changed()
        return kernel

    def _take(self) -> Kernel | None:
        while self._idle:
            kernel = self._idle.popleft()
            self._watching.pop(kernel).cancel()
            if kernel.alive:
                return kernel
            kernel.close()
        return None

    def take_prewarmed(self, furnished: PrewarmSpec) -> PrewarmedKernel | None:
        """Hand a prewarmed kernel that fits over to the caller. Return None without one.

        The first call makes the pool keep prewarmed kernels.
        """
        self._furnished = furnished
        for prewarmed in self._fitting(furnished):
            if prewarmed.kernel.alive:
                self._prewarmed.remove(prewarmed)
                self._watching.pop(prewarmed.kernel).cancel()
                self.new = scaling.taken(self.new, len(self._prewarmed))
                self.demand = scaling.taken(self.demand, self.idle)
                self._changed()
                return prewarmed
        self.new = scaling.missed(self.new, self._key.min_idle, self._key.max_idle)
        return None

    async def expect(self, count: int, furnished: PrewarmSpec | None = None) -> None:
        """Keep at least `count` kernels until a quiet time has shown that they are not needed.

        With `furnished`, keep them prewarmed. Otherwise keep them idle, in addition to as many
        prewarmed ones as there is room for.
        """
        now, limit = self._clock.time(), self._key.max_idle
        others: list[PrewarmedKernel] = []
        if furnished is not None:
            self._furnished = furnished
            fitting = self._fitting(furnished)
            others = [prewarmed for prewarmed in self._prewarmed if prewarmed not in fitting]
            new_target = min(limit, max(self.new.target, count + len(others)))
            target = max(self.demand.target, new_target)
            others = others[: max(0, count + len(others) - new_target)]
        else:
            new_target = min(self.new.target, limit - count)
            target = max(self.demand.target, new_target + count)
        self.new = scaling.PoolDemand(new_target, 0, now, self.new.filled)
        self.demand = scaling.PoolDemand(target, 0, now, self.demand.filled)
        await self._give_up(others)
        await self._give_up_prewarmed(new_target)

    @property
    def settled(self) -> bool:
        """Whether the right number of kernels waits in the right places."""
        return not self.lacks and not self.needs_prewarmed and not self._moved

    async def add_idle(self) -> None:
        """Fork one more kernel and keep it idle, if the pool still lacks one by then.

        Raise like `fork`. Raise Broken if the kernel died at once; its zygote is then ended, too.
        """
        with self._busy():
            jail = await self.lineage.fork(ahead=True)
            kernel = await Kernel.attach(jail)
            if not kernel.alive or not self.lacks:
                dead = not kernel.alive
                await destroy(kernel)
                if dead and not self._closed:
                    error = errors.Broken("a kernel ended before it was idle", code="start_failed")
                    await self.mark_untrusted(error, jail.zygote)
                    raise error
                return
        self._idle.append(kernel)
        self._begin_watching(kernel)
        if not self.lacks and not self.demand.filled:
            self.demand = scaling.PoolDemand(
                self.demand.target, self.idle, self._clock.time(), True
            )

    async def move_in(self, enter: Callable[[Kernel, LaunchRequest], Awaitable[Kernel]]) -> None:
        """Let an idle kernel enter a new sandbox, if the pool still lacks a prewarmed kernel.

        Raise like `enter` and like the function that prepares it. After an error nothing is
        left, and none is prewarmed until a caller asks for one.
        """
        async with self._moving:
            furnished = self._furnished
            if furnished is None or not self.needs_prewarmed:
                return
            with self._busy():
                if not self._has_room:
                    await self._give_up([self._prewarmed[0]])
                    return
                try:
                    await self._move_into(await furnished.make(), furnished.fits, enter)
                except BaseException:
                    self._furnished = None
                    raise

    async def _move_into(
        self,
        slot: PrewarmSlot,
        fits: object,
        enter: Callable[[Kernel, LaunchRequest], Awaitable[Kernel]],
    ) -> None:
        try:
            if (kernel := self._take()) is not None:
                self._moved += 1
                try:
                    await enter(kernel, slot.order)
                finally:
                    self._moved -= 1
        except BaseException:
            await run_to_completion(slot.give_up())
            raise
        if kernel is None:
            await run_to_completion(slot.give_up())
            return
        prewarmed = PrewarmedKernel(kernel, slot, fits)
        if self._closed or not kernel.alive:
            await run_to_completion(prewarmed.give_up())
            return
        self._prewarmed.append(prewarmed)
        self._begin_watching(kernel, prewarmed)
        if len(self._prewarmed) >= self.new.target and not self.new.filled:
            now = self._clock.time()
            self.new = scaling.PoolDemand(self.new.target, len(self._prewarmed), now, True)

    async def settle(self) -> None:
        """Reduce the targets to the recent demand."""
        now = self._clock.time()
        self.demand = scaling.settled(self.demand, self.idle, self._key.min_idle, now)
        self.new = scaling.settled(self.new, len(self._prewarmed), 0, now)
        await self._give_up_prewarmed(self.new.target)
        await self.shrink(self.demand.target)

    async def shrink(self, limit: int) -> None:
        """Destroy the kernels beyond `limit`, the prewarmed ones last."""
        beyond = min(len(self._idle), self.idle - limit)
        await destroy(*(self._pop() for _ in range(beyond)))
        await self._give_up_prewarmed(limit)

    async def _give_up_prewarmed(self, limit: int) -> None:
        await self._give_up(list(self._prewarmed)[max(0, limit) :])

    async def _give_up(self, ending: Sequence[PrewarmedKernel]) -> None:
        for prewarmed in ending:
            self._prewarmed.remove(prewarmed)
            self._watching.pop(prewarmed.kernel).cancel()
        await run_to_completion(asyncio.gather(*(prewarmed.give_up() for prewarmed in ending)))

    async def mark_untrusted(self, error: errors.SbxError, zygote: ZygoteHandle | None) -> None:
        """End the zygote whose kernel failed, and all idle kernels."""
        if zygote is not None:
            await self.lineage.rest(error, zygote)
        await self.shrink(0)

    async def close(self) -> None:
        """Destroy all idle kernels, end the zygote, and add no more."""
        self._closed = True
        try:
            await self.shrink(0)
        finally:
            await self.lineage.close()

    def _pop(self) -> Kernel:
        kernel = self._idle.pop()
        self._watching.pop(kernel).cancel()
        return kernel

    def _begin_watching(self, kernel: Kernel, prewarmed: PrewarmedKernel | None = None) -> None:
        watching = self._watch(kernel, prewarmed)
        self._watching[kernel] = asyncio.create_task(watching, context=Context())

    async def _watch(self, kernel: Kernel, prewarmed: PrewarmedKernel | None = None) -> None:
        end = await kernel.jail.end()
        _log.warning("an idle kernel ended: %s", end.stderr or "without a message")
        del self._watching[kernel]
        if prewarmed is None:
            self._idle.remove(kernel)
            kernel.close()
        else:
            self._prewarmed.remove(prewarmed)
            await run_to_completion(prewarmed.give_up())
        self._changed()


async def destroy(*kernels: Kernel) -> None:
    """End kernels that no caller may get: close their sockets and end all their processes."""
    ends = await run_to_completion(
        asyncio.gather(*(kernel.kill() for kernel in kernels), return_exceptions=True)
    )
    for end in ends:
        if isinstance(end, errors.SbxError):
            _log.warning("a jail did not end and is left to its cgroup: %s", end)
        elif isinstance(end, BaseException):
            raise end
