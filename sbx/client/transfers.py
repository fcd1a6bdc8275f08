"""A large file sent in pieces, each with its checksum: a lost connection costs one piece."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from sbx import errors
from sbx.client.http import HttpClient, query

RESUMABLE_MIN = 16 << 20  # bytes: a smaller file is sent again as a whole
PIECE = 8 << 20
_CHUNK = 256 << 10
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)  # seconds before each try in a row
_BROKEN = frozenset({"connection_lost", "service_unreachable", "timeout", "truncated_body"})
_BUSY = frozenset({"upload_busy", "request_timeout", "checksum_mismatch", "too_many_uploads"})

OnProgress = Callable[[int, int | None], object]


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """What a file becomes: `partials` is the address where it is begun."""

    partials: str
    path: str
    upload: bool


async def send_in_pieces(
    wire: HttpClient,
    target: UploadTarget,
    file: IO[bytes],
    size: int,
    on_progress: OnProgress | None,
) -> Any:
    """What the service says of the finished file. Raises its errors, and the last one of the
    connection when that cannot be mended."""
    new = {"path": target.path, "size": size, "upload": target.upload}
    told = (await wire.call("POST", target.partials, body=_json(new), again=True)).json()
    sending = _Sending(wire, f"{target.partials}/{told['id']}", file, size, on_progress)
    try:
        return await sending.run()
    except BaseException:
        with suppress(errors.SbxError):
            await wire.call("DELETE", sending.at, timeout_s=5.0, again=False)
        raise


class _Sending:
    """One upload on its way."""

    def __init__(
        self, wire: HttpClient, at: str, file: IO[bytes], size: int, on_progress: OnProgress | None
    ) -> None:
        self.at = at
        self._wire = wire
        self._file = file
        self._size = size
        self._on_progress = on_progress
        self._digest = hashlib.sha256()

    async def run(self) -> Any:
        offset = 0
        while offset < self._size:
            piece = await asyncio.to_thread(self._file.read, min(PIECE, self._size - offset))
            if not piece:
                raise errors.Conflict(
                    "the file became shorter while it was read", code="file_changed"
                )
            await asyncio.to_thread(self._digest.update, piece)
            offset = await self._send_with_retry(offset, piece)
            if self._on_progress is not None:
                self._on_progress(offset, self._size)
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

    async def _send_with_retry(self, offset: int, piece: bytes) -> int:
        """Send it until it is there; where it ends."""
        end = offset + len(piece)
        sha256 = (await asyncio.to_thread(hashlib.sha256, piece)).hexdigest()
        at = self.at + query({"offset": offset, "sha256": sha256})
        for pause in (*_PAUSES, None):
            try:
                await self._wire.send("PATCH", at, _pieces(piece), size=len(piece))
                return end
            except errors.SbxError as error:
                if pause is None or error.code not in _BROKEN | _BUSY | {"wrong_offset"}:
                    raise
                if await self._reached(error, pause) == end:
                    return end
        raise AssertionError

    async def _reached(self, error: errors.SbxError, pause: float) -> int | None:
        """How far it is by what the service says; None where it says nothing now."""
        if error.code != "wrong_offset":
            await asyncio.sleep(pause)
        try:
            return int((await self._wire.call("GET", self.at)).json()["offset"])
        except errors.SbxError as again:
            if again.code not in _BROKEN:
                raise
        return None


async def _pieces(data: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(data)
    for start in range(0, len(data), _CHUNK):
        yield bytes(view[start : start + _CHUNK])


def _json(asked: dict[str, Any]) -> bytes:
    return json.dumps(asked).encode("ascii")
