"""Downloads: ranges, conditions, file names; never more than one piece of a file in memory."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from email.utils import formatdate, parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from sbx.api.bodies import disconnected
from sbx.api.errors import error_response
from sbx.api.ports import while_allowed
from sbx.api.slots import take_slot
from sbx.errors import BadRequest
from sbx.runtime.files.streams import FileStream
from sbx.service.limits import Slot

_BYTES: dict[str, Any] = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
}
SENT: dict[int | str, dict[str, Any]] = {
    200: _BYTES,
    206: {**_BYTES, "description": "The requested range"},
    304: {"description": "The caller's copy is current"},
}
"""The successful replies of `files_response`, for the OpenAPI document of a route."""

_STALLED_S = 60.0  # without the client taking one piece
_RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.ASCII)
_PLAIN = re.compile(r"[^A-Za-z0-9 ._()+@-]")
_SAFE = "!#$&+-.^_`|~"  # and letters and digits, which RFC 5987 does not quote


def files_response(
    request: Request, stream: FileStream, *, name: str, etag: str | None = None
) -> Response:
    """Return the file of `stream` as an attachment `name`: all of it, one range (206, 416), or 304
    if the caller has it. Take over `stream`, and close it at the end. Raise Unavailable
    `too_many_downloads`.

    `etag` identifies the content, without quotes; None: its size and time.
    """
    tag = f'"{etag}"' if etag else f'W/"{stream.size:x}-{stream.modified_s:.6f}"'
    headers = {
        "etag": tag,
        "last-modified": formatdate(stream.modified_s, usegmt=True),
        "accept-ranges": "bytes",
        "content-disposition": attachment(name),
        "x-content-type-options": "nosniff",
        "content-security-policy": "sandbox",
        "cache-control": "private, no-cache",
    }
    if _unchanged(request, tag):
        return RangeResponse(stream, 0, 0, status=304, headers=headers)
    start, end = 0, stream.size
    status = 200
    if (requested := _requested_range(request, tag, stream)) is not None:
        if (bounds := _bounds(requested, stream.size)) is None:
            return _not_satisfiable(request, stream)
        start, end = bounds
        status = 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{stream.size}"
    headers["content-length"] = str(end - start)
    if request.method == "HEAD":
        return RangeResponse(stream, 0, 0, status=status, headers=headers)
    try:
        place = take_slot(request, "downloads")
    except BaseException:
        stream.close()
        raise
    return RangeResponse(stream, start, end, status=status, headers=headers, place=place)


def attachment(name: str) -> str:
    """Return a Content-Disposition by RFC 5987, with a name in plain ASCII for old clients."""
    plain = _PLAIN.sub("_", name)[:200]
    exact = quote(name.encode("utf-8", "surrogateescape"), safe=_SAFE)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{exact}"


class PiecesResponse(Response):
    """Pieces of bytes as they come. It ends early if the client disconnects, stalls, or loses
    its permission. An error after the first byte cuts the connection."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        media_type: str = "application/octet-stream",
        status: int = 200,
    ) -> None:
        super().__init__(None, status, headers, media_type)
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        sending = asyncio.ensure_future(while_allowed(HTTPConnection(scope), self._send(send)))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (gone, sending):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            await self._pieces.aclose()

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for piece in self._pieces:
            async with asyncio.timeout(_STALLED_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class RangeResponse(PiecesResponse):
    """The bytes of a stream from `start` to `end`. Closes the stream in any case."""

    def __init__(
        self,
        stream: FileStream,
        start: int,
        end: int,
        *,
        status: int,
        headers: Mapping[str, str],
        place: Slot | None = None,
    ) -> None:
        super().__init__(_range(stream, start, end), headers=headers, status=status)
        if status == 304:
            del self.headers["content-type"]
        self._stream = stream
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()
            if self._place is not None:
                self._place.end()


async def _range(stream: FileStream, start: int, end: int) -> AsyncGenerator[bytes, None]:
    rest = end - start
    if not rest:
        return
    async for chunk in stream.chunks(start, rest):
        rest -= len(chunk)
        yield chunk
    if rest:
        raise RuntimeError("a file became shorter while it was sent")


def _not_satisfiable(request: Request, stream: FileStream) -> Response:
    error = BadRequest(
        f"the file has {stream.size} bytes, and the range asked for none of them",
        code="range_not_satisfiable",
        details={"size": stream.size},
    )
    response = error_response(error, getattr(request.state, "request_id", None))
    response.headers["content-range"] = f"bytes */{stream.size}"
    stream.close()
    return response


def _unchanged(request: Request, tag: str) -> bool:
    if (etags := request.headers.get("if-none-match")) is None:
        return False
    weak = tag.removeprefix("W/")
    return any(etag.strip().removeprefix("W/") in ("*", weak) for etag in etags.split(","))


def _requested_range(
    request: Request, tag: str, stream: FileStream
) -> tuple[int | None, int | None] | None:
    """Return the first and last byte of the request. Return None to send the whole file, also for
    several ranges and for an invalid range (RFC 9110, 14.2)."""
    if (match := _RANGE.fullmatch(request.headers.get("range", ""))) is None:
        return None
    if (condition := request.headers.get("if-range")) is not None and not _same(
        condition.strip(), tag, stream
    ):
        return None
    first, last = (int(text) if text else None for text in match.groups())
    if (first is None and last is None) or (
        first is not None and last is not None and last < first
    ):
        return None
    return first, last


def _same(condition: str, tag: str, stream: FileStream) -> bool:
    if condition.startswith(('"', "W/")):
        return condition == tag and not tag.startswith("W/")
    try:
        return int(parsedate_to_datetime(condition).timestamp()) == int(stream.modified_s)
    except (ValueError, TypeError, OverflowError):
        return False


def _bounds(requested: tuple[int | None, int | None], size: int) -> tuple[int, int] | None:
    """Return the range as (start, end), end excluded; None if it has no byte of the file."""
    first, last = requested
    if first is None:
        assert last is not None
        return (max(0, size - last), size) if last and size else None
    if first >= size:
        return None
    return first, size if last is None else min(size, last + 1)
