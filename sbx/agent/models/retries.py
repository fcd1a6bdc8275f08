"""What is asked again, and when.

A request that was refused or lost is asked again by the SDKs themselves: 408, 409, 429 and 5xx,
after the time that Retry-After names or a growing one. Here is what they leave to their callers: a
stream that breaks off.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from sbx.agent.messages import Response
from sbx.agent.models import TextDelta
from sbx.agent.models.failures import STREAM_BROKEN
from sbx.errors import Unavailable

_PAUSE_MAX_S = 8.0  # that of the SDKs

Answer = AsyncGenerator[TextDelta | Response, None]


async def unbroken(attempt: Callable[[], Answer], retries: int, pause_s: float) -> Answer:
    """What an attempt gives; another one's when it broke off with nothing of it told. The first
    pause is `pause_s`, each next one is twice as long."""
    while True:
        told = False
        try:
            async with aclosing(attempt()) as answer:
                async for item in answer:
                    told = True
                    yield item
            return
        except Unavailable as failure:
            if told or not retries or failure.code != STREAM_BROKEN:
                raise
        await asyncio.sleep(min(pause_s, _PAUSE_MAX_S))
        retries, pause_s = retries - 1, pause_s * 2
