"""Heads of HTTP messages: read whole and within bounds, refused when they could be read otherwise.

h11 parses them. What is checked here beforehand is where programs differ: a server that takes a
bare line feed for the end of a line, or Content-Length where another takes Transfer-Encoding, sees
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
_LINES_MAX = 256  # each is parsed and searched by itself; servers take some hundred
_END = b"\r\n\r\n"
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0|\r\n[ \t]|\A\r\n")
_ABSOLUTE = re.compile(r"http://([^/?#]+)([/?][^#]*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"/[^#]*")
_PORTS = {"http": 80, "https": 443}

# Of one connection, not of the request; `upgrade` is judged before it is left out.
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"http2-settings", b"keep-alive", b"proxy-authenticate"),
        *(b"proxy-authentication-info", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
# By them some servers take another method or path than the one that was judged.
_OVERRIDES = frozenset(
    {
        *(b"x-http-method", b"x-http-method-override", b"x-method-override"),
        *(b"x-original-url", b"x-rewrite-url"),
    }
)
_RANGES = frozenset({b"range", b"if-range", b"request-range"})


async def read_head(
    stream: ByteStream,
    left: bytes,
    *,
    idle_s: float,
    head_s: float,
    turn: Callable[[], Awaitable[None]],
) -> tuple[h11.Connection, h11.Request] | None:
    """The next request, `left` being read already; None when there is none. Raises Refused, Gone.

    Each has a parser of its own, whose `trailing_data` is `left` for the next.
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
        raise HostGone("whoever asked went away") from None
    await turn()  # one of 64 KiB takes some milliseconds, from here until it is judged
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
        raise EgressDenied("http", "this is no request of HTTP/1.1") from None
    if not isinstance(request, h11.Request):
        raise EgressDenied("http", "this is no request of HTTP/1.1")
    _check_framing(request)
    return http, request


async def _until_the_end(stream: ByteStream, read: bytearray) -> int:
    start = 0
    while (found := read.find(_END, start)) < 0:
        if len(read) > HEAD_MAX:
            break
        start = max(0, len(read) - len(_END) + 1)
        await asyncio.sleep(0)  # a record of TLS may be a byte
        read += await stream.receive()
    if found < 0 or found > HEAD_MAX:
        raise EgressDenied(
            "http.head_size", f"the head of a request has more than {HEAD_MAX} bytes"
        )
    return found + len(_END)


def _check_framing(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    coded = b"transfer-encoding" in names
    if request.http_version not in (b"1.0", b"1.1"):
        raise EgressDenied("http", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    if coded and b"content-length" in names:
        raise EgressDenied("http", "the request has both Content-Length and Transfer-Encoding")
    if coded and request.http_version == b"1.0":
        raise EgressDenied("http", "HTTP/1.0 has no Transfer-Encoding")
    if names.count(b"host") > 1:
        raise EgressDenied("http", "the request has more than one Host")
    if request.method == b"CONNECT" and (coded or b"content-length" in names):
        raise EgressDenied("http", "a CONNECT has no body")
    if request.method == b"TRACE":
        raise EgressDenied("http", "TRACE would send back what the proxy adds")


def asked_of(request: h11.Request, within: ProxyRequest | None) -> ProxyRequest:
    """What a request asks for: of a proxy, or `within` the TLS that a CONNECT asked for. Raises
    Refused, also when its Host says something else."""
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
                raise EgressDenied("http", "within TLS a request asks for a path")
            scheme, host, port, path = "https", within.host, within.port, target
        named = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if named and authority(named[0], _PORTS[scheme]) != (host, port):
            raise EgressDenied(
                "http.host",
                f"the request is for {host} at port {port}, and its Host says otherwise",
            )
    except NoHost as error:
        raise EgressDenied("http.host", f"the host of the request is none: {error}") from None
    return ProxyRequest(method, host, port, path)


def _absolute(target: str) -> tuple[str, int, str]:
    if target[:8].lower() == "https://":
        raise EgressDenied("http", "https goes through this proxy by CONNECT")
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise EgressDenied("http", "a proxy is asked for http://host/path, or by CONNECT host:port")
    path = found[2] or "/"
    return *authority(found[1], _PORTS["http"]), path if path.startswith("/") else f"/{path}"


def upgrades(request: h11.Request) -> bool:
    """Whether it wants to speak something else than HTTP. An offer of HTTP/2 can be overheard."""
    wanted = b",".join(value for name, value in request.headers if name == b"upgrade")
    return any(word.strip().lower() not in (b"", b"h2c") for word in wanted.split(b","))


def end_to_end(headers: Headers) -> Headers:
    """Those that are for the other end."""
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
    """A value that is echoed in two halves, in two replies, would be found in neither: also where
    it was used before, and is only shown to whoever asks now."""
    return without(headers, *_RANGES)


def has(message: h11.Request | h11.Response, name: bytes) -> bool:
    return any(known == name for known, _ in message.headers)
