"""Reads and writes of files in chunks: the memory does not depend on the size.

Each step is a short call in a worker thread, so that a slow peer occupies no thread. The next chunk
is requested only after the last one: the disk slows the sender, and the reader slows the disk.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from msgspec import Struct, field

from sbx import errors
from sbx.aio import WorkerThreads, joined, run_to_completion
from sbx.protocol.files import FileEntry, Upload
from sbx.workspace.streams import FileWriter, OpenFile

if TYPE_CHECKING:
    from sbx.runtime.honeytokens import FileReader

T = TypeVar("T")

_STEP = 1 << 20  # bytes that are written in one call of a worker thread


async def opened_stream(
    threads: WorkerThreads,
    act: Callable[[], tuple[OpenFile, Upload | None]],
    reader: "FileReader | None" = None,
) -> "FileStream":
    """Return the stream of the file that `act` opens. `reader` sees each piece first. A cancelled
    call leaves no file open."""
    opening = asyncio.ensure_future(threads.call(act))
    try:
        file, upload = await run_to_completion(opening)
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            opening.result()[0].close()
        raise
    name = file.path.rpartition("/")[2]
    entry = FileEntry(name, file.path, "file", file.size, file.modified_s)
    return FileStream(entry, upload, file, threads, reader)


class FileStream(Struct, eq=False):
    """A file that is open for reading. Close it, best with `async with`. A later file of this name,
    or the removal, does not change it."""

    entry: FileEntry
    upload: Upload | None
    _file: OpenFile
    _threads: WorkerThreads
    _reader: "FileReader | None" = None
    _reading: "set[asyncio.Future[bytes]]" = field(default_factory=set)

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def modified_s(self) -> float:
        return self._file.modified_s

    async def chunks(
        self, start: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from `start`, `length` of them or all, in pieces of bounded size."""
        pieces = self._file.chunks(start, length)
        ahead = self._read(pieces)
        try:
            while piece := await run_to_completion(ahead):
                ahead = self._read(pieces)  # while this piece is sent
                if self._reader is not None:
                    self._reader.read(piece)
                yield piece
        finally:
            await run_to_completion(asyncio.gather(ahead, return_exceptions=True))

    def _read(self, pieces: Iterator[bytes]) -> "asyncio.Future[bytes]":
        reading = asyncio.ensure_future(self._threads.call(lambda: next(pieces, b"")))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

    def close(self) -> None:
        """Close the file before the first chunk is read. A second call does nothing."""
        self._file.close()

    async def aclose(self) -> None:
        """Close the file, after the piece that is read ahead. A second call does nothing."""
        await run_to_completion(asyncio.gather(*self._reading, return_exceptions=True))
        self._file.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class IncomingFiles:
    """The incoming files of one conversation. `stop` cancels them."""

    def __init__(self) -> None:
        self._filling: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def fill(
        self, threads: WorkerThreads, intake: FileWriter[T], chunks: AsyncIterable[bytes]
    ) -> T:
        """Write all `chunks` with `intake`, and return its result. A cancelled or failed call
        leaves no file. Raise the errors of both, and Closed if the conversation ends before."""
        if self._stopped:
            raise _closed()
        feeding = asyncio.ensure_future(_feed(threads, intake, chunks))
        self._filling.add(feeding)
        try:
            await asyncio.wait([feeding])
        except asyncio.CancelledError:
            feeding.cancel()
            await run_to_completion(asyncio.wait([feeding]))
            raise
        finally:
            self._filling.discard(feeding)
        if feeding.cancelled():
            raise _closed()
        return feeding.result()

    @property
    def filling(self) -> bool:
        return bool(self._filling)

    async def stop(self) -> None:
        self._stopped = True
        if filling := tuple(self._filling):
            for task in filling:
                task.cancel()
            await asyncio.wait(filling)


async def _feed(threads: WorkerThreads, intake: FileWriter[T], chunks: AsyncIterable[bytes]) -> T:
    def step(chunk: bytes | None) -> tuple[bool, Any]:
        try:
            intake.send(chunk)
        except StopIteration as end:  # which no future carries
            return True, end.value
        return False, None

    async def send(chunk: bytes | None) -> tuple[bool, Any]:
        return await run_to_completion(threads.call(lambda: step(chunk)))

    sending = asyncio.ensure_future(send(None))
    try:
        async with aclosing(joined(chunks, _STEP)) as pieces:
            async for piece in pieces:
                await sending
                # The next piece is received while this one is written.
                sending = asyncio.ensure_future(send(piece))
        await sending
        over, outcome = await send(None)
        assert over
        return cast("T", outcome)
    finally:
        await run_to_completion(asyncio.gather(sending, return_exceptions=True))
        await run_to_completion(threads.call(intake.close))


def _closed() -> errors.Closed:
    return errors.Closed(
        "the conversation ended during the write of a file",
        hint="send the file again, to another conversation",
    )
