"""Calls that may take seconds in a worker thread, a few at a time: the others' short ones need
threads too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from sbx import errors

AT_ONCE = 3  # asyncio has five worker threads at least
_WAIT_S = 30.0
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def long_call() -> AsyncIterator[None]:
    """Within it, the caller may hold a worker thread for a while. Raises Unavailable
    `too_many_searches`."""
    turn = _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    try:
        async with asyncio.timeout(_WAIT_S):
            await turn.acquire()
    except TimeoutError:
        raise errors.Unavailable(
            f"{AT_ONCE} searches, copies or the like go on already, and none of them ended",
            code="too_many_searches",
            hint="try again, with a narrower path",
            details={"retry_after_s": 5},
        ) from None
    try:
        yield
    finally:
        turn.release()
