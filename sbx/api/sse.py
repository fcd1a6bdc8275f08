"""Server-sent events: how a run, or the life of a sandbox, is followed over HTTP.

Each event has an id, so that a client that was cut off asks for the rest with `Last-Event-ID`. The
status line is gone when something fails on the way: then the last event is `failure`, with the
usual error body.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sbx.api.errors import broken, error_body, status_of
from sbx.api.shares import Share, share
from sbx.errors import SbxError

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
SEND_S = 60.0  # for a client to take what was sent
FIRST_S = 5.0  # for the first event: then the reply begins without it, and sees the client go
DOCUMENTED: dict[str, Any] = {  # as a `content` of the OpenAPI document: one event
    MEDIA_TYPE: {
        "schema": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
        }
    }
}
FOLLOWING = "sbx.following"  # in the scope of a request whose reply is a stream of events
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """An event whose JSON is written already, in ASCII."""

    type: str
    data: bytes


Events = AsyncIterator[tuple[int, dict[str, Any] | Encoded]]


def wanted(request: Request) -> bool:
    """Whether `Accept` asks for a stream of events."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def last_event_id(request: Request) -> int:
    """What the client has seen; 0 when it says nothing, or nothing that is a number."""
    asked = request.headers.get("last-event-id", "")
    return int(asked) if asked.isascii() and asked.isdecimal() and len(asked) < 16 else 0


async def stream(events: Events, *, request: Request | None = None) -> Response:
    """The events as a reply; the `type` of each is its `event:`, all of it its `data:`.

    Awaits the first one for a while, so that what fails before anything was said is an ordinary
    error reply. When the client goes, or reads nothing for SEND_S seconds, `events` is closed and
    nothing else: whatever it follows goes on.

    Who begins a run hears of it; who follows with a GET is one of the owner's followers. Raises
    Unavailable `too_many_followers`.
    """
    request_id = getattr(request.state, "request_id", None) if request is not None else None
    follows = request is not None and request.method == "GET"
    held = share(request, "followers") if request is not None and follows else None
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait((first,), timeout=FIRST_S)
        if first.done() and not isinstance(first.exception(), StopAsyncIteration):
            first.result()
    except BaseException:
        await _given_up(first)
        if held is not None:
            held.end()
        raise
    return _Stream(_text(first, events, request_id), first, events, held)


def encoded(number: int, event: Mapping[str, Any] | Encoded) -> bytes:
    """One event as it goes over the wire. JSON has no bare line breaks, so `data:` is one line."""
    if not isinstance(event, Encoded):
        data = json.dumps(event, separators=(",", ":")).encode("ascii")
        event = Encoded(event["type"], data)
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, event.type.encode("ascii"), event.data)


async def _text(
    first: "asyncio.Future[tuple[int, dict[str, Any] | Encoded]]",
    events: Events,
    request_id: str | None,
) -> AsyncGenerator[bytes, None]:
    number = 0
    try:
        try:
            number, event = await first
        except StopAsyncIteration:
            yield b": nothing\n\n"
            return
        yield encoded(number, event)
        async for number, event in events:
            yield encoded(number, event)
    except SbxError as error:
        told = {"type": "failure", "status": status_of(error), **error_body(error, request_id)}
        yield encoded(number + 1, told)
    except Exception:  # noqa: BLE001  # the reply has begun: this is all to be said
        _log.exception("a stream of events failed")
        told = {"type": "failure", "status": 500, **error_body(broken(), request_id)}
        yield encoded(number + 1, told)


class _Stream(Response):
    """Sends text as it comes, and a comment whenever there is none for a while: proxies cut silent
    connections."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        text: AsyncGenerator[bytes, None],
        first: "asyncio.Future[Any]",
        events: Events,
        held: Share | None,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._text = text
        self._first = first
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FOLLOWING] = True
        gone = asyncio.ensure_future(_gone(receive))
        coming: asyncio.Future[bytes] | None = None
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **head})
            while True:
                coming = coming or asyncio.ensure_future(anext(self._text))
                await asyncio.wait(
                    (coming, gone), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return
                piece = b": \n\n"
                if coming.done():
                    piece = coming.result()
                    coming = None
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except StopAsyncIteration:
            await send({"type": "http.response.body", "body": b""})
        finally:
            for task in (gone, coming, self._first):
                if task is not None:
                    await _given_up(task)
            for source in (self._text, self._events):
                if (close := getattr(source, "aclose", None)) is not None:
                    await close()
            if self._held is not None:
                self._held.end()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _given_up(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await task
    elif not task.cancelled():
        task.exception()  # looked at: nobody is to be told of it any more
