"""Waiting to the end: work that would leave something behind if its waiter just went away.

A thread cannot be stopped, and what it opened has no owner until it returns; half a clean-up is
worse than a late one. So a cancelled waiter waits on, and is told of its cancellation afterwards.
Everything waited for here is bounded in time by itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """The outcome of `work`, which is over when this returns or raises."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # told to nobody: the waiter has gone
    raise cancelled


async def in_thread(act: Callable[..., T], *arguments: Any) -> T:
    """`act(*arguments)` in a worker thread of the loop, to its end."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(None, act, *arguments))
