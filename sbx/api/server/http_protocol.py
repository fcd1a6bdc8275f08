"""One HTTP connection: uvicorn's httptools protocol, with limits.

`scope["extensions"]["sbx.peer"]` has the user behind a Unix socket. The head of a request is
bounded in bytes and in time. A request that cannot be parsed gets an error reply, and so does a
connection without a place among `limit_concurrency` others (see admission.py). A client that shuts
down its writing side gets the pending replies, and then the connection is closed.
"""

import asyncio
import uuid
from functools import partial
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from sbx.api.admission import CLOSE, PLACE, AdmissionPlace, admission_of, too_many_connections
from sbx.api.errors import error_response
from sbx.api.server.peer_credentials import PEER, has_hung_up, peer_of
from sbx.api.server.websocket_protocol import WebSocketProtocol
from sbx.api.sse import FOLLOWING
from sbx.errors import BadRequest, SbxError

# Of an idle connection. The clients of E2B reuse one for up to 300 s, and do not repeat a request
# that a close of the service overtook.
KEEP_ALIVE_S = 330
HEAD_MAX = 64 * 1024
HEAD_S = 15.0
FULL_S = 1.0  # the same for a connection that is one too many
LOOK_S = 1.0  # between two checks of a client that has shut down its writing side
UNREAD_S = 60.0  # for a client to read a part of a complete reply
PROBE_LOOKS = 5  # checks from one interim reply to the next
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    """One connection, and the requests on it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._admission = admission_of(self.server_state, self.limit_concurrency)
        self.limit_concurrency = None  # uvicorn would refuse only after a request
        self._place: AdmissionPlace | None = None
        self._extensions: dict[str, Any] = {}
        self._head = 0  # bytes of the current head
        self._tail = b""  # and its last bytes: its end may come in two pieces
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._requests = 0
        # Unlike `cycle`, which is that of the last request, the one that is answered now.
        self.answering: RequestResponseCycle = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (peer := peer_of(transport)) is not None:
            self._extensions[PEER] = peer
            self._place = self._admission.enter_unix(peer["uid"], transport.abort)
        elif self.client is not None:  # else it has disconnected already
            self._place = self._admission.enter_tcp(self.client[0], transport.abort)
        if self._place is None:
            transport.abort()
            return
        self._extensions[PLACE] = self._place
        self._extensions[CLOSE] = transport.close
        # The protocol of a WebSocket takes over the place of the connection.
        self.ws_protocol_class = cast(
            "type[asyncio.Protocol]", partial(WebSocketProtocol, self._place)
        )
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        if self._place is not None:
            self._place.leave()
        for timer in (self._look, self._unread):
            if timer is not None:
                timer.cancel()
        if self._is_answering:
            self.answering.disconnected = True
            self.answering.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether replies are due: these are sent before the connection is closed
        (RFC 9112, 9.6)."""
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        due = self._in_head and last is not None and not last.response_complete
        if not due or self.transport.is_closing() or has_hung_up(self.transport):
            return False
        self._head_is_here()  # no other head can come
        last.keep_alive = False
        self._look = self.loop.call_later(LOOK_S, self._look_at_client, 0)
        return True

    def _look_at_client(self, looks: int) -> None:
        """Notice that a client has disconnected after it had shut down its writing side.

        Linux reports this for a Unix socket. Over TCP, a client that closed its socket answers the
        next bytes with an RST. An interim reply provides these bytes until the reply begins, and a
        sign of life in a stream of events.
        """
        if self.transport.is_closing():
            return
        if has_hung_up(self.transport):
            self.transport.abort()
            return
        if looks % PROBE_LOOKS == 0:
            if FOLLOWING in (scope := cast("dict[str, Any]", self.answering.scope)):
                scope[FOLLOWING]()
            elif self._may_send_interim():
                self.transport.write(_CONTINUE)
        self._look = self.loop.call_later(LOOK_S, self._look_at_client, looks + 1)

    def _may_send_interim(self) -> bool:
        over_tcp = PEER not in self._extensions
        speaks_1_1 = self.answering.scope["http_version"] == "1.1"  # RFC 9110, 15.2
        return over_tcp and speaks_1_1 and not self.answering.response_started

    def data_received(self, data: bytes) -> None:
        if self._refused:  # not before: a client may lose a reply that precedes its request
            self._refuse(too_many_connections())
            return
        if self._in_head:
            self._head += len(data)
            if self._head > HEAD_MAX + 1 and self._refuse_if_still_in_head(data):
                return
            self._tail = (self._tail + data[-3:])[-3:]
            if self._late is None:
                self._late = self.loop.call_later(HEAD_S, self._head_is_late)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        self._head_is_here()
        self._requests += 1
        if self._place is not None:
            self._place.begin_request()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_soon(self._rest, self._requests)  # by then the transport has written it

    def _rest(self, requests: int) -> None:
        """After a reply: note whether another one is due, and whether the client reads."""
        size = self.transport.get_write_buffer_size()
        if self._unread is not None:
            self._unread.cancel()  # another reply fits, so the client reads
            self._unread = None
        if size:
            self._unread = self.loop.call_later(UNREAD_S, self._look_at_unread, size)
        if requests == self._requests and not self._is_answering and self._place is not None:
            self._place.end_request(flushed=not size)

    def _look_at_unread(self, before: int) -> None:
        """Close the connection of a client that takes nothing of a complete reply. A stream has
        another limit."""
        size = self.transport.get_write_buffer_size()
        self._unread = None
        if not size or self.transport.get_protocol() is not self:  # it became a WebSocket
            return
        streams = self._is_answering and self.answering.response_started
        if size >= before and not streams:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(UNREAD_S, self._look_at_unread, size)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head, self._tail = True, 0, b""

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest("this is not an HTTP/1.1 request", code="validation_error"))

    @property
    def _is_answering(self) -> bool:
        return self.answering is not None and not self.answering.response_complete

    @property
    def _refused(self) -> bool:
        return self._place is not None and self._place.refused

    def _refuse_if_still_in_head(self, data: bytes) -> bool:
        """Refuse a head over the limit. A body in the same packet does not count as head."""
        end = (self._tail + data).find(b"\r\n\r\n")
        if end >= 0 and self._head - len(data) + end <= HEAD_MAX:
            return False
        self._refuse(
            BadRequest(
                f"the head of a request takes more than {HEAD_MAX} bytes", code="headers_too_large"
            )
        )
        return True

    def _expect_head(self) -> None:
        """Start the time-out of the head with the connection, so that a silent client does not
        occupy a place indefinitely."""
        seconds = FULL_S if self._refused else HEAD_S
        self._late = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_here(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        self._late = None
        if self._refused:
            self._refuse(too_many_connections())
            return
        self._refuse(
            BadRequest(
                f"the head of a request takes more than {HEAD_S:g} s", code="request_timeout"
            )
        )

    def _refuse(self, error: SbxError) -> None:
        """Answer, unless a reply is being written that this would garble; then close."""
        if self.transport.is_closing():
            return
        is_last = self.cycle is not None and self.cycle is self.answering
        if is_last and not self._in_head and not self.cycle.response_started:
            # It is the body of this very request that is wrong, so this is the reply to it.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.cycle.response_complete = True
        if self.cycle is None or self.cycle.response_complete:
            request_id = str(uuid.uuid4())
            reply = error_response(error, request_id)
            reply.headers["x-request-id"] = request_id
            reply.headers["connection"] = "close"
            head = b"".join(b"%s: %s\r\n" % header for header in reply.raw_headers)
            self.transport.write(
                b"%s%s\r\n%s" % (STATUS_LINE[reply.status_code], head, bytes(reply.body))
            )
        self.transport.close()
