"""Many of the same at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def at_once(
    count: int, act: Callable[[], Awaitable[_Result]], *, most: int | None = None
) -> list[_Result]:
    """What `count` calls of `act` returned, `most` of them at a time; all when it is not given.

    The first that raises ends the others, and this call when they have ended.
    """
    room = asyncio.Semaphore(most or count)

    async def one() -> _Result:
        async with room:
            return await act()

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
