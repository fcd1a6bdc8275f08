"""The output of a run in whole lines, for SDKs whose users see each piece as one line.

The beginning of a line waits for its end, for the end of the run, or for a pause.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sbx.service.run import RunHandle

_REST_MAX = 1 << 20  # characters; a longer line is sent in parts


class LineBuffer:
    """The unfinished lines of both streams, in the pieces in which they came."""

    def __init__(self) -> None:
        self._rest: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._sizes = dict.fromkeys(self._rest, 0)

    @property
    def pending(self) -> bool:
        """Whether there is an unfinished line."""
        return any(self._rest.values())

    def feed(self, stream: str, text: str) -> str:
        """Return the whole lines that this text completes, or a part of a line of 1 MiB."""
        lines, newline, rest = text.rpartition("\n")
        self._sizes[stream] += len(text)
        if not newline and self._sizes[stream] > _REST_MAX:
            lines, rest = text, ""
        elif not newline:
            self._rest[stream] += [text] if text else []
            return ""
        whole = "".join([*self._rest[stream], lines, newline])
        self._rest[stream] = [rest] if rest else []
        self._sizes[stream] = len(rest)
        return whole

    def flush(self) -> list[tuple[str, str]]:
        """Return the unfinished lines, and forget them."""
        rest = [(stream, "".join(pieces)) for stream, pieces in self._rest.items() if pieces]
        self._rest = {stream: [] for stream in self._rest}
        self._sizes = dict.fromkeys(self._rest, 0)
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
