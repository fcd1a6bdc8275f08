"""A clock that stands still until a test moves it."""

import asyncio

from sbx.aio import Clock


class FakeClock(Clock):
    """The runtime's `Clock`; `advance` moves it and wakes whoever slept until then."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            awake = asyncio.get_running_loop().create_future()
            self._sleepers.append((self._now + seconds, awake))
            await awake
        else:
            await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [awake for at, awake in self._sleepers if at <= self._now]
        self._sleepers = [(at, awake) for at, awake in self._sleepers if at > self._now]
        for awake in due:
            if not awake.done():
                awake.set_result(None)
