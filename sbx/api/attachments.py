"""One WebSocket connection: uvicorn's protocol over the library websockets, with what it leaves.

The user behind a Unix socket is put into the scope as for a request. Messages are bounded and not
compressed (a small one could become a large one), and who answers no ping is cut off at once.
"""

import asyncio
import logging
from asyncio.transports import BaseTransport
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.server import ServerProtocol

from sbx.api.peers import PEER, peer_of
from sbx.protocol.terminals import MESSAGE_MAX, PING_S


class Attachment(WebSocketsSansIOProtocol):
    """See the module."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = ServerProtocol(max_size=MESSAGE_MAX, logger=logging.getLogger("uvicorn.error"))
        self.ping_interval = self.ping_timeout = PING_S
        self._peer: dict[str, int] | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._peer = peer_of(cast("asyncio.Transport", transport))

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self._peer is not None and not self.close_sent:  # the app is called after this turn
            cast("dict[str, Any]", self.scope["extensions"])[PEER] = self._peer

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # by a refusal, which uvicorn would log as no answer

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # to close it would wait for what this client does not read
