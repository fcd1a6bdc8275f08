"""The queue of events of a task, for one reader."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from sbx.protocol.agent import AgentEvent

Tell = Callable[[AgentEvent], None]


class AgentEvents:
    """`tell` adds an event at once and never waits for the reader. The output of the run limits the
    size of the queue."""

    def __init__(self) -> None:
        self._queue: deque[AgentEvent] = deque()
        self._changed = asyncio.Event()

    def tell(self, event: AgentEvent) -> None:
        self._queue.append(event)
        self._changed.set()

    async def until(self, task: "asyncio.Task[Any]") -> AsyncGenerator[AgentEvent, None]:
        """Yield all events until the task has ended and the queue is empty."""
        task.add_done_callback(lambda _: self._changed.set())
        while True:
            while self._queue:
                yield self._queue.popleft()
            if task.done():
                return
            self._changed.clear()
            await self._changed.wait()
