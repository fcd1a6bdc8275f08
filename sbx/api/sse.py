"""Server-sent events: streams of runs, and of the events of a sandbox, over HTTP.

Each event has an id, so that a client that was cut off requests the rest with `Last-Event-ID`. The
first event decides the HTTP status. After a later failure the last event is `failure`, with the
usual error body. A stream also ends so when its key or token is revoked or expires.

sse-starlette would replace only the loop of `_Stream`. It also finds uvicorn by its signal handlers
and cancels all streams at the first signal, but the drain of `serve` lets runs end first.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sbx.api.auth import authenticate
from sbx.api.bodies import disconnected
from sbx.api.errors import broken, error_body, status_of
from sbx.api.middleware import STREAM
from sbx.api.slots import take_slot
from sbx.errors import BadRequest, Denied, SbxError, Unavailable
from sbx.service.limits import Slot

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
SEND_S = 60.0  # for a client to take one event
KNOWN_S = 5.0  # between two checks of the key or token of the client
FIRST_S = 5.0  # for the first event; then the reply begins without it
DOCUMENTED: dict[str, Any] = {  # one event, as `content` of the OpenAPI document
    MEDIA_TYPE: {
        "schema": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
        }
    }
}
# In the scope of a request whose reply is a stream of events: a function that sends a sign of life,
# whose answer shows whether a client that has shut down its writing side is still there.
FOLLOWING = "sbx.following"
_BEHIND_MAX = 256 << 10  # bytes of events that wait for the client
_EVENT_ID_DIGITS = 15
_EVENT_ID = re.compile(rf"[0-9]{{1,{_EVENT_ID_DIGITS}}}")
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """An event with its JSON in ASCII."""

    type: str
    data: bytes


Events = AsyncIterator[tuple[int, dict[str, Any] | Encoded | bytes]]
Encode = Callable[[int, Any], bytes]  # of the number and the event


def accepts_events(request: Request) -> bool:
    """Return whether `Accept` names a stream of events."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def last_event_id(request: Request) -> int:
    """Return the id of the last event that the client has, or 0 without the header. Raise
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


def reserve(request: Request) -> None:
    """Take the slot of a stream that answers a POST. Call it before the work: a stream that is
    refused afterwards leaves work that its client does not know. Raise Unavailable
    `too_many_streams`."""
    if not hasattr(request.state, STREAM):
        setattr(request.state, STREAM, take_slot(request, "streams"))


async def stream(
    events: Events,
    *,
    request: Request | None = None,
    encode: Encode | None = None,
    keepalive: tuple[float, bytes] | None = None,
) -> Response:
    """Return the events as a reply: the `type` of each is its `event:`, all of it its `data:`,
    unless `encode` gives them another form, or they are bytes. `keepalive`: after so many seconds
    without an event, these bytes are sent, because proxies cut silent connections.

    Await the first event for a while, so that an early failure is an ordinary error reply. If the
    client disconnects, or reads nothing for SEND_S seconds, close `events` and nothing else: the
    run continues.

    A GET counts among the followers of the owner, and the reply to a POST among its streams. Raise
    Unavailable `too_many_followers`, `too_many_streams`.
    """
    request_id = getattr(request.state, "request_id", None) if request is not None else None
    slot: Slot | None = None
    if request is not None and request.method == "GET":
        slot = take_slot(request, "followers")
    elif request is not None:
        reserve(request)
        slot = getattr(request.state, STREAM)
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait((first,), timeout=FIRST_S)
        if first.done() and not isinstance(first.exception(), StopAsyncIteration):
            first.result()
    except BaseException:
        await _cancel(first)
        if slot is not None:
            slot.end()
        raise
    encode = encode or encoded
    text = _text(first, events, request_id, encode)
    return _Stream(
        text, first, events, slot, request, encode, keepalive or (HEARTBEAT_S, b": \n\n")
    )


def encoded(number: int, event: Mapping[str, Any] | Encoded) -> bytes:
    """Return the bytes of one event. JSON has no bare line breaks, so `data:` is one line."""
    if not isinstance(event, Encoded):
        data = json.dumps(event, separators=(",", ":")).encode("ascii")
        event = Encoded(event["type"], data)
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, event.type.encode("ascii"), event.data)


async def _text(
    first: "asyncio.Future[tuple[int, dict[str, Any] | Encoded | bytes]]",
    events: Events,
    request_id: str | None,
    encode: Encode,
) -> AsyncGenerator[tuple[int, bytes], None]:
    number = 0
    try:
        try:
            number, event = await first
        except StopAsyncIteration:
            yield 0, b": nothing\n\n"
            return
        yield number, event if isinstance(event, bytes) else encode(number, event)
        async for number, event in events:
            yield number, event if isinstance(event, bytes) else encode(number, event)
    except SbxError as error:
        yield number + 1, encode(number + 1, _failure(error, request_id))
    except Exception:  # noqa: BLE001  # the reply has begun
        _log.exception("a stream of events failed")
        yield number + 1, encode(number + 1, _failure(broken(), request_id))


def _failure(error: SbxError, request_id: str | None) -> dict[str, Any]:
    return {"type": "failure", "status": status_of(error), **error_body(error, request_id)}


class _Stream(Response):
    """Send each event as it comes. See `stream`."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        text: AsyncGenerator[tuple[int, bytes], None],
        first: "asyncio.Future[Any]",
        events: Events,
        slot: Slot | None,
        request: Request | None,
        encode: Encode,
        keepalive: tuple[float, bytes],
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._text = text
        self._first = first
        self._events = events
        self._slot = slot
        self._request = request
        self._encode = encode
        self._silence_s, self._keepalive = keepalive
        self._number = 0  # of the last event
        self._pieces: list[bytes] = []
        self._size = 0
        self._sent = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        changed = asyncio.Event()
        scope[FOLLOWING] = changed.set
        gone = asyncio.ensure_future(disconnected(receive))
        denied = asyncio.ensure_future(_denied(self._request))
        coming = asyncio.ensure_future(self._collect(changed))
        tasks: tuple[asyncio.Future[Any], ...] = (gone, denied, coming)
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **head})
            more = True
            while more:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._silence_s):
                        await changed.wait()
                if gone.done():
                    return
                if coming.done():
                    coming.result()
                refused = denied.done()
                changed.clear()
                body, more = self._taken(), not (refused or coming.done())
                if refused:
                    failure = _failure(denied.result(), scope["state"].get("request_id"))
                    body += self._encode(self._number + 1, failure)
                elif more:
                    body = body or self._keepalive
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            for task in (*tasks, self._first):
                await _cancel(task)
            for source in (self._text, self._events):
                if (close := getattr(source, "aclose", None)) is not None:
                    await close()
            if self._slot is not None:
                self._slot.end()

    async def _collect(self, changed: asyncio.Event) -> None:
        """Collect the events, as many as the client may be behind."""
        async for number, piece in self._text:
            self._number = number
            self._pieces.append(piece)
            self._size += len(piece)
            changed.set()
            while self._size >= _BEHIND_MAX:
                self._sent.clear()
                await self._sent.wait()

    def _taken(self) -> bytes:
        """Return the collected events. A burst of events is one write."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        self._sent.set()
        return body


async def _denied(request: Request | None) -> Denied:
    """Return the error as soon as the key or token of the client is no longer valid."""
    while True:
        await asyncio.sleep(KNOWN_S)
        if request is None or not hasattr(request.state, "caller"):
            continue
        try:
            await authenticate(request)
        except Denied as error:
            return error
        except Unavailable:
            continue  # the store cannot be read, and the key may still be valid


async def _cancel(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await task
    elif not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
