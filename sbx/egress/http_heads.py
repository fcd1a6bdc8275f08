"""Heads of HTTP messages: read whole and within bounds, refused if they could be read in two ways.

h11 parses them. This module first checks the points on which programs differ: a server that treats
a bare line feed as the end of a line, or prefers Content-Length over Transfer-Encoding, sees
another request than we judged (request smuggling).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable

import anyio
import h11
from anyio.abc import ByteStream

from sbx.egress.denials import EgressDenied, HostGone
from sbx.egress.hosts import NoHost, authority
from sbx.egress.rules import ProxyRequest
from sbx.egress.secrets import Headers

HEAD_MAX = 64 * 1024
INTERIM_MAX = 16  # replies 1xx before the one that counts
_JOINED_MAX = 64  # chunks; 1 ms of the event loop
_LINES_MAX = 256  # each is parsed and searched separately; servers accept some hundred
_END = b"\r\n\r\n"
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0|\r\n[ \t]|\A\r\n")
_ABSOLUTE = re.compile(r"http://([^/?#]+)([/?][^#]*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"/[^#]*")
_PORTS = {"http": 80, "https": 443}

# These belong to one connection, not to the request; `upgrade` is judged before it is removed.
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"http2-settings", b"keep-alive", b"proxy-authenticate"),
        *(b"proxy-authentication-info", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
# Some servers use the method or path in these instead of those that were judged.
_OVERRIDES = frozenset(
    {
        *(b"x-http-method", b"x-http-method-override", b"x-method-override"),
        *(b"x-original-url", b"x-rewrite-url"),
    }
)
_RANGES = frozenset({b"range", b"if-range", b"request-range"})


async def next_event(
    http: h11.Connection, receive: Callable[[], Awaitable[bytes]]
) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
    """Return the next event of a message from a peer that may be hostile. `receive` returns no
    bytes at the end.

    Let other tasks run before each event: the bytes may be there already, and a chunk or an interim
    reply may be a few bytes. All code that reads such messages calls this.
    """
    await asyncio.sleep(0)
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await receive())
        await asyncio.sleep(0)
    return event


def joined(http: h11.Connection, event: object) -> tuple[bytes, object]:
    """Return the chunks that have arrived as one piece, because each piece costs the same, and the
    event after them."""
    chunks = list[bytes]()
    while isinstance(event, h11.Data) and len(chunks) < _JOINED_MAX:
        chunks.append(bytes(event.data))
        event = http.next_event()
    return b"".join(chunks), event


async def read_head(
    stream: ByteStream,
    left: bytes,
    *,
    idle_s: float,
    head_s: float,
    turn: Callable[[], Awaitable[None]],
) -> tuple[h11.Connection, h11.Request] | None:
    """Return the next request with its parser; None at the end. Raise EgressDenied and HostGone.

    `left` are bytes that were read already: the `trailing_data` of the parser before.
    """
    read = bytearray(left)
    try:
        if not read:
            async with asyncio.timeout(idle_s):
                read += await stream.receive()
        async with asyncio.timeout(head_s):
            end = await _until_the_end(stream, read)
    except TimeoutError:
        if not read:
            return None
        raise EgressDenied(
            "http.head_time", f"the head of a request takes more than {head_s:g} s"
        ) from None
    except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
        if not read:
            return None
        raise HostGone("the client went away") from None
    await turn()  # 64 KiB take some milliseconds, from here until they are judged
    if read.count(b"\n", 0, end) > _LINES_MAX:
        raise EgressDenied(
            "http.head_size", f"the head of a request has more than {_LINES_MAX} lines"
        )
    if _AMBIGUOUS.search(read, 0, end):
        raise EgressDenied("http", "the head has a bare CR or LF, a NUL, or a folded line")
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
    http.receive_data(bytes(read))
    try:
        request = http.next_event()
    except h11.RemoteProtocolError:
        raise EgressDenied("http", "this is not a request of HTTP/1.1") from None
    if not isinstance(request, h11.Request):
        raise EgressDenied("http", "this is not a request of HTTP/1.1")
    _check_framing(request)
    return http, request


async def _until_the_end(stream: ByteStream, read: bytearray) -> int:
    start = 0
    while (end := read.find(_END, start)) < 0:
        if len(read) > HEAD_MAX:
            break
        start = max(0, len(read) - len(_END) + 1)
        await asyncio.sleep(0)  # a record of TLS may be a byte
        read += await stream.receive()
    if end < 0 or end > HEAD_MAX:
        raise EgressDenied(
            "http.head_size", f"the head of a request has more than {HEAD_MAX} bytes"
        )
    return end + len(_END)


def _check_framing(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    coded = b"transfer-encoding" in names
    if request.http_version not in (b"1.0", b"1.1"):
        raise EgressDenied("http", "only HTTP/1.0 and HTTP/1.1 are supported")
    if coded and b"content-length" in names:
        raise EgressDenied("http", "the request has both Content-Length and Transfer-Encoding")
    if coded and request.http_version == b"1.0":
        raise EgressDenied("http", "HTTP/1.0 has no Transfer-Encoding")
    if names.count(b"host") > 1:
        raise EgressDenied("http", "the request has more than one Host")
    if request.method == b"CONNECT" and (coded or b"content-length" in names):
        raise EgressDenied("http", "a CONNECT has no body")
    if request.method == b"TRACE":
        raise EgressDenied("http", "TRACE would return the secrets that the proxy adds")


def parse_request(request: h11.Request, within: ProxyRequest | None) -> ProxyRequest:
    """Return the request to judge: sent to the proxy, or `within` the TLS of a CONNECT. Raise
    EgressDenied, also if its Host header differs."""
    method, target = request.method.decode("ascii"), request.target.decode("ascii")
    try:
        if method == "CONNECT":
            if within is not None:
                raise EgressDenied("http", "there is no CONNECT within a CONNECT")
            return ProxyRequest(method, *authority(target))
        if within is None:
            scheme, host, port, path = "http", *_absolute(target)
        else:
            if not _ORIGIN.fullmatch(target):
                raise EgressDenied("http", "within TLS the target of a request is a path")
            scheme, host, port, path = "https", within.host, within.port, target
        named = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if named and authority(named[0], _PORTS[scheme]) != (host, port):
            raise EgressDenied(
                "http.host",
                f"the request is for {host} at port {port}, but its Host header differs",
            )
    except NoHost as error:
        raise EgressDenied("http.host", f"the host of the request is invalid: {error}") from None
    return ProxyRequest(method, host, port, path)


def _absolute(target: str) -> tuple[str, int, str]:
    if target[:8].lower() == "https://":
        raise EgressDenied("http", "https goes through this proxy by CONNECT")
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise EgressDenied(
            "http", "the target of a request to a proxy is http://host/path, or CONNECT host:port"
        )
    path = match[2] or "/"
    return *authority(match[1], _PORTS["http"]), path if path.startswith("/") else f"/{path}"


def upgrades(request: h11.Request) -> bool:
    """Return whether the request asks for another protocol. An offer of HTTP/2 can be ignored."""
    protocols = b",".join(value for name, value in request.headers if name == b"upgrade")
    return any(word.strip().lower() not in (b"", b"h2c") for word in protocols.split(b","))


def end_to_end(headers: Headers) -> Headers:
    nominated = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.split(b",")
    }
    gone = (_HOP_BY_HOP | nominated) - {b"host", b"content-length"}
    return without(headers, *gone)


def without(headers: Headers, *names: bytes) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in names]


def without_overrides(headers: Headers) -> Headers:
    return without(headers, *_OVERRIDES)


def without_ranges(headers: Headers) -> Headers:
    """Remove ranges: of a value that a server echoes in two halves, in two replies, neither half
    would be found."""
    return without(headers, *_RANGES)


def has(message: h11.Request | h11.Response, name: bytes) -> bool:
    return any(header == name for header, _ in message.headers)
