"""The server that the first message of TLS names, read by OpenSSL and by nothing else.

A server's side of TLS is begun with what has come so far, until OpenSSL has read the message and
asks us about the name. There it is ended; it had no key to go on with.
"""

import ssl

import anyio

from sbx.egress.rules import ClientHello
from sbx.egress.stream import ProxyStream

HELLO_MAX = 32 * 1024  # with keys of post-quantum exchanges it takes some 2 KiB
_RECORD_MAX = 16 * 1024


class NotTls(Exception):
    """What came is not the beginning of TLS."""


async def read_hello(wire: ProxyStream) -> tuple[ClientHello, bytes]:
    """What it says, and the bytes it came in: all that were read. Raises NoHello."""
    names: list[str | None] = []

    def stop(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int:
        names.append(name)
        return ssl.ALERT_DESCRIPTION_ACCESS_DENIED

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = stop
    came = ssl.MemoryBIO()
    beginning = context.wrap_bio(came, ssl.MemoryBIO(), server_side=True)
    read = b""
    while len(read) < HELLO_MAX:
        try:
            piece = await wire.receive(_RECORD_MAX)
        except anyio.EndOfStream:
            raise NotTls("it ended before TLS began") from None
        read += piece
        came.write(piece)
        try:
            beginning.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            if names:
                return ClientHello(names[0]), read
            break
    raise NotTls("what came is not the beginning of TLS 1.2 or later")


async def deny(wire: ProxyStream) -> None:
    """What TLS says where HTTP would say 403: the alert `access_denied`."""
    await wire.send(b"\x15\x03\x03\x00\x02\x02" + bytes([ssl.ALERT_DESCRIPTION_ACCESS_DENIED]))
