"""Server-sent events: how a run, or the life of a sandbox, is followed over HTTP.

Each event has an id, so that a client that was cut off asks for the rest with `Last-Event-ID`. The
status line is gone when something fails on the way: then the last event is `failure`, with the
usual error body. That is also how a stream ends when its key or token is revoked or expires.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sbx.api.auth import authenticate
from sbx.api.bodies import disconnected
from sbx.api.errors import broken, error_body, status_of
from sbx.api.shares import Slot, share
from sbx.errors import BadRequest, Denied, SbxError, Unavailable

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
SEND_S = 60.0  # for a client to take what was sent
KNOWN_S = 5.0  # after which the key or token of the client is looked at again
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
_EVENT_ID_DIGITS = 15
_EVENT_ID = re.compile(rf"[0-9]{{1,{_EVENT_ID_DIGITS}}}")
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
    """Return the id of the last event that the client has, or 0 without the header. Raises
    BadRequest `invalid_event_id`."""
    text = request.headers.get("last-event-id")
    if text is None:
        return 0
    if not _EVENT_ID.fullmatch(text):
        raise BadRequest(
            f"Last-Event-ID must be 1 to {_EVENT_ID_DIGITS} digits, not {text[:40]!r}",
            code="invalid_event_id",
            hint="send the id of the last event of this stream, or leave the header out",
            details={"field": "Last-Event-ID"},
        )
    return int(text)


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
    return _Stream(_text(first, events, request_id), first, events, held, request)


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
) -> AsyncGenerator[tuple[int, bytes], None]:
    number = 0
    try:
        try:
            number, event = await first
        except StopAsyncIteration:
            yield 0, b": nothing\n\n"
            return
        yield number, encoded(number, event)
        async for number, event in events:
            yield number, encoded(number, event)
    except SbxError as error:
        yield number + 1, _failure(number + 1, error, request_id)
    except Exception:  # noqa: BLE001  # the reply has begun: this is all to be said
        _log.exception("a stream of events failed")
        yield number + 1, _failure(number + 1, broken(), request_id)


def _failure(number: int, error: SbxError, request_id: str | None) -> bytes:
    failure = {"type": "failure", "status": status_of(error), **error_body(error, request_id)}
    return encoded(number, failure)


class _Stream(Response):
    """Sends text as it comes, and a comment whenever there is none for a while: proxies cut silent
    connections."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        text: AsyncGenerator[tuple[int, bytes], None],
        first: "asyncio.Future[Any]",
        events: Events,
        held: Slot | None,
        request: Request | None,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._text = text
        self._first = first
        self._events = events
        self._held = held
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FOLLOWING] = True
        gone = asyncio.ensure_future(disconnected(receive))
        denied = asyncio.ensure_future(_denied(self._request))
        coming: asyncio.Future[tuple[int, bytes]] | None = None
        number = 0
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **head})
            while True:
                coming = coming or asyncio.ensure_future(anext(self._text))
                await asyncio.wait(
                    (coming, gone, denied),
                    timeout=HEARTBEAT_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    return
                refusal = denied.result() if denied.done() else None
                piece = b": \n\n"
                if refusal is not None:
                    piece = _failure(number + 1, refusal, scope["state"].get("request_id"))
                elif coming.done():
                    number, piece = coming.result()
                    coming = None
                more = refusal is None
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
                if not more:
                    return
        except StopAsyncIteration:
            await send({"type": "http.response.body", "body": b""})
        finally:
            for task in (gone, denied, coming, self._first):
                if task is not None:
                    await _given_up(task)
            for source in (self._text, self._events):
                if (close := getattr(source, "aclose", None)) is not None:
                    await close()
            if self._held is not None:
                self._held.end()


async def _denied(request: Request | None) -> Denied:
    """Return the refusal of the client, as soon as its key or token stops being valid."""
    while True:
        await asyncio.sleep(KNOWN_S)
        if request is None or not hasattr(request.state, "caller"):
            continue
        try:
            await authenticate(request)
        except Denied as error:
            return error
        except Unavailable:
            continue  # the store cannot be read: the key may still be valid


async def _given_up(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await task
    elif not task.cancelled():
        task.exception()  # looked at: nobody is to be told of it any more
