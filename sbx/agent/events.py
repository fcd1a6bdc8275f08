"""What a task tells, for one who follows it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from sbx.protocol.agent import AgentEvent

Tell = Callable[[AgentEvent], None]


class Events:
    """Told at once, by `tell`, and followed later: a tool never waits for who reads of it. What can
    pile up is bounded by the run's own output."""

    def __init__(self) -> None:
        self._told: deque[AgentEvent] = deque()
        self._changed = asyncio.Event()

    def tell(self, event: AgentEvent) -> None:
        self._told.append(event)
        self._changed.set()

    async def until(self, task: "asyncio.Task[Any]") -> AsyncGenerator[AgentEvent, None]:
        """All events, until the task has ended and everything is told."""
        task.add_done_callback(lambda _: self._changed.set())
        while True:
            while self._told:
                yield self._told.popleft()
            if task.done():
                return
            self._changed.clear()
            await self._changed.wait()
