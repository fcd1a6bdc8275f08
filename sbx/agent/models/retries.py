"""Retries of streams that break off.

The SDKs retry refused or lost requests themselves: 408, 409, 429 and 5xx, after the time in
Retry-After or after a growing pause. They leave broken streams to their callers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from sbx.agent.messages import Response
from sbx.agent.models import TextDelta
from sbx.agent.models.failures import STREAM_BROKEN
from sbx.errors import Unavailable

_PAUSE_MAX_S = 8.0  # the same as in the SDKs

Answer = AsyncGenerator[TextDelta | Response, None]


async def unbroken(attempt: Callable[[], Answer], retries: int, pause_s: float) -> Answer:
    """Yield the items of an attempt. If it breaks off before its first item, make another attempt.
    The first pause is `pause_s`, and each further pause is twice as long."""
    while True:
        has_items = False
        try:
            async with aclosing(attempt()) as answer:
                async for item in answer:
                    has_items = True
                    yield item
            return
        except Unavailable as failure:
            if has_items or not retries or failure.code != STREAM_BROKEN:
                raise
        await asyncio.sleep(min(pause_s, _PAUSE_MAX_S))
        retries, pause_s = retries - 1, pause_s * 2
