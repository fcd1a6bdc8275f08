"""One HTTP connection: uvicorn's httptools protocol, with what it leaves to others.

The user behind a Unix socket is put into `scope["extensions"]["sbx.peer"]`. A request's head is
bounded in bytes and in time, and what cannot be parsed is answered in the one shape of an error.
So is whoever comes when `limit_concurrency` connections are open already.
"""

import asyncio
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sbx.api.attachments import Attachment
from sbx.api.errors import error_response
from sbx.api.peers import PEER, peer_of
from sbx.errors import BadRequest, SbxError, Unavailable

HEAD_MAX = 64 * 1024
HEAD_S = 15.0
FULL_S = 1.0  # the same for who is one too many


class Connection(HttpToolsProtocol):
    """One connection, and the requests on it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's says 503 late
        self.ws_protocol_class = Attachment  # of a connection that becomes a WebSocket
        self._full = False
        self._extensions: dict[str, Any] = {}
        self._head = 0  # bytes of the head that is being read
        self._tail = b""  # … and its last ones: its end may come in two pieces
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and (full := len(self.connections) - self._most) > 0:
            self._full = True
            if full > self._most:  # not even waited for
                transport.abort()
                return
        self._extensions = {PEER: peer} if (peer := peer_of(transport)) is not None else {}
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._full:  # said no sooner: a reply to what was not sent yet may be lost
            self._refuse(_too_many())
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
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head, self._tail = True, 0, b""

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest("this is no HTTP/1.1 request", code="validation_error"))

    def _refuse_if_still_in_head(self, data: bytes) -> bool:
        """A body that came in one piece with its head is none of the head."""
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
        """From the first moment: who connects and says nothing does not hold a place for ever."""
        seconds = FULL_S if self._full else HEAD_S
        self._late = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_here(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        self._late = None
        if self._full:
            self._refuse(_too_many())
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
        if self.cycle is not None and not self._in_head and not self.cycle.response_started:
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


def _too_many() -> SbxError:
    return Unavailable(
        "too many connections are open",
        code="too_many_connections",
        hint="close connections that are not in use, and try again",
        details={"retry_after_s": 1},
    )
