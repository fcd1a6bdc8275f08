"""HTTP and WebSockets to a server that code started inside a sandbox.

    client ──► this service ──► a socket that the host opened on the loopback of the jail

The reply is hostile. A page in it has the origin of this service, so the reply gets a policy
(CSP `sandbox`) under which its scripts have another origin, without cookies and without access to
this API. No cookie and no credential of the client goes inside, and none comes out.

The name `{port}-{sandbox}.localhost` is an origin for one port (`own_origin`). A page there is
not restricted, and its cookies are its own; the link is in one of them.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, cast
from urllib.parse import quote, unquote_plus

import h11
from fastapi import Request, Response, WebSocket
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from sbx.aio import SmallReads
from sbx.api.auth import authenticate
from sbx.api.surfaces import E2B_SANDBOX, LINK_HEADER, LINK_QUERY, OWN_ORIGIN, TRAFFIC_HEADER
from sbx.egress.http_heads import INTERIM_MAX, joined, next_event
from sbx.errors import BadRequest, Unavailable
from sbx.protocol.terminals import MESSAGE_MAX
from sbx.runtime.conversation import Conversation

_PATH_SAFE = "/!$&'()*+,;=:@"
_PIECE = 64 << 10
_HEAD_S = 60.0  # for the head of a reply, once the request was sent
_IDLE_S = 600.0  # between two pieces of a reply
_CHECK_S = 5.0  # between two checks of the caller of a WebSocket
_STATUS_END = 600  # RFC 9110, 15: a client takes no other status
_NO_BODY = (204, 304)
_SEND_S = 60.0  # for the server inside to take one piece of a request
_SANDBOX = "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"host"}
)  # fmt: skip
_CREDENTIALS = frozenset(
    {b"authorization", b"cookie", b"open-sandbox-api-key", b"x-api-key", b"x-access-token",
     LINK_HEADER.encode(), TRAFFIC_HEADER.encode(), E2B_SANDBOX.encode(), b"e2b-sandbox-port"}
)  # fmt: skip
_NOT_BACK = frozenset(
    {b"set-cookie", b"content-security-policy", b"strict-transport-security",
     b"clear-site-data", b"service-worker-allowed", b"alt-svc", b"date", b"server",
     # A browser keeps these for the whole origin: reports of all its requests to a third party,
     # credentials that a user types, the state of a login, further headers of each request.
     b"nel", b"report-to", b"reporting-endpoints", b"www-authenticate", b"set-login",
     b"secure-session-registration", b"sec-session-registration", b"accept-ch", b"critical-ch",
     b"origin-agent-cluster", b"use-as-dictionary", b"public-key-pins", b"expect-ct",
     b"set-cookie2"}
)  # fmt: skip


async def relay_http(
    request: Request, conversation: Conversation, port: int, path: str
) -> Response:
    """Send the request to the server at this port inside, and return its reply.

    Raise Unavailable `port_not_open` for a port without a server, and for one that does not speak
    HTTP. A browser that opens a page by its link gets a redirect to the address without the link.
    """
    if (page := _opened_page(request, path)) is not None:
        return page
    connection = await conversation.connect(port)
    reader, writer = await asyncio.open_connection(sock=connection)
    exchange = _Exchange(reader, writer, port)
    try:
        await exchange.send(request, _target(request, path))
        head = await exchange.head()
    except BaseException:
        writer.close()
        raise
    return _Relayed(exchange, head, request)


class _Exchange:
    """One request and its reply, on a separate connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._port = port
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, request: Request, target: str) -> None:
        dropped = _HOP_BY_HOP | _CREDENTIALS
        headers = [
            (name, _linkless(value) if name == b"referer" else value)
            for name, value in request.scope["headers"]
            if name not in dropped
        ]
        headers += [
            (b"host", f"localhost:{self._port}".encode()),
            (b"connection", b"close"),
            (b"x-forwarded-proto", request.url.scheme.encode()),
        ]
        if is_own_origin(request) and (cookies := _own_cookies(request)):
            headers.append((b"cookie", cookies))
        chunked = "transfer-encoding" in request.headers
        if chunked:
            headers = [each for each in headers if each[0] != b"content-length"]
            headers.append((b"transfer-encoding", b"chunked"))
        with _speaks_http(self._port):
            await self._write(
                h11.Request(method=request.method, target=target.encode(), headers=headers)
            )
            async for piece in request.stream():
                if piece:
                    await self._write(h11.Data(data=piece))
            await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            async with asyncio.timeout(_SEND_S):
                await self._writer.drain()

    async def head(self) -> h11.Response:
        with _speaks_http(self._port):
            async with asyncio.timeout(_HEAD_S):
                for _ in range(INTERIM_MAX):
                    event = await self._event()
                    if isinstance(event, h11.Response) and event.status_code < _STATUS_END:
                        return event
                    if not isinstance(event, h11.InformationalResponse):
                        break
        raise _no_http(self._port)

    async def body(self) -> AsyncIterator[bytes]:
        event: object = h11.NEED_DATA
        while event is h11.NEED_DATA or isinstance(event, h11.Data):
            if event is h11.NEED_DATA:
                async with asyncio.timeout(_IDLE_S):
                    event = await self._event()
            data, event = joined(self._http, event)
            if data:
                yield data
                await asyncio.sleep(0)

    async def _event(self) -> Any:
        return await next_event(self._http, lambda: self._reader.read(_PIECE))

    def close(self) -> None:
        self._writer.close()


class _Relayed(Response):
    """The reply of a server inside. If it breaks off, the connection to the client is cut."""

    def __init__(self, exchange: _Exchange, head: h11.Response, request: Request) -> None:
        super().__init__(None, head.status_code)
        self._exchange = exchange
        self._request = request
        dropped = _HOP_BY_HOP | (frozenset() if is_own_origin(request) else _NOT_BACK)
        if head.status_code in _NO_BODY:  # no bytes follow, whatever their number is
            dropped |= {b"content-length"}
        headers = [(name, value) for name, value in head.headers if name not in dropped]
        if not is_own_origin(request):
            headers.append((b"content-security-policy", _SANDBOX.encode()))
            headers.append((b"x-content-type-options", b"nosniff"))
        elif (link := request.query_params.get(LINK_QUERY)) is not None:
            headers.append((b"set-cookie", _cookie(link)))
            headers.append((b"referrer-policy", b"same-origin"))  # the address has the link
        self.raw_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            await while_allowed(self._request, self._send_body(send))
        except (h11.RemoteProtocolError, OSError) as error:
            message = "the server inside broke off its reply"
            raise Unavailable(message, code="port_not_open") from error
        finally:
            self._exchange.close()

    async def _send_body(self, send: Send) -> None:
        async with contextlib.aclosing(self._exchange.body()) as pieces:  # type: ignore[type-var]  # it is a generator
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def relay_websocket(
    client: WebSocket, conversation: Conversation, port: int, path: str
) -> None:
    """Relay a WebSocket to the server at this port inside, until one side closes it.

    Raise Unavailable `port_not_open` before the client is accepted.
    """
    connection = await conversation.connect(port)
    inner = await _opened(client, connection, port, _target(client, path))
    try:
        await client.accept(subprotocol=inner.subprotocol)
        tasks = {
            asyncio.create_task(_from_client(client, inner)),
            asyncio.create_task(_to_client(client, inner)),
            asyncio.create_task(_check_caller(client)),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await inner.close()
        with contextlib.suppress(RuntimeError):  # the client has closed it already
            await client.close()


async def relay_bytes(client: WebSocket, conversation: Conversation, port: int) -> None:
    """Relay one TCP connection to this port inside: each binary message has its next bytes, and an
    empty one is the end of one direction.

    Raise Unavailable `port_not_open` before the client is accepted.
    """
    connection = await conversation.connect(port)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await client.accept()
        await while_allowed(client, _both_ways(client, reader, writer))
    finally:
        writer.close()
        with contextlib.suppress(RuntimeError):  # the client has closed it already
            await client.close()


async def _both_ways(
    client: WebSocket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await asyncio.gather(_bytes_in(client, writer), _bytes_out(client, reader))


async def while_allowed(client: HTTPConnection, work: Coroutine[Any, Any, None]) -> None:
    """Do the work until the caller loses its permission. Raise as both."""
    working = asyncio.create_task(work)
    checking = asyncio.create_task(_check_caller(client))
    try:
        await asyncio.wait({working, checking}, return_when=asyncio.FIRST_COMPLETED)
        (working if working.done() else checking).result()
    finally:
        for task in (working, checking):
            task.cancel()
        await asyncio.gather(working, checking, return_exceptions=True)


async def _bytes_in(client: WebSocket, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await _binary(client):
            writer.write(data)
            async with asyncio.timeout(_SEND_S):
                await writer.drain()
            await asyncio.sleep(0)  # no call waits while there are messages
        writer.write_eof()


async def _binary(client: WebSocket) -> bytes:
    try:
        return await client.receive_bytes()
    except KeyError:
        raise BadRequest("a tunnel takes binary messages only", code="not_a_message") from None


async def _bytes_out(client: WebSocket, reader: asyncio.StreamReader) -> None:
    data = b"-"
    while data:
        data = b""
        with contextlib.suppress(OSError):
            data = await reader.read(_PIECE)
        async with asyncio.timeout(_SEND_S):
            await client.send_bytes(data)
        await asyncio.sleep(0)


class _Inner(ClientConnection):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).set_protocol(SmallReads(self))
        super().connection_made(transport)


async def _opened(
    client: WebSocket, connection: socket.socket, port: int, target: str
) -> ClientConnection:
    offered: Iterable[str] = client.scope.get("subprotocols") or ()
    try:
        return await connect_websocket(
            f"ws://localhost:{port}{target}",
            sock=connection,
            subprotocols=list(offered) or None,  # type: ignore[arg-type]  # a NewType of str
            compression=None,
            max_size=MESSAGE_MAX,
            open_timeout=_HEAD_S,
            proxy=None,
            create_connection=_Inner,
        )
    except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
        connection.close()
        raise _no_http(port) from error


async def _from_client(client: WebSocket, inner: ClientConnection) -> None:
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            return
        text, data = message.get("text"), message.get("bytes")
        await inner.send(text if text is not None else data or b"")
        await asyncio.sleep(0)  # neither call waits while there are messages


async def _check_caller(client: HTTPConnection) -> None:
    """Raise Denied once the key is revoked, or the token or the link has ended."""
    while True:
        await asyncio.sleep(_CHECK_S)
        await authenticate(client)


async def _to_client(client: WebSocket, inner: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed, WebSocketDisconnect):
        async for message in inner:
            async with asyncio.timeout(_SEND_S):
                if isinstance(message, str):
                    await client.send_text(message)
                else:
                    await client.send_bytes(message)
            await asyncio.sleep(0)


def is_own_origin(request: HTTPConnection) -> bool:
    return bool(request.scope.get(OWN_ORIGIN))


def _own_cookies(request: HTTPConnection) -> bytes:
    """Return the cookies of the page, without the link."""
    texts = [value for name, value in request.scope["headers"] if name == b"cookie"]
    pairs = (each.strip() for text in texts for each in text.split(b";"))
    return b"; ".join(each for each in pairs if not each.startswith(f"{LINK_QUERY}=".encode()))


def _target(request: HTTPConnection, path: str) -> str:
    address = quote(path, safe=_PATH_SAFE).encode()
    return _linkless(address + b"?" + request.scope["query_string"]).decode("latin-1")


def _linkless(address: bytes) -> bytes:
    """Return an address without the link: it is not for the code inside."""
    path, _, query = address.partition(b"?")
    kept = b"&".join(each for each in query.split(b"&") if each and not _is_link(each))
    return path + b"?" + kept if kept else path


def _is_link(parameter: bytes) -> bool:
    return unquote_plus(parameter.partition(b"=")[0].decode("latin-1")) == LINK_QUERY


def _cookie(link: str) -> bytes:
    return f"{LINK_QUERY}={link}; Path=/; HttpOnly; SameSite=Lax".encode("latin-1", "replace")


def _opened_page(request: Request, path: str) -> Response | None:
    """Return the redirect for a browser that opens a page by its link; None for any other request.

    A script of the page reads its own address, and the browser sends it as `Referer`. A program may
    have no cookies, and a frame of another site sends none, so both get the page at this address.
    """
    if not is_own_origin(request) or (link := request.query_params.get(LINK_QUERY)) is None:
        return None
    headers = request.headers
    opens = request.method in ("GET", "HEAD") and "text/html" in headers.get("accept", "")
    if not opens or headers.get("sec-fetch-dest", "document") != "document":
        return None
    page = Response(None, 303, {"cache-control": "no-store", "referrer-policy": "no-referrer"})
    target = _target(request, path)
    location = f"/.{target}" if target.startswith("//") else target  # else the name of a host
    page.raw_headers += [(b"set-cookie", _cookie(link)), (b"location", location.encode("latin-1"))]
    return page


@contextlib.contextmanager
def _speaks_http(port: int) -> Any:
    """Raise Unavailable for a server that breaks off or does not speak HTTP."""
    try:
        yield
    except (h11.ProtocolError, OSError, EOFError, TimeoutError) as error:
        raise _no_http(port) from error


def _no_http(port: int) -> Unavailable:
    return Unavailable(
        f"the server on port {port} inside did not answer as HTTP does",
        code="port_not_open",
        hint="look at its log in the sandbox",
    )
