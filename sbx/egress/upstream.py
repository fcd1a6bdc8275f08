"""A connection of the proxy to a host outside, which several requests can use."""

import asyncio
import socket
import ssl

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from sbx.egress import http_heads
from sbx.egress.denials import EgressDenied
from sbx.egress.stream import ByteCounter, ProxyStream


class Upstream:
    """An open connection to `host`, at an address that the rules of the policy allow."""

    def __init__(self, host: str, port: int, sock: socket.socket, meter: ByteCounter) -> None:
        self.host = host
        self.port = port
        self.secure = False
        self.address = str(sock.getpeername()[0])
        self.wire = ProxyStream(sock, meter=meter)
        self.stream: ByteStream = self.wire
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=http_heads.HEAD_MAX)

    async def begin_tls(self, context: ssl.SSLContext, seconds: float) -> None:
        """Begin TLS, and check the certificate of the host. Raise EgressDenied."""
        try:
            async with asyncio.timeout(seconds):
                self.stream = await TLSStream.wrap(
                    self.wire,
                    server_side=False,
                    hostname=self.host,
                    ssl_context=context,
                    standard_compatible=False,
                )
        except ssl.SSLCertVerificationError as error:
            raise EgressDenied(
                "outside", f"the certificate of {self.host} is not valid: {error.verify_message}"
            ) from None
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            raise EgressDenied("outside", f"TLS with {self.host} did not begin") from None
        self.secure = True

    def can_serve(self, host: str, port: int, *, secure: bool) -> bool:
        """Return whether the connection can take another request for this host. If so, prepare
        it."""
        if (host, port, secure) != (self.host, self.port, self.secure):
            return False
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        if self.http.trailing_data[0] or not self.wire.quiet():
            return False  # the host sent bytes without a request, or closed the connection
        self.http.start_next_cycle()
        return True
