"""One WebSocket connection: uvicorn's protocol over the library websockets, with additions.

The scope has the user behind a Unix socket, like that of a request. Messages are bounded and not
compressed (a small message could become a large one). A client that does not answer a ping is cut
off at once. An invalid head gets a reply. A connection is closed soon after its end: a client that
reads nothing would hold it indefinitely.
"""

import asyncio
import logging
import uuid
from asyncio.transports import BaseTransport
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.server import ServerProtocol

from sbx.aio import SmallReads
from sbx.api.admission import PLACE, AdmissionPlace
from sbx.api.errors import error_response
from sbx.api.server.peer_credentials import PEER, peer_of
from sbx.errors import BadRequest
from sbx.protocol.terminals import MESSAGE_MAX, PING_S

_FRAGMENTS_MAX = 1000
_UNREAD_MAX = 16 << 20  # bytes; several large messages may wait for a slow client
_CLOSE_S = 15.0  # from the end of the app to that of the connection; uvicorn waits 10


class WebSocketProtocol(WebSocketsSansIOProtocol):
    def __init__(self, place: AdmissionPlace, *args: Any, **options: Any) -> None:
        """Take over the place of the connection, and release it at the end."""
        super().__init__(*args, **options)
        self._place = place
        self.conn = ServerProtocol(max_size=MESSAGE_MAX, logger=logging.getLogger("uvicorn.error"))
        self.ping_interval = self.ping_timeout = PING_S
        self._peer: dict[str, int] | None = None
        self._reads_little = False

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._peer = peer_of(cast("asyncio.Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data. The first call has the whole head, which was parsed already."""
        if not self._reads_little:  # uvicorn sets this protocol after the call
            self._reads_little = True
            self.loop.call_soon(self.transport.set_protocol, SmallReads(self))
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self._refuse()

    def _refuse(self) -> None:
        request_id = str(uuid.uuid4())
        reply = error_response(
            BadRequest(
                "the head of this request is not that of a WebSocket",
                code="validation_error",
                hint="send no body, and no line of more than 8 KiB",
            ),
            request_id,
        )
        lines = (b"%s: %s\r\n" % header for header in reply.raw_headers)
        head = b"HTTP/1.1 400 Bad Request\r\nx-request-id: %s\r\nconnection: close\r\n%s\r\n" % (
            request_id.encode("ascii"),
            b"".join(lines),
        )
        self.transport.write(head + bytes(reply.body))
        self.transport.close()

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.loop.call_later(_CLOSE_S, self.transport.abort)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.close_sent:
            return
        extensions = cast("dict[str, Any]", self.scope["extensions"])
        extensions[PLACE] = self._place  # the app is called in the next iteration of the loop
        if self._peer is not None:
            extensions[PEER] = self._peer

    def handle_cont(self, event: Frame) -> None:
        """Keep few fragments of a message: millions of empty ones are not bounded by its size."""
        if len(self.frames) >= _FRAGMENTS_MAX:
            self.frames = [b"".join(self.frames)]
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer, unless the client does not read the answers to its pings."""
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _UNREAD_MAX:
            self.disconnected = True
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """Close by 1007 for text that is not UTF-8. uvicorn does so too, but logs it as an error:
        any attached client could flood the log."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # else uvicorn would log a refusal as a missing reply

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self.disconnected = True  # else `send` would raise RuntimeError, as for a bug of the app

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.disconnected = True
        self.transport.abort()  # `close` would wait until the client reads the rest
