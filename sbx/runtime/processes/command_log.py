"""The records and the logs of the background commands of one conversation.

    Command ──► LogWriter.add ──► pending ──► one task at a time ──► RingFile    (a thread writes)
                   ▲                              │
                   └── the command waits ◄── took: credit only for text that is on the disk

A flood of output is as fast as its disk, and at most RATE. Memory holds one window of each command.
The records of ended commands stay for a while, on the disk of the host: also while the sandbox is
closed with its files kept, and after a restart of the service.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from sbx import errors
from sbx.event_log import ChangeSignal
from sbx.kernels.command import Command
from sbx.protocol.commands import (
    LOG_PIECE,
    LOG_PIECE_MAX,
    CommandCause,
    CommandState,
    CommandStatus,
    LogPiece,
    piece_of,
    status_from_json,
    to_json,
)
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.run.stdin import Stdin
from sbx.telemetry.background import background_context
from sbx.workspace.ring_files import CommandLogs, RingFile

_log = logging.getLogger(__name__)

WINDOW = 128 << 10  # bytes that a command may write before any of it is on disk
LOG_MAX = 4 << 20  # bytes kept of one command
LOGS_MAX = 64 << 20  # … of all commands of a conversation
RATE = 16 << 20  # bytes a second, of a conversation
RECORDS_MAX = 256  # of commands that have ended
RECORD_S = 3600.0
_SHORTEST_PAUSE_S = 0.002


class CommandLog:
    """The log of one command. Readers use `begin` and `end`. `changes` is notified of new text, and
    of the end of the command."""

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
        """Wait until all added text is on the disk, or lost with it."""
        while self.unwritten:
            await self.changes.next.wait()

    def close(self) -> None:
        ring, self.ring = self.ring, None
        self.took = None
        if ring is not None:
            ring.close()


class LogWriter:
    """See the module. `call` runs a function in a worker thread. `crowded` makes room after each
    write if all logs together are too large. A caller that closes a ring file holds `turn`."""

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
        """Queue text of a command, which gets credit for it after the write."""
        data = text.encode(errors="replace")
        log.pending += data
        log.unwritten += len(data)
        self._waiting[log] = None
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), context=background_context())

    async def close(self) -> None:
        """End the task. Call it after the last `add`."""
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
            if end < 0:  # it cannot be read: it counts as written, and is dropped
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
        except errors.SbxError as error:
            _log.warning("output of commands could not be written: %s", error)
            return [-1] * len(batch)


def _append(ring: RingFile, data: bytes) -> int:
    """Return the new end; -1 if the disk refuses it."""
    try:
        return ring.append(data)
    except OSError as error:
        _log.warning("output of a command could not be written: %s", error)
        return -1


class CommandRecord:
    """One command. It has a `process` while it runs."""

    def __init__(self, status: CommandStatus) -> None:
        self.status = status
        self.log = CommandLog(status.id, status.log_begin, status.log_end)
        self.stdin: Stdin | None = None
        self.process: Command | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.stopped = False
        self.killed = False
        self.resources = ExitStack()

    @property
    def running(self) -> bool:
        return self.status.running

    def now(self) -> CommandStatus:
        return replace(
            self.status,
            log_begin=self.log.begin,
            log_end=self.log.end,
            stdin_open=self.stdin is not None and self.stdin.open,
        )

    async def ended(self) -> None:
        while self.running:
            await self.log.changes.next.wait()


class CommandRecords:
    """The records of a conversation, with their logs."""

    def __init__(self, opened: Callable[[], Awaitable[OpenFiles]], owner: str) -> None:
        """`owner` is the sandbox: another one over the same files has its own commands."""
        self.by_id: dict[str, CommandRecord] = {}  # the oldest first
        self.writer = LogWriter(self._write, self._make_room)
        self._opened = opened
        self._owner = owner
        self._loaded = False
        self._loading = asyncio.Lock()
        self._at: OpenFiles | None = None

    async def open(self) -> OpenFiles:
        self._at = await self._opened()
        return self._at

    async def load(self) -> None:
        """Load the records of earlier uses of these files, once. Their commands have ended."""
        if self._loaded:
            return
        async with self._loading:
            if self._loaded:
                return
            opened = await self._opened()
            with opened.in_use():
                statuses = await opened.call(lambda: self._read_records(opened))
            for status in sorted(statuses, key=lambda status: status.started_at):
                self.by_id.setdefault(status.id, CommandRecord(status))
            self._loaded = True
            await self.forget_old()

    def _read_records(self, opened: OpenFiles) -> list[CommandStatus]:
        statuses = []
        with opened.own.logs() as logs:
            for name, content in logs.records().items():
                try:
                    record = json.loads(content)
                    status = status_from_json(record)
                except ValueError:
                    logs.remove(name)
                    continue
                if record.get("owner") == self._owner and status.id == name:
                    statuses.append(_as_left(logs, status))
        return statuses

    async def forget_old(self) -> None:
        if old := self.old():
            opened = await self._opened()
            for name in old:
                self.by_id.pop(name, None)
            with opened.in_use():
                await opened.call(lambda: remove(opened, old))

    def old(self) -> list[str]:
        """Return the commands to forget: ended long ago, or the oldest of too many."""
        over = [record.status for record in self.by_id.values() if not record.running]
        before = time.time() - RECORD_S
        many = len(over) - RECORDS_MAX
        return [
            status.id
            for number, status in enumerate(over)
            if number < many or (status.ended_at or 0.0) < before
        ]

    def _encode(self, status: CommandStatus) -> bytes:
        return json.dumps({**to_json(status), "owner": self._owner}).encode()

    def create(self, opened: OpenFiles, status: CommandStatus, old: Sequence[str]) -> RingFile:
        """Write the record of a new command, and return its log. Remove `old` records. Blocks."""
        with opened.own.logs() as logs:
            for name in old:
                logs.remove(name)
            logs.write_record(status.id, self._encode(status))
            return logs.make(status.id, LOG_MAX)

    async def write_end(
        self, opened: OpenFiles, record: CommandRecord, ended: CommandStatus
    ) -> None:
        log = record.log
        content = self._encode(replace(ended, log_begin=log.begin, log_end=log.end))

        def write() -> None:
            with opened.own.logs() as logs:
                logs.write_record(ended.id, content)

        try:
            await opened.call(write)
        except (errors.SbxError, OSError) as error:
            _log.warning("the end of a background command was not recorded: %s", error)

    async def piece(self, record: CommandRecord, offset: int, limit: int) -> LogPiece:
        """Read from a log. Raise BadRequest `invalid_offset`."""
        if isinstance(offset, bool) or not 0 <= offset <= record.log.end:
            raise errors.BadRequest(
                f"the log has {record.log.end} bytes, and no offset {offset!r}",
                code="invalid_offset",
                hint="begin at 0, or at the next_offset of an earlier piece",
                details={"log_begin": record.log.begin, "log_end": record.log.end},
            )
        return await self._read(record.log, offset, max(4, min(limit, LOG_PIECE_MAX)))

    async def pieces(self, record: CommandRecord, offset: int) -> AsyncGenerator[LogPiece, None]:
        """Read a log up to its end, and wait for the end of the command."""
        at = offset
        piece = await self.piece(record, offset, LOG_PIECE)
        while True:
            if piece.next_offset > at:
                yield piece
                at = piece.next_offset
            change, over = record.log.changes.next, not record.running
            piece = await self._read(record.log, at, LOG_PIECE)
            if piece.next_offset > at:
                continue
            if over:
                return
            await change.wait()

    async def _read(self, log: CommandLog, offset: int, limit: int) -> LogPiece:
        """Return an empty piece at the end of the log."""
        while (piece := await self._read_once(log, offset, limit)) is None:
            pass
        return piece

    async def _read_once(self, log: CommandLog, offset: int, limit: int) -> LogPiece | None:
        """Return None if a flood overwrote all of it meanwhile."""
        start, end = max(offset, log.begin), log.end
        if start >= end:
            return LogPiece(start, start, "")
        opened = await self._opened()

        def read() -> bytes:
            with opened.own.logs() as logs:
                ring = logs.open(log.name)
            try:
                return ring.read(start, limit, end)
            finally:
                ring.close()

        with opened.in_use():
            try:
                data = await opened.call(read)
            except errors.NotFound:
                data = b""
        if not data:
            return LogPiece(end, end, "")
        if log.begin > start:  # overwritten meanwhile
            data, start = data[log.begin - start :], log.begin
            if not data:
                return None
        return piece_of(start, data, more=start + len(data) < end)

    async def _write(self, act: Callable[[], list[int]]) -> list[int]:
        assert self._at is not None
        return await self._at.call(act)

    async def _make_room(self) -> None:
        """Remove the oldest text: of ended commands, then of the current one with the largest
        log."""
        assert self._at is not None
        opened = self._at
        while sum(record.log.kept for record in self.by_id.values()) > LOGS_MAX:
            record = self._crowds()
            log, ring = record.log, record.log.ring
            log.begin = log.end
            if ring is not None:
                ring.begin = ring.end
                with suppress(OSError):
                    await opened.call(ring.empty)
            else:
                await opened.call(partial(remove, opened, [log.name], log_only=True))

    def _crowds(self) -> CommandRecord:
        for record in self.by_id.values():
            if not record.running and record.log.kept:
                return record
        return max(self.by_id.values(), key=lambda record: record.log.kept)


def _as_left(logs: CommandLogs, status: CommandStatus) -> CommandStatus:
    """Return the status of a command whose runtime has ended."""
    end = status.log_end
    begin = end
    with suppress(errors.NotFound):
        ring = logs.open(status.id)
        begin, end = ring.begin, ring.end
        ring.close()
    if status.running:
        status = replace(
            status,
            state=CommandState.KILLED,
            cause=CommandCause.CLOSED,
            reason="the service ended while it ran",
            ended_at=time.time(),
        )
    return replace(status, log_begin=begin, log_end=end, stdin_open=False)


def remove(opened: OpenFiles, names: Sequence[str], *, log_only: bool = False) -> None:
    with opened.own.logs() as logs:
        for name in names:
            logs.remove(name, log_only=log_only)
