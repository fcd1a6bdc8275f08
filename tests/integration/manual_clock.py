"""A clock that goes on when a test says so."""

import asyncio
from collections.abc import Callable
from typing import cast


class ManualClock:
    """The clock of an event loop; `advance` calls what has become due."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._due: list[tuple[float, Timer]] = []

    def time(self) -> float:
        return self._now

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return cast("asyncio.AbstractEventLoop", self)

    def call_later(self, delay: float, callback: Callable[[], object], /) -> "Timer":
        timer = Timer(callback)
        self._due.append((self._now + delay, timer))
        return timer

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [timer for at, timer in self._due if at <= self._now]
        self._due = [(at, timer) for at, timer in self._due if at > self._now]
        for timer in due:
            timer.callback()


class Timer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback

    def cancel(self) -> None:
        self.callback = lambda: None
