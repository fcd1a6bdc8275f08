"""Files between this host and a service.

A large file is sent in pieces, so that a lost connection costs one piece, and with the SHA-256 of
all of it at the end. A checksum for each piece would double the work of both sides: 0.3 s of a core
for 256 MiB.
"""

import asyncio
import hashlib
import json
import os
import secrets
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
from aiofiles.threadpool.binary import AsyncBufferedReader

from sbx import errors
from sbx.aio import joined
from sbx.client.http import CHUNK, HttpClient, query
from sbx.client.http_connection import ConnectionLost
from sbx.client.replies import StreamedReply, connection_lost

RESUMABLE_MIN = 16 << 20  # bytes; a smaller file is sent in one request
PIECE = 16 << 20
_READ_MAX = 1 << 30  # bytes that `read_all` loads into memory
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)  # seconds before each retry
_BROKEN = frozenset({"connection_lost", "service_unreachable", "timeout", "truncated_body"})
_BUSY = frozenset({"upload_busy", "request_timeout", "checksum_mismatch", "too_many_uploads"})

OnProgress = Callable[[int, int | None], object]
"""Called with the number of bytes that are done, and with their total, if it is known."""


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """The destination of a file. `partials` is the URL that starts an upload in pieces."""

    partials: str
    path: str
    upload: bool


async def _send_in_pieces(
    wire: HttpClient,
    target: UploadTarget,
    file: AsyncBufferedReader,
    size: int,
    on_progress: OnProgress | None,
) -> Any:
    """Return the reply for the finished file. Raise the errors of the service, and the last error
    of the connection if retries do not help."""
    new = {"path": target.path, "size": size, "upload": target.upload}
    reply = (await wire.call("POST", target.partials, body=_json(new), again=True)).json()
    sending = _Sending(wire, f"{target.partials}/{reply['id']}", file, size, on_progress)
    try:
        return await sending.run()
    except BaseException:
        with suppress(errors.SbxError):
            await wire.call("DELETE", sending.at, timeout_s=5.0, again=False)
        raise


class _Sending:
    """One upload in pieces."""

    def __init__(
        self,
        wire: HttpClient,
        at: str,
        file: AsyncBufferedReader,
        size: int,
        on_progress: OnProgress | None,
    ) -> None:
        self.at = at
        self._wire = wire
        self._file = file
        self._size = size
        self._on_progress = on_progress
        self._digest = hashlib.sha256()

    async def run(self) -> Any:
        offset = 0
        reading = asyncio.ensure_future(self._read(offset))
        try:
            while offset < self._size:
                piece = await reading
                # The next piece is read while this one is on its way.
                reading = asyncio.ensure_future(self._read(offset + len(piece)))
                offset = await self._send_with_retry(offset, piece)
                if self._on_progress is not None:
                    self._on_progress(offset, self._size)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        body = _json({"sha256": self._digest.hexdigest()})
        for pause in (*_PAUSES, None):
            try:
                reply = await self._wire.call("POST", f"{self.at}/finish", body=body, again=True)
                return reply.json()
            except errors.SbxError as error:
                if pause is None or error.code not in _BROKEN:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError

    async def _read(self, offset: int) -> bytes:
        """Return the next piece; at the end of the file, none."""
        piece = await self._file.read(min(PIECE, self._size - offset))
        if not piece and offset < self._size:
            raise errors.Conflict("the file became shorter while it was read", code="file_changed")
        await asyncio.to_thread(self._digest.update, piece)
        return piece

    async def _send_with_retry(self, offset: int, piece: bytes) -> int:
        """Send the piece until the service has it. Return the offset of its end."""
        end = offset + len(piece)
        at = self.at + query({"offset": offset})
        for pause in (*_PAUSES, None):
            try:
                await self._wire.send("PATCH", at, pieces_of(piece), size=len(piece))
                return end
            except errors.SbxError as error:
                if pause is None or error.code not in _BROKEN | _BUSY | {"wrong_offset"}:
                    raise
                if await self._reached(error, pause) == end:
                    return end
        raise AssertionError

    async def _reached(self, error: errors.SbxError, pause: float) -> int | None:
        """Return the offset that the service reports, or None if it does not answer now."""
        if error.code != "wrong_offset":
            await asyncio.sleep(pause)
        try:
            return int((await self._wire.call("GET", self.at)).json()["offset"])
        except errors.SbxError as again:
            if again.code not in _BROKEN:
                raise
        return None


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode("ascii")


# -- complete files and streams --------------------------------------------------------------------


@asynccontextmanager
async def reading(wire: HttpClient, at: str) -> AsyncIterator[StreamedReply]:
    """Open a reply of any size, to read it in pieces."""
    try:
        async with wire.opened("GET", at) as reply:
            yield reply
    except ConnectionLost as lost:
        raise connection_lost(wire.address, lost) from lost


async def read_all(wire: HttpClient, at: str) -> bytes:
    """Return the complete body of a reply. Raise TooLarge."""
    async with reading(wire, at) as reply:
        content = bytearray()
        async for piece in reply.chunks():
            content += piece
            if len(content) > _READ_MAX:
                raise errors.TooLarge(
                    f"the file is larger than {_READ_MAX} bytes",
                    hint="use download",
                    details={"limit": _READ_MAX},
                )
        return bytes(content)


async def send_file(
    wire: HttpClient, at: str, source: Path, target: UploadTarget, on_progress: OnProgress | None
) -> Any:
    """Send a file of this host in one request, or a large one in pieces. Return the reply."""
    async with _opened(source) as (file, size):
        if size >= RESUMABLE_MIN:
            return await _send_in_pieces(wire, target, file, size, on_progress)
        return (await wire.send("PUT", at, _read(file, size, on_progress), size=size)).json()


async def fetch_file(wire: HttpClient, at: str, to: Path, on_progress: OnProgress | None) -> int:
    """Copy a reply to a file of this host. The file has another name until it is complete."""
    partial = to.with_name(f".{to.name[:200]}.{secrets.token_hex(6)}.part")
    async with reading(wire, at) as reply:
        try:
            async with aiofiles.open(partial, "xb") as file:
                done = 0
                async for piece in joined(reply.chunks(), 4 * CHUNK):
                    await file.write(piece)
                    done += len(piece)
                    if on_progress is not None:
                        on_progress(done, reply.size)
            await aiofiles.os.replace(partial, to)
        except OSError as error:
            raise _local(error, to) from error
        finally:
            with suppress(OSError):
                await aiofiles.os.unlink(partial)
    return done


async def _read(
    file: AsyncBufferedReader, size: int, on_progress: OnProgress | None
) -> AsyncGenerator[bytes, None]:
    """Yield exactly `size` bytes, because the request announces this length."""
    done = 0
    while done < size and (piece := await file.read(min(CHUNK, size - done))):
        yield piece
        done += len(piece)
        if on_progress is not None:
            on_progress(done, size)
    if done < size:
        raise errors.Conflict("the file became shorter while it was read", code="file_changed")


async def pieces_of(data: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(data)
    for start in range(0, len(data), CHUNK):
        yield bytes(view[start : start + CHUNK])


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[tuple[AsyncBufferedReader, int]]:
    """Open a file, and yield it with its size. Raise NotFound, InvalidPath, Denied."""
    try:
        status = await aiofiles.os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise errors.InvalidPath(
                f"{path} is not a regular file",
                hint="name a file",
                details={"field": "path", "reason": "not_a_file"},
            )
        file = await aiofiles.open(path, "rb")
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _local(error, path) from error
    except ValueError as error:  # a NUL
        raise errors.InvalidPath(str(error), details={"reason": "null_byte"}) from error
    try:
        yield file, size
    finally:
        await file.close()


def _local(error: OSError, path: Path) -> errors.SbxError:
    """Return the error for a file of this host."""
    problem = f"{path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return errors.NotFound(problem, code="file_not_found", hint="check the name")
    if isinstance(error, PermissionError):
        return errors.Denied(
            problem, code="file_not_permitted", hint="use a file that you may access"
        )
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        return errors.InvalidPath(problem, hint="name a file", details={"reason": "not_a_file"})
    return errors.Unavailable(problem, code="io_error", hint="check the disk of this host")
