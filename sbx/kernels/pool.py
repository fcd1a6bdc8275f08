"""The kernels of one policy that wait, warm and empty, for somebody to need one.

A parked jail belongs to nobody: it has no workspace, and has run nothing of a user's. One that was
given out never comes back, whatever became of it; one that ends while it waits is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sbx import errors
from sbx.isolation.launch import Zygote
from sbx.isolation.patience import to_the_end
from sbx.kernels import upkeep
from sbx.kernels.kernel import Kernel
from sbx.kernels.zygotes import Clock, Key, Lineage

_log = logging.getLogger(__name__)


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
        self._watching: dict[Kernel, asyncio.Task[None]] = {}
        self._users = 0
        self._closed = False
        self.used_at = clock.time()
        self.demand = upkeep.Demand(0, 0, self.used_at)

    @property
    def parked(self) -> int:
        """How many wait."""
        return len(self._parked)

    @property
    def lacks(self) -> bool:
        """Whether there should be more."""
        return not self._closed and len(self._parked) < self.demand.target

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
        while self._parked:
            kernel = self._parked.popleft()
            self._watching.pop(kernel).cancel()
            if not kernel.alive:
                kernel.close()
                continue
            self.demand = upkeep.taken(self.demand, len(self._parked))
            self._changed()
            return kernel
        self.demand = upkeep.missed(self.demand, self._key.min_idle, self._key.max_idle)
        self._changed()
        return None

    def expect(self, count: int) -> None:
        """Keep at least so many, until a quiet time has shown that nobody wants them."""
        target = max(self.demand.target, count)
        self.demand = upkeep.Demand(target, 0, self._clock.time(), self.demand.filled)

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
        self._watching[kernel] = asyncio.create_task(self._watch(kernel))
        if not self.lacks and not self.demand.filled:
            self.demand = upkeep.Demand(self.demand.target, self.parked, self._clock.time(), True)

    async def settle(self) -> None:
        """Fall back to what was wanted lately."""
        now = self._clock.time()
        self.demand = upkeep.settled(self.demand, self.parked, self._key.min_idle, now)
        await self.shrink(self.demand.target)

    async def shrink(self, most: int) -> None:
        """Destroy what is parked beyond `most`."""
        await destroy(*(self._pop() for _ in range(len(self._parked) - most)))

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

    async def _watch(self, kernel: Kernel) -> None:
        end = await kernel.jail.end()
        _log.warning("a parked kernel ended: %s", end.stderr or "no word of why")
        self._parked.remove(kernel)
        del self._watching[kernel]
        kernel.close()
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
