"""One WebSocket connection: uvicorn's protocol over the library websockets, with what it leaves.

The user behind a Unix socket is put into the scope as for a request. Messages are bounded and not
compressed (a small one could become a large one), and who answers no ping is cut off at once. A
head that the library does not take is answered, and a connection goes soon after what it was for:
whoever reads nothing would hold it for ever.
"""

import asyncio
import logging
import uuid
from asyncio.transports import BaseTransport
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from sbx.api.admission import PLACE, AdmissionPlace
from sbx.api.errors import error_response
from sbx.api.server.peer_credentials import PEER, peer_of
from sbx.errors import BadRequest
from sbx.protocol.terminals import MESSAGE_MAX, PING_S

_GONE_S = 15.0  # from the end of what was told to that of the connection; uvicorn's own wait is 10


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """See the module."""

    def __init__(self, place: AdmissionPlace, *given: Any, **named: Any) -> None:
        """`place`: of the connection, which this protocol gives back."""
        super().__init__(*given, **named)
        self._place = place
        self.conn = ServerProtocol(max_size=MESSAGE_MAX, logger=logging.getLogger("uvicorn.error"))
        self.ping_interval = self.ping_timeout = PING_S
        self._peer: dict[str, int] | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._peer = peer_of(cast("asyncio.Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The first time it is all of the head, as it was parsed already."""
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self._refuse()

    def _refuse(self) -> None:
        request_id = str(uuid.uuid4())
        reply = error_response(
            BadRequest(
                "the head of this request is none of a WebSocket",
                code="validation_error",
                hint="it has no body, and no line of more than 8 KiB",
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
            self.loop.call_later(_GONE_S, self.transport.abort)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.close_sent:
            return
        extensions = cast("dict[str, Any]", self.scope["extensions"])
        extensions[PLACE] = self._place  # the app is called after this turn
        if self._peer is not None:
            extensions[PEER] = self._peer

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
            self.handshake_complete = True  # by a refusal, which uvicorn would log as no answer

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # to close it would wait for what this client does not read
