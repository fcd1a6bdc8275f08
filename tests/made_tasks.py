"""The tasks of a test, without those of a runtime that it shares with other tests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def made_tasks() -> Iterator[list[asyncio.Task[Any]]]:
    """Collect the tasks that this task makes within the block, and those that they make."""
    loop, made = asyncio.get_running_loop(), list[asyncio.Task[Any]]()
    own = asyncio.current_task()

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **named)
        maker = asyncio.current_task(loop)
        if maker is own or maker in made:
            made.append(task)
        return task

    loop.set_task_factory(make)
    try:
        yield made
    finally:
        loop.set_task_factory(None)
