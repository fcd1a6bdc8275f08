"""The outermost layer of the app: request ids, limits of requests, and the last error handler.

Limits: the number and size of headers, no duplicates of headers that decide something, UTF-8 after
percent-decoding, the size and the rate of a body. No byte of a body is read before the caller is
known. Every wait for the client has a deadline here; the runtime has its own deadlines.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbx.api.admission import CLOSE
from sbx.api.bodies import IGNORED, VALUES_MAX, check_values
from sbx.api.errors import broken, error_response
from sbx.api.surfaces import OWN_ORIGIN, e2b_path, own_origin
from sbx.errors import BadRequest, Broken, InvalidPath, SbxError, TooLarge, out_of_files
from sbx.protocol.bundles import ValueCounter
from sbx.service.caller import Caller
from sbx.service.limits import OwnerBytes
from sbx.telemetry.logs import bound
from sbx.telemetry.metrics import requested

JSON_MAX = 2 << 20  # bytes
CONTENT_MAX = 16 << 20  # bytes of a JSON body that carries the text of a file
HEADERS_MAX = 100
HEADER_BYTES_MAX = 64 << 10
PATH_BYTES_MAX = 16 << 10  # of path and query together
IDLE_S = 15.0  # without a byte of a body
INTERACTIVE_S = 180.0  # the same for input as a person types it; its client sends a sign of life
JSON_S = 30.0  # for all of a body that is not streamed
LOGIN_MAX = 16 << 10  # bytes of a body that identifies its caller
SLOW_AFTER_S = 60.0  # in each such window a streamed body must come at SLOWEST
SLOWEST = 4096  # bytes in a second, on average
HURRIED_AFTER_S = 5.0  # the same, while others wait for its slot
HURRIED = 128 << 10
# In the state of a request: a function, whether others wait for its slot; its slot as a stream.
HURRY, STREAM = "hurry", "stream"

_log = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_BOX = r"/v1/sandboxes/[^/]+"
# Full matches of method and path: an id may be any text, such as `uploads` or `filesystem`.
_STREAMED = re.compile(
    rf"POST {_BOX}/filesystem/upload"
    r"|POST /api/v1/sessions/[^/]+/files/upload"
    r"|POST /opensandbox/v1/sandboxes/[^/]+/proxy/44772/files/upload"
    r"|[A-Z]+ /opensandbox/v1/sandboxes/[^/]+/proxy/(?!44772/)[0-9]+/.*"
    r"|POST /e2b/49983/(files|process\.Process/StreamInput)"
    r"|[A-Z]+ /e2b/ports/.*"
    rf"|PUT {_BOX}/conversations/[^/]+/(files|archive|uploads/[^/]+)"
    rf"|PATCH {_BOX}/conversations/[^/]+/partials/[^/]+"
    rf"|[A-Z]+ {_BOX}/ports/[0-9]+/.*"
)
_CONTENT = re.compile(
    rf"PUT {_BOX}/filesystem/files|POST {_BOX}/conversations/[^/]+/runs"
    r"|POST /api/v1/conversations/[^/]+/import|POST /api/v1/tools/[^/]+/invoke"
    r"|POST /e2b/49999/execute|POST /e2b/49983/process\.Process/SendInput"
)
_DATA = (  # values and keys in other bodies; 1,000 inputs of a task have 100 parameters each
    (re.compile(r"POST /api/v1/(conversations/[^/]+/import|tasks)"), 200_000),
    (re.compile(r"POST /api/v1/tools/[^/]+/invoke"), 50_000),
)
# Each message has a binary head; `connect.messages` counts its values.
_ENVELOPED = re.compile(r"POST /e2b/49983/(process|filesystem)\.\w+/(Start|Connect|WatchDir)")
_LOGINS = ("POST /api/v1/login", "POST /api/v1/console/login")
_INTERACTIVE = "POST /e2b/49983/process.Process/StreamInput"
# RFC 9112, 3.2, and RFC 3986, 3.2.2: a name or an address, perhaps empty, and perhaps a port.
_HOST = re.compile(
    rb"(\[[0-9A-Fa-f:.]+(%25[A-Za-z0-9._~-]+)?\]|([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)"
    rb"(:[0-9]{0,5})?"
)
_ONCE = frozenset(
    name.encode()
    for name in (
        "authorization", "content-length", "content-type", "conversation_id", "host",
        "idempotency-key", "last-event-id", "origin", "range", "subdir", "x-conversation-id",
        "x-request-id",
    )
)  # fmt: skip


class RequestLimitsMiddleware:
    """Wrap the app. An exception becomes an error reply. After a reply has begun, the connection is
    cut instead, so that the client sees an incomplete body."""

    def __init__(
        self,
        app: ASGIApp,
        authenticate: Callable[[Request], Awaitable[Caller]] | None = None,
        bodies: OwnerBytes | None = None,
    ) -> None:
        """`authenticate` raises for a caller that may not send a body, or no longer. `bodies`
        counts those of requests without a complete reply."""
        self._app = app
        self._authenticate = authenticate
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            _route_by_headers(scope)
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        id_header = (b"x-request-id", request_id.encode("ascii"))
        began = time.monotonic()
        started = 0
        ignored: list[str] = []
        IGNORED.set(ignored)

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
                if ignored:
                    names = ", ".join(ignored).encode("ascii")
                    message["headers"].append((b"sbx-ignored", names))
            await send(message)

        body: LimitedBody | None = None
        with bound(request=request_id):
            try:
                length = _check(scope)
                body = LimitedBody(receive, scope, length, self._authenticate, self._bodies)
                await self._app(scope, body.receive, sending)
            except ClientDisconnect:  # with its body unfinished, so no client reads a reply
                pass
            except Exception as error:
                if isinstance(error, SbxError) and not started:
                    await error_response(error, request_id, scope)(scope, receive, sending)
                    return
                if started:
                    if not await _cut_off(error, scope, receive):
                        raise
                    return
                if (refusal := out_of_files(error)) is None:
                    _log.exception("%s %s failed", scope["method"], scope["path"])
                reply = error_response(refusal or broken(), request_id, scope)
                await reply(scope, receive, sending)
            finally:
                if body is not None:
                    body.release()
                if (slot := scope["state"].get(STREAM)) is not None:
                    slot.end()
                seconds = time.monotonic() - began
                requested(scope["method"], _template(scope), started or 499, seconds)

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a WebSocket, or refuse it like a request. Its protocol bounds its messages."""
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        with bound(request=request_id):
            try:
                _check(scope)
            except SbxError as error:
                await error_response(error, request_id, scope)(scope, receive, send)
                return
            await self._app(scope, receive, send)


async def _cut_off(error: Exception, scope: Scope, receive: Receive) -> bool:
    """Close the connection after an error in the middle of a reply, the only sign that is left.
    Return False for a bug. Code inside can cause the others at will, so they are not errors in the
    log. Starlette wraps an error that it has a handler for."""
    cause = error if isinstance(error, SbxError) else error.__cause__
    if not isinstance(cause, SbxError) or isinstance(cause, Broken):
        return False
    close = scope.get("extensions", {}).get(CLOSE)
    if close is None:
        return False
    _log.info("%s %s was cut off: %s", scope["method"], scope["path"], cause.message)
    close()
    while (await receive())["type"] != "http.disconnect":
        pass
    return True


class LimitedBody:
    """The messages of the body of one request, counted and timed, from a known caller."""

    def __init__(
        self,
        receive: Receive,
        scope: Scope,
        length: int | None,
        authenticate: Callable[[Request], Awaitable[Caller]] | None,
        bodies: OwnerBytes | None,
    ) -> None:
        called = f"{scope['method']} {scope['path']}"
        self._limit = limit = largest_body(called)  # None: streamed, unbounded
        if limit is not None and length is not None and length > limit:
            raise _too_large(limit)
        self._values_max = next(
            (most for pattern, most in _DATA if pattern.fullmatch(called)), VALUES_MAX
        )
        self._values = None  # a shorter body cannot have more
        long = limit is not None and (length is None or length > self._values_max)
        if long and not _ENVELOPED.fullmatch(called):
            self._values = ValueCounter()
        self._interactive = called == _INTERACTIVE
        self._receive = receive
        self._scope = scope
        self._authenticate = None if called in _LOGINS else authenticate
        self._length = length or 0
        self._bodies = bodies if limit is not None else None  # a streamed one is not in memory
        self._owner = ""
        self._taken = 0  # bytes of `bodies`
        self._read = 0
        self._waited = 0.0
        self._window = 0, 0.0  # read and waited at the start of the current window
        self._ended = False

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()  # which waits until the client disconnects
        await self._identify()
        began = time.monotonic()
        try:
            async with asyncio.timeout(INTERACTIVE_S if self._interactive else IDLE_S):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow() from None
        self._waited += time.monotonic() - began
        await self._identify()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
            self._check()
            if self._values is not None:
                self._values.feed(message.get("body", b""))
                check_values(self._values, self._values_max)
            self._take()
        return message

    async def _identify(self) -> None:
        """Check the caller before the first byte and at each later one: a body may come for hours,
        and its key may be revoked meanwhile."""
        if self._authenticate is not None:
            self._owner = (await self._authenticate(Request(self._scope))).owner

    def _take(self) -> None:
        """Count the bytes of the body until the reply is complete, those that are announced before
        they come: a call may wait with its body in memory, even for a client that is gone. Raise as
        `OwnerBytes.take`."""
        more = max(self._length, self._read) - self._taken
        if self._bodies is not None and more > 0:
            self._bodies.take(self._owner, more)
            self._taken += more

    def release(self) -> None:
        """Count this body no longer. A second call does nothing."""
        if self._bodies is not None and self._taken:
            self._bodies.release(self._owner, self._taken)
            self._taken = 0

    def _check(self) -> None:
        if self._limit is not None and self._read > self._limit:
            raise _too_large(self._limit)
        if self._ended:
            return
        if self._limit is not None and self._waited > JSON_S:
            raise _too_slow()
        if self._limit is None and not self._interactive:
            self._check_rate()

    def _check_rate(self) -> None:
        """Check the rate in each window, so that a fast start does not excuse a slow body later."""
        hurry: Callable[[], bool] | None = self._state.get(HURRY)
        hurried = hurry is not None and hurry()
        seconds, slowest = (HURRIED_AFTER_S, HURRIED) if hurried else (SLOW_AFTER_S, SLOWEST)
        read, waited = self._read - self._window[0], self._waited - self._window[1]
        if waited < seconds:
            return
        if read / waited < slowest:
            raise _too_slow()
        self._window = self._read, self._waited

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scope["state"]
        return state


def _route_by_headers(scope: Scope) -> None:
    """Route a request to the name of one port to this port, whatever its path is, and one of E2B's
    SDK to the routes of its surface."""
    headers = dict(scope["headers"])
    if (place := own_origin(headers.get(b"host", b""))) is not None:
        sandbox, port = place
        scope["path"] = f"/v1/sandboxes/{sandbox}/ports/{port}{scope['path']}"
        scope[OWN_ORIGIN] = True
    elif (path := e2b_path(scope["path"], headers)) is not None:
        scope["path"] = path


def _template(scope: Scope) -> str:
    """Return the template of the route. The raw path would make a label for each id."""
    return getattr(scope.get("route"), "path", "") or "none"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id: str = value.decode("latin-1")
            if _SANE_ID.fullmatch(request_id):
                return request_id
    return str(uuid.uuid4())


def _check(scope: Scope) -> int | None:
    """Raise for a request that no route should see. Return the declared length of the body."""
    seen = set()
    size = 0
    length = None
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if len(headers) > HEADERS_MAX:
        raise _headers_too_large(f"at most {HEADERS_MAX} headers")
    for name, value in headers:
        size += len(name) + len(value)
        if name in _ONCE:
            if name in seen:
                raise BadRequest(f"the header {name.decode('latin-1')} came twice")
            seen.add(name)
            if name == b"content-length" and value.isdigit():
                length = int(value[:20])
            if name == b"host" and not _HOST.fullmatch(value):
                raise _bad_host("the Host header is neither a name nor an address")
    if b"host" not in seen and scope["http_version"] == "1.1":
        raise _bad_host("a request of HTTP/1.1 must have a Host header")
    if size > HEADER_BYTES_MAX:
        raise _headers_too_large(f"at most {HEADER_BYTES_MAX} bytes of headers")
    raw_path, query = scope.get("raw_path") or b"", scope.get("query_string", b"")
    if len(raw_path) + len(query) > PATH_BYTES_MAX:
        raise BadRequest("the address is too long", code="uri_too_long")
    for part in (raw_path, query):
        if b"%" in part:
            _check_utf8(part)
    if "\0" in scope["path"]:
        raise InvalidPath(
            "the address contains a NUL character",
            details={"field": "path", "reason": "null_byte"},
        )
    return length


def _check_utf8(text: bytes) -> None:
    """Raise InvalidPath. Servers replace bad UTF-8 by U+FFFD, so two names could mean one file."""
    try:
        unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise InvalidPath(
            "the address is not UTF-8", details={"field": "path", "reason": "not_utf8"}
        ) from None


def largest_body(called: str) -> int | None:
    """Return the largest body for this method and path; None for one that is never in memory."""
    if _STREAMED.fullmatch(called):
        return None
    if called in _LOGINS:
        return LOGIN_MAX
    return CONTENT_MAX if _CONTENT.fullmatch(called) else JSON_MAX


def _too_large(limit: int) -> SbxError:
    return TooLarge(
        f"the body is larger than {limit} bytes", code="body_too_large", details={"limit": limit}
    )


def _too_slow() -> SbxError:
    return BadRequest("the body came too slowly", code="request_timeout")


def _bad_host(message: str) -> SbxError:
    return BadRequest(message, hint="send Host: and the name of the server, with any port")


def _headers_too_large(message: str) -> SbxError:
    return BadRequest(message, code="headers_too_large")
