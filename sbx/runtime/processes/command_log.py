"""What the background commands of one conversation print, on its way to the disk.

    Command ──► LogBook.add ──► pending ──► one task at a time ──► Ring        (a thread writes)
                   ▲                            │
                   └── the command waits  ◄── took: only what is on disk is given credit for

A flood is as fast as its disk, and no faster than RATE; memory holds one window of each command.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sbx.errors import SbxError
from sbx.event_log import ChangeSignal
from sbx.protocol.commands import LogPiece
from sbx.telemetry.background import background_context
from sbx.workspace.ring_files import RingFile

_log = logging.getLogger(__name__)

WINDOW = 128 << 10  # bytes that a command may write before any of it is on disk
LOG_MAX = 4 << 20  # bytes kept of one command
LOGS_MAX = 64 << 20  # … of all commands of a conversation
RATE = 16 << 20  # bytes a second, of a conversation
_SHORTEST_PAUSE_S = 0.002


class CommandLog:
    """The log of one command. `begin` and `end` are what a reader may believe in; `changes`
    is notified whenever there is more text, and at the end of the command."""

    def __init__(self, name: str, begin: int = 0, end: int = 0) -> None:
        self.name = name
        self.begin = begin
        self.end = end
        self.ring: RingFile | None = None
        self.took: Callable[[int], Awaitable[None]] | None = None
        self.pending = bytearray()
        self.unwritten = 0
        self.changes = ChangeSignal()

    @property
    def kept(self) -> int:
        return self.end - self.begin

    async def written(self) -> None:
        """Wait until all that was added is on disk, or lost with it."""
        while self.unwritten:
            await self.changes.next.wait()

    def close(self) -> None:
        ring, self.ring = self.ring, None
        self.took = None
        if ring is not None:
            ring.close()


class LogWriter:
    """See the module. `call` does something in a worker thread; `crowded` is asked, after each
    write, to make room where all logs together hold too much. Whoever closes a ring takes its
    `turn`."""

    def __init__(
        self,
        call: Callable[[Callable[[], list[int]]], Awaitable[list[int]]],
        crowded: Callable[[], Awaitable[None]],
        rate: int = RATE,
    ) -> None:
        self._call = call
        self._crowded = crowded
        self._rate = rate
        self.turn = asyncio.Lock()
        self._waiting: dict[CommandLog, None] = {}
        self._writing: asyncio.Task[None] | None = None

    def add(self, log: CommandLog, text: str) -> None:
        """Text of a command; it is given credit for it once it is written."""
        data = text.encode(errors="replace")
        log.pending += data
        log.unwritten += len(data)
        self._waiting[log] = None
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), context=background_context())

    async def close(self) -> None:
        """To be called once nothing is added any more."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                began = loop.time()
                async with self.turn:
                    size = await self._write_all()
                pause_s = size / self._rate - (loop.time() - began)
                if pause_s > _SHORTEST_PAUSE_S:
                    await asyncio.sleep(pause_s)
        finally:
            self._writing = None

    async def _write_all(self) -> int:
        batch: list[tuple[CommandLog, RingFile, bytes]] = []
        for log in self._waiting:
            if log.ring is not None:
                data, log.pending = bytes(log.pending), bytearray()
                log.ring.make_room(len(data))
                log.begin = log.ring.begin
                batch.append((log, log.ring, data))
        self._waiting.clear()
        ends = await self._written(batch)
        for (log, ring, data), end in zip(batch, ends, strict=True):
            ring.end = log.end = ring.end + len(data)
            ring.begin = log.begin = max(ring.begin, ring.end - ring.size)
            if end < 0:  # nothing of it can be read: it counts as written, and dropped
                ring.begin = log.begin = ring.end
            log.unwritten -= len(data)
            log.changes.notify()
            if log.took is not None:  # it has not ended
                await log.took(len(data))
        await self._crowded()
        return sum(len(data) for _, _, data in batch)

    async def _written(self, batch: list[tuple[CommandLog, RingFile, bytes]]) -> list[int]:
        try:
            return await self._call(lambda: [_append(ring, data) for _, ring, data in batch])
        except SbxError as error:
            _log.warning("what commands printed could not be written: %s", error)
            return [-1] * len(batch)


def _append(ring: RingFile, data: bytes) -> int:
    """The new end; -1 where the disk would not take it."""
    try:
        return ring.append(data)
    except OSError as error:
        _log.warning("what a command printed could not be written: %s", error)
        return -1


def piece_of(offset: int, data: bytes, *, more: bool) -> LogPiece:
    """Whole characters only: an offset may lie within one, and so may the end of what was read,
    where `more` follows."""
    skipped = 0
    while skipped < min(3, len(data)) and data[skipped] & 0xC0 == 0x80:
        skipped += 1
    data = data[skipped:]
    if more:
        data = data[: len(data) - _begun(data)]
    offset += skipped
    return LogPiece(offset, offset + len(data), data.decode("utf-8", "replace"))


def _begun(data: bytes) -> int:
    """How many bytes at the end are of a character that is not whole."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0
