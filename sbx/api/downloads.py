"""Files on their way out: ranges, conditions, names; never more than a piece of one in memory."""

import asyncio
import re
from contextlib import suppress
from email.utils import formatdate, parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from sbx.api.errors import error_response
from sbx.api.shares import Slot, share
from sbx.errors import BadRequest
from sbx.runtime.files.streams import FileStream

_BYTES: dict[str, Any] = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
}
SENT: dict[int | str, dict[str, Any]] = {
    200: _BYTES,
    206: {**_BYTES, "description": "The range that was asked for"},
    304: {"description": "What the caller has is still the same"},
}
"""What `files_response` may answer but for errors, for the document of a route."""

_STALLED_S = 60.0  # without the client taking one piece
_RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.ASCII)
_PLAIN = re.compile(r"[^A-Za-z0-9 ._()+@-]")
_SAFE = "!#$&+-.^_`|~"  # what RFC 5987 leaves as it is, beside letters and digits


def files_response(
    request: Request, stream: FileStream, *, name: str, etag: str | None = None
) -> Response:
    """The file of `stream` as an attachment called `name`: whole, one range of it (206, 416), or
    304 when the caller has it. Takes over `stream` and closes it when it is sent. Raises
    Unavailable `too_many_downloads`.

    `etag` is what tells its content apart, without quotes; None: its size and time.
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
        return RangeResponse(stream, 0, 0, status=304, headers=headers, told=False)
    start, end = 0, stream.size
    status = 200
    if (asked := _asked_range(request, tag, stream)) is not None:
        if (found := _found(asked, stream.size)) is None:
            return _not_satisfiable(request, stream)
        start, end = found
        status = 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{stream.size}"
    headers["content-length"] = str(end - start)
    if request.method == "HEAD":
        return RangeResponse(stream, start, end - start, status=status, headers=headers, told=False)
    try:
        held = share(request, "downloads")
    except BaseException:
        stream.close()
        raise
    return RangeResponse(stream, start, end - start, status=status, headers=headers, held=held)


def attachment(name: str) -> str:
    """Content-Disposition with any name: RFC 5987's form, and a plain one for old readers."""
    plain = _PLAIN.sub("_", name)[:200]
    exact = quote(name.encode("utf-8", "surrogateescape"), safe=_SAFE)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{exact}"


class RangeResponse(Response):
    """The bytes of a stream. Ends early when the client has gone, or takes nothing any more; closes
    the stream in any case."""

    def __init__(
        self,
        stream: FileStream,
        start: int,
        length: int,
        *,
        status: int,
        headers: dict[str, str],
        told: bool = True,
        held: Slot | None = None,
    ) -> None:
        super().__init__(None, status, headers, "application/octet-stream")
        if status == 304:
            del self.headers["content-type"]
        self._stream = stream
        self._start = start
        self._length = length if told else 0
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        try:
            head: Message = {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
            await send(head)
            sent = 0
            if self._length:
                async for chunk in self._stream.chunks(self._start, self._length):
                    if gone.done():
                        return
                    sent += len(chunk)
                    async with asyncio.timeout(_STALLED_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if sent < self._length:
                raise RuntimeError("a file became shorter while it was sent")
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
            await self._stream.aclose()
            if self._held is not None:
                self._held.end()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
    if (known := request.headers.get("if-none-match")) is None:
        return False
    weak = tag.removeprefix("W/")
    return any(one.strip().removeprefix("W/") in ("*", weak) for one in known.split(","))


def _asked_range(
    request: Request, tag: str, stream: FileStream
) -> tuple[int | None, int | None] | None:
    """First and last byte as asked; None where all is to be sent, which is also the answer to
    several ranges and to what is no range (RFC 9110, 14.2)."""
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


def _found(asked: tuple[int | None, int | None], size: int) -> tuple[int, int] | None:
    """The range as (start, end), the end not in it; None where no byte of the file is in it."""
    first, last = asked
    if first is None:
        assert last is not None
        return (max(0, size - last), size) if last and size else None
    if first >= size:
        return None
    return first, size if last is None else min(size, last + 1)
