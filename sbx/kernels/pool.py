"""The kernels of one policy that wait, warm and empty, for somebody to need one.

    parked     for a workspace that is there already: it enters that when it is taken
    in berth   for a new sandbox: sealed in a cgroup and an empty workspace that nobody owns yet

Either belongs to nobody, and has run nothing of a user's. One that was given out never comes back,
whatever became of it; one that ends while it waits is dropped. Both count for what is to be kept,
and as many of them are in a berth as new sandboxes were asked for lately.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

from sbx import errors
from sbx.isolation.launch import Zygote
from sbx.isolation.patience import to_the_end
from sbx.kernels import upkeep
from sbx.kernels.kernel import Kernel
from sbx.kernels.order import Order
from sbx.kernels.zygotes import Clock, Key, Lineage

_log = logging.getLogger(__name__)


class Home(Protocol):
    """A sandbox's cgroup and an empty workspace, made before anybody owns them."""

    @property
    def order(self) -> Order:
        """What a kernel is told that moves in."""

    async def give_up(self) -> None:
        """Remove all of it; its kernel has ended. Raises nothing: what is left is swept."""


@dataclass(frozen=True, slots=True, eq=False)
class Berth:
    """A sealed kernel in a home that nobody owns yet, for a sandbox that is made with `fits`."""

    kernel: Kernel
    home: Home
    fits: object

    async def give_up(self) -> None:
        await destroy(self.kernel)
        await self.home.give_up()


@dataclass(frozen=True, slots=True)
class Furnished:
    """Which new sandboxes somebody asked for, and how a home for such a one is made."""

    fits: object
    make: Callable[[], Awaitable[Home]]


class Pool:
    """Parked kernels, first in, first out, and the lineage they come from.

    `changed` is called when there may be more or less to do: a jail was taken, or has ended.
    """

    def __init__(
        self, key: Key, lineage: Lineage, clock: Clock, changed: Callable[[], None]
    ) -> None:
        self.lineage = lineage
        self._key = key
        self._clock = clock
        self._changed = changed
        self._parked: deque[Kernel] = deque()
        self._berths: deque[Berth] = deque()
        self._watching: dict[Kernel, asyncio.Task[None]] = {}
        self._furnished: Furnished | None = None
        self._moving = asyncio.Lock()
        self._moved = 0  # kernels that are neither parked nor in a berth yet
        self._users = 0
        self._closed = False
        self.used_at = clock.time()
        self.demand = upkeep.Demand(0, 0, self.used_at)
        self.new = upkeep.Demand(0, 0, self.used_at)

    @property
    def parked(self) -> int:
        """How many wait, those in a berth included."""
        return len(self._parked) + len(self._berths)

    @property
    def lacks(self) -> bool:
        """Whether there should be more."""
        return not self._closed and self.parked + self._moved < self.demand.target

    @property
    def lacks_berth(self) -> bool:
        """Whether one that is parked should be in a berth, or a berth that fits nobody any more
        should be given up for one."""
        if self._furnished is None or self._closed:
            return False
        return bool(self._parked) if self._has_room else self._is_foreign

    @property
    def _has_room(self) -> bool:
        return len(self._berths) < min(self.new.target, self.demand.target)

    @property
    def _is_foreign(self) -> bool:
        """Whether there are berths, and none for who asked last: policies that differ in limits
        only share a pool, and one that was changed leaves some that nobody will ask for."""
        wanted = self._furnished
        return wanted is not None and bool(self._berths) and not self._fitting(wanted)

    def _fitting(self, furnished: Furnished) -> list[Berth]:
        return [one for one in self._berths if one.fits == furnished.fits]

    @property
    def busy(self) -> bool:
        """Whether somebody is getting a kernel from here right now, or one is being parked."""
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
        """A parked kernel, which is the caller's from here on; None when there is none."""
        kernel = self._take()
        if kernel is not None:
            self.demand = upkeep.taken(self.demand, self.parked)
        else:
            self.demand = upkeep.missed(self.demand, self._key.min_idle, self._key.max_idle)
        self._changed()
        return kernel

    def _take(self) -> Kernel | None:
        while self._parked:
            kernel = self._parked.popleft()
            self._watching.pop(kernel).cancel()
            if kernel.alive:
                return kernel
            kernel.close()
        return None

    def take_berth(self, furnished: Furnished) -> Berth | None:
        """One that fits, which is the caller's from here on; None when there is none. With the
        first who asks, berths begin to be kept."""
        self._furnished = furnished
        for berth in self._fitting(furnished):
            if berth.kernel.alive:
                self._berths.remove(berth)
                self._watching.pop(berth.kernel).cancel()
                self.new = upkeep.taken(self.new, len(self._berths))
                self.demand = upkeep.taken(self.demand, self.parked)
                self._changed()
                return berth
        self.new = upkeep.missed(self.new, self._key.min_idle, self._key.max_idle)
        return None

    async def expect(self, count: int, furnished: Furnished | None = None) -> None:
        """Keep at least so many, until a quiet time has shown that nobody wants them: in a berth
        where it is said how those are made, else parked, beside what berths there is room for."""
        now, most = self._clock.time(), self._key.max_idle
        others: list[Berth] = []
        if furnished is not None:
            self._furnished = furnished
            fitting = self._fitting(furnished)
            others = [one for one in self._berths if one not in fitting]
            berths = min(most, max(self.new.target, count + len(others)))
            target = max(self.demand.target, berths)
            others = others[: max(0, count + len(others) - berths)]
        else:
            berths = min(self.new.target, most - count)
            target = max(self.demand.target, berths + count)
        self.new = upkeep.Demand(berths, 0, now, self.new.filled)
        self.demand = upkeep.Demand(target, 0, now, self.demand.filled)
        await self._give_up(others)
        await self._give_up_berths(berths)

    @property
    def settled(self) -> bool:
        """Whether as many wait as should, and as they should."""
        return not self.lacks and not self.lacks_berth and not self._moved

    async def park(self) -> None:
        """Fork one more and park it, if it is still wanted by then.

        Raises what `fork` does, and Broken when the kernel died at once, which its zygote pays for.
        """
        with self._busy():
            jail = await self.lineage.fork(ahead=True)
            kernel = await Kernel.attach(jail)
            if not kernel.alive or not self.lacks:
                dead = not kernel.alive
                await destroy(kernel)
                if dead and not self._closed:
                    error = errors.Broken("a kernel ended as it was parked", code="start_failed")
                    await self.distrust(error, jail.zygote)
                    raise error
                return
        self._parked.append(kernel)
        self._begin_watching(kernel)
        if not self.lacks and not self.demand.filled:
            self.demand = upkeep.Demand(self.demand.target, self.parked, self._clock.time(), True)

    async def move_in(self, enter: Callable[[Kernel, Order], Awaitable[Kernel]]) -> None:
        """Let one that is parked enter a new home, if it still should.

        Raises what `enter` does, and what made the home; nothing is left then, and it is not tried
        again until somebody asks for a berth."""
        async with self._moving:
            furnished = self._furnished
            if furnished is None or not self.lacks_berth:
                return
            with self._busy():
                if not self._has_room:
                    await self._give_up([self._berths[0]])
                    return
                try:
                    await self._move_into(await furnished.make(), furnished.fits, enter)
                except BaseException:
                    self._furnished = None
                    raise

    async def _move_into(
        self, home: Home, fits: object, enter: Callable[[Kernel, Order], Awaitable[Kernel]]
    ) -> None:
        try:
            if (kernel := self._take()) is not None:
                self._moved += 1
                try:
                    await enter(kernel, home.order)
                finally:
                    self._moved -= 1
        except BaseException:
            await to_the_end(home.give_up())
            raise
        if kernel is None:
            await to_the_end(home.give_up())
            return
        berth = Berth(kernel, home, fits)
        if self._closed or not kernel.alive:
            await to_the_end(berth.give_up())
            return
        self._berths.append(berth)
        self._begin_watching(kernel, berth)
        if len(self._berths) >= self.new.target and not self.new.filled:
            now = self._clock.time()
            self.new = upkeep.Demand(self.new.target, len(self._berths), now, True)

    async def settle(self) -> None:
        """Fall back to what was wanted lately."""
        now = self._clock.time()
        self.demand = upkeep.settled(self.demand, self.parked, self._key.min_idle, now)
        self.new = upkeep.settled(self.new, len(self._berths), 0, now)
        await self._give_up_berths(self.new.target)
        await self.shrink(self.demand.target)

    async def shrink(self, most: int) -> None:
        """Destroy what is kept beyond `most`, berths last."""
        beyond = min(len(self._parked), self.parked - most)
        await destroy(*(self._pop() for _ in range(beyond)))
        await self._give_up_berths(most)

    async def _give_up_berths(self, most: int) -> None:
        await self._give_up(list(self._berths)[max(0, most) :])

    async def _give_up(self, ending: Sequence[Berth]) -> None:
        for berth in ending:
            self._berths.remove(berth)
            self._watching.pop(berth.kernel).cancel()
        await to_the_end(asyncio.gather(*(berth.give_up() for berth in ending)))

    async def distrust(self, error: errors.SbxError, zygote: Zygote | None) -> None:
        """What comes from here failed: end the zygote that it came from, and what is parked."""
        if zygote is not None:
            await self.lineage.rest(error, zygote)
        await self.shrink(0)

    async def close(self) -> None:
        """Destroy all that is parked, end the zygote, park nothing more."""
        self._closed = True
        try:
            await self.shrink(0)
        finally:
            await self.lineage.close()

    def _pop(self) -> Kernel:
        kernel = self._parked.pop()
        self._watching.pop(kernel).cancel()
        return kernel

    def _begin_watching(self, kernel: Kernel, berth: Berth | None = None) -> None:
        watching = self._watch(kernel, berth)
        self._watching[kernel] = asyncio.create_task(watching, context=Context())

    async def _watch(self, kernel: Kernel, berth: Berth | None = None) -> None:
        end = await kernel.jail.end()
        _log.warning("a parked kernel ended: %s", end.stderr or "no word of why")
        del self._watching[kernel]
        if berth is None:
            self._parked.remove(kernel)
            kernel.close()
        else:
            self._berths.remove(berth)
            await to_the_end(berth.give_up())
        self._changed()


async def destroy(*kernels: Kernel) -> None:
    """End kernels that nobody may get any more: sockets closed, every process of them gone."""
    ends = await to_the_end(
        asyncio.gather(*(kernel.kill() for kernel in kernels), return_exceptions=True)
    )
    for end in ends:
        if isinstance(end, errors.SbxError):
            _log.warning("a jail is left to its cgroup: %s", end)
        elif isinstance(end, BaseException):
            raise end
