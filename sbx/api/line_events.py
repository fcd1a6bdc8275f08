"""The output of a run in whole lines, for SDKs whose users see each piece as one line.

The beginning of a line waits for its end, for the end of the run, or for a pause.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sbx.service.run import RunHandle


class LineBuffer:
    """The unfinished lines of both streams."""

    def __init__(self) -> None:
        self._rest = {"stdout": "", "stderr": ""}

    @property
    def pending(self) -> bool:
        """Whether there is an unfinished line."""
        return any(self._rest.values())

    def feed(self, stream: str, text: str) -> str:
        """Return the whole lines that this text completes."""
        lines, newline, rest = (self._rest[stream] + text).rpartition("\n")
        self._rest[stream] = rest
        return lines + newline

    def flush(self) -> list[tuple[str, str]]:
        """Return the unfinished lines, and forget them."""
        rest = [(stream, text) for stream, text in self._rest.items() if text]
        self._rest = dict.fromkeys(self._rest, "")
        return rest


async def with_pauses(
    handle: RunHandle, lines: LineBuffer, pause_s: float
) -> AsyncGenerator[Any, None]:
    """Yield the events of a run, and None after so many seconds with an unfinished line."""
    async with aclosing(handle.events()) as events:
        coming: asyncio.Future[Any] | None = None
        try:
            while True:
                if lines.pending or coming is not None:
                    coming = coming or asyncio.ensure_future(anext(events))
                    await asyncio.wait((coming,), timeout=pause_s if lines.pending else None)
                    if not coming.done():
                        yield None
                        continue
                try:
                    _, each = await (coming or anext(events))
                except StopAsyncIteration:
                    return
                coming = None
                yield each
        finally:
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))
