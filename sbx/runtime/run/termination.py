"""The ladder by which a run is stopped: interrupt, wait a little, kill."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TypeVar

from sbx.protocol.runs import Cause, Status

T = TypeVar("T")
_SETTLED_S = 0.05  # by then the inside has read what it is to do; an interrupt before is ignored


class StopReason(Enum):
    """Why a run is being stopped by us."""

    DEADLINE = auto()
    OUTPUT = auto()
    CALLER = auto()
    ABANDONED = auto()

    def outcome(self) -> tuple[Status, Cause | None]:
        match self:
            case StopReason.DEADLINE:
                return Status.TIMEOUT, None
            case StopReason.OUTPUT:
                return Status.KILLED, Cause.OUTPUT
            case StopReason.CALLER | StopReason.ABANDONED:
                return Status.INTERRUPTED, None


class GracefulTermination:
    """Stops one run at its deadline, or earlier when asked to.

    `interrupt` is the gentle way and `kill` the other; after `grace_s` seconds without an end the
    second follows the first. The first reason given is the one that counts, save that of a caller:
    the code may ignore an interrupt, as in Jupyter, and go on until it is stopped for good.
    """

    def __init__(
        self,
        timeout_s: float,
        grace_s: float,
        interrupt: Callable[[], Awaitable[object]],
        kill: Callable[[], Awaitable[object]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._deadline = self._began + timeout_s
        self._grace_s = grace_s
        self._interrupt = interrupt
        self._kill = kill
        self._killed = False
        self._limit: asyncio.Timeout | None = None
        self.why: StopReason | None = None

    async def next(self, following: Callable[[], Awaitable[T]], *, at_once: bool = False) -> T:
        """What follows in the run, stopping it when its time is up. With `at_once` it is there
        already: without a wait there is nothing to be timed, and a timer costs 9 µs."""
        if at_once:
            return await following()
        while True:
            try:
                async with asyncio.timeout_at(self._deadline) as limit:
                    self._limit = limit
                    return await following()
            except TimeoutError:
                if not limit.expired():
                    raise
            finally:
                self._limit = None
            if self._killed:
                raise TimeoutError("the run outlived its kill")
            await self._escalate()

    async def check_deadline(self) -> None:
        """Stop the run where its time is up: for one who was kept elsewhere, while what follows
        may be there at once again and again."""
        if self._loop.time() >= self._deadline and not self._killed:
            await self._escalate()

    async def _escalate(self) -> None:
        if self.why in (None, StopReason.CALLER):
            await self.stop(StopReason.DEADLINE)
        else:
            self._killed = True
            self._deadline = self._loop.time() + self._grace_s
            await self._kill()

    @property
    def deadline_near(self) -> bool:
        """Whether half of the time that a run has to end by its interrupt is over: nothing may hold
        up its last frames, or it is killed for them."""
        if self.why in (None, StopReason.CALLER):
            return False
        return self._killed or self._loop.time() >= self._deadline - self._grace_s / 2

    async def stop(self, why: StopReason) -> None:
        """Start to stop it now. What is being stopped for good already is not stopped twice."""
        if self.why not in (None, StopReason.CALLER):
            return
        self.why = why
        if why is not StopReason.CALLER:
            self._deadline = self._loop.time() + self._grace_s
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._deadline)
        await asyncio.sleep(self._began + _SETTLED_S - self._loop.time())
        await self._interrupt()
