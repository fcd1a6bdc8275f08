"""Time, as what waits for deadlines sees it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds of the epoch, and waiting for them to pass."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The host's own."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
