"""One request and its reply, read and written again: nothing passes that h11 did not accept.

Both directions run at once, because a server may reply before it has read the whole request. The
request is searched for placeholders and honeytokens. In the reply of a host with secrets,
placeholders replace the values, and the proxy requests it in a coding that can be searched.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio
import h11
from anyio.abc import ByteStream

from sbx.egress.denials import EgressDenied, HostGone
from sbx.egress.hosts import written
from sbx.egress.http_heads import (
    INTERIM_MAX,
    end_to_end,
    has,
    next_event,
    without,
    without_overrides,
    without_ranges,
)
from sbx.egress.limits import ConnectionLimits, misplaced
from sbx.egress.rules import ProxyRequest, has_rules
from sbx.egress.secrets import Headers, PlaceholderScanner, SecretMisuse
from sbx.egress.stream import ProxyStream
from sbx.egress.upstream import Upstream
from sbx.egress.veil import Compressed, RedactingStream, Sniffer

_OVERLAP = 512  # bytes of a body that a honeytoken may lie across
_SEARCHED_AT_ONCE = 16 << 10  # bytes of a reply; the others wait that long
_PORT_OF_TLS = 443
_PORT_OF_HTTP = 80
_BODILESS = frozenset({204, 304})
_ARCHIVES = frozenset(
    f"application/{name}".encode()
    for name in (
        *("octet-stream", "gzip", "x-gzip", "tar+gzip", "x-tar", "x-gtar", "x-compressed-tar"),
        *("zstd", "x-bzip2", "x-xz", "vnd.docker.image.rootfs.diff.tar.gzip"),
        *("vnd.oci.image.layer.v1.tar+gzip", "vnd.oci.image.layer.v1.tar+zstd"),
    )
)


def outgoing_head(
    terms: ConnectionLimits, received: h11.Request, request: ProxyRequest, *, secure: bool
) -> h11.Request:
    """Return the head that is sent instead of `received`, with secrets in the place of
    placeholders.

    Raise EgressDenied for a placeholder that cannot be replaced.
    """
    default = _PORT_OF_TLS if secure else _PORT_OF_HTTP
    try:
        headers = terms.vault.filled(
            received.headers.raw_items(),
            request.host,
            secure=secure,
            granted=terms.granted_secrets,
        )
    except SecretMisuse as error:
        raise misplaced(error) from None
    headers = without(end_to_end(headers), b"host", b"expect")
    if has_rules(terms.network, request.host):
        headers = without_overrides(headers)
    if terms.vault.concerns(request.host):
        headers = [
            *without(without_ranges(headers), b"accept-encoding"),
            (b"Accept-Encoding", b"identity"),
        ]
    if has(received, b"transfer-encoding"):
        headers.append((b"Transfer-Encoding", b"chunked"))
    first: Headers = [(b"Host", written(request.host, request.port, default).encode())]
    path = request.path or "/"
    return h11.Request(method=received.method, target=path.encode(), headers=first + headers)


class Exchange:
    """`begun`: the first bytes of the reply were sent, so it is too late to refuse."""

    def __init__(
        self,
        terms: ConnectionLimits,
        inside: ByteStream,
        wire: ProxyStream,
        http: h11.Connection,
        upstream: Upstream,
        veil: RedactingStream | None,
    ) -> None:
        self._terms = terms
        self._inside = inside
        self._wire = wire  # below it, where it is TLS
        self._http = http
        self._upstream = upstream
        self._veil = veil
        self.begun = False

    async def run(self, request: h11.Request, head: h11.Request) -> bool:
        """Send `head` and the body of `request`, and return the reply to the client. Return whether
        another request may follow on this connection. Raise EgressDenied and HostGone."""
        self._method = request.method
        with _outside(self._upstream.host):
            await self._send_out(head)
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_body())
                watching = group.create_task(self._watch())
                await self._bring_reply()
                sending.cancel()
                watching.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    # -- out ---------------------------------------------------------------------------------------

    async def _send_body(self) -> None:
        scan = PlaceholderScanner(self._terms.vault, "the body of the request")
        tail = b""
        async for piece in self._body():
            try:
                scan.feed(piece)
            except SecretMisuse as error:
                raise misplaced(error) from None
            self._terms.trip("the body of the request", tail + piece)
            tail = (tail + piece)[-_OVERLAP:]
            if not await self._still_takes(h11.Data(piece)):
                return
        await self._still_takes(h11.EndOfMessage())

    async def _body(self) -> AsyncIterator[bytes]:
        """Yield the body of the request. Trailers are left out."""
        while True:
            with _inside():
                if self._http.they_are_waiting_for_100_continue:
                    await self._send_in(h11.InformationalResponse(status_code=100, headers=[]))
                async with asyncio.timeout(self._terms.patience.body):
                    event = await _next(self._http, self._inside)
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    async def _still_takes(self, event: h11.Event) -> bool:
        """Send the event. Return False if the host has closed: it may have replied before."""
        try:
            await self._send_out(event)
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            return False
        return True

    async def _watch(self) -> None:
        """Raise HostGone when the client has left, because a server may take minutes to reply. A
        client that has only finished its request looks the same, and gets some time."""
        seen = False
        while not (seen and self._wire.left()):
            seen = self._wire.left()
            await asyncio.sleep(self._terms.patience.left)
        raise HostGone("the client went away")

    async def _send_out(self, event: h11.Event) -> None:
        if data := self._upstream.http.send(event):
            await self._upstream.stream.send(data)

    # -- in ----------------------------------------------------------------------------------------

    async def _bring_reply(self) -> None:
        response = await self._response()
        bodiless = self._method == b"HEAD" or response.status_code in _BODILESS
        headers = end_to_end(response.headers.raw_items())
        if self._veil is not None:
            headers = self._veiled(self._veil, response, headers, bodiless)
        reason = response.reason if self._veil is None else self._veil.over(response.reason)
        body = self._searched(response)
        first = b"" if _is_stream(response) else await anext(body, b"")  # can still be refused
        with _inside():
            self.begun = True
            await self._send_in(
                h11.Response(status_code=response.status_code, headers=headers, reason=reason)
            )
        await self._pass_on(first)
        async for piece in body:
            await self._pass_on(piece)
        with _inside():
            await self._send_in(h11.EndOfMessage())

    async def _searched(self, response: h11.Response) -> AsyncIterator[bytes]:
        """Yield the body, with placeholders in the place of values. Raise EgressDenied."""
        veil = self._veil
        sniffer = None if veil is None or _is_archive(response) else Sniffer()
        last = False
        while not last:
            with _outside(self._upstream.host):
                event = await _next(self._upstream.http, self._upstream.stream)
            last = not isinstance(event, h11.Data)
            data = bytes(event.data) if isinstance(event, h11.Data) else b""
            try:
                data = data if sniffer is None else sniffer.feed(data, last=last)
            except Compressed:
                raise EgressDenied(
                    "secrets",
                    f"the reply of {self._upstream.host} is compressed without a declaration, "
                    "so it cannot be searched for secrets",
                ) from None
            if veil is None:
                yield data
                continue
            for at in range(0, len(data), _SEARCHED_AT_ONCE):
                yield veil.feed(data[at : at + _SEARCHED_AT_ONCE])
                await asyncio.sleep(0)  # a host that sends values only takes 1 ms for 1 KiB
            if last:
                yield veil.end()

    async def _response(self) -> h11.Response:
        with _outside(self._upstream.host):
            for _ in range(INTERIM_MAX):
                event = await _next(self._upstream.http, self._upstream.stream)
                if isinstance(event, h11.InformationalResponse):
                    continue
                if not isinstance(event, h11.Response):
                    break
                if has(event, b"transfer-encoding") and has(event, b"content-length"):
                    raise EgressDenied(
                        "outside",
                        f"{self._upstream.host} declares the length of its reply in two ways",
                    )
                return event
        raise EgressDenied("outside", f"the reply of {self._upstream.host} is not HTTP")

    def _veiled(
        self, veil: RedactingStream, response: h11.Response, headers: Headers, bodiless: bool
    ) -> Headers:
        coded = [value for name, value in response.headers if name == b"content-encoding"]
        if not bodiless:
            if any(value.strip().lower() not in (b"", b"identity") for value in coded):
                raise EgressDenied(
                    "secrets",
                    f"{self._upstream.host} replies in a coding that was not requested and cannot "
                    "be searched for secrets",
                )
            headers = without(headers, b"content-length")  # a placeholder changes it
        return [(name, veil.over(value)) for name, value in headers if veil.over(name) == name]

    async def _pass_on(self, data: bytes) -> None:
        if data:
            with _inside():
                await self._send_in(h11.Data(data))

    async def _send_in(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self._inside.send(data)


def _is_archive(response: h11.Response) -> bool:
    """Return whether the reply declares a type that may be compressed, such as a package."""
    return _type_of(response) in _ARCHIVES


def _is_stream(response: h11.Response) -> bool:
    """Return whether a client waits for the head before the body has content."""
    return _type_of(response) == b"text/event-stream"


def _type_of(response: h11.Response) -> bytes:
    types = [value for name, value in response.headers if name == b"content-type"]
    return types[0].partition(b";")[0].strip().lower() if len(types) == 1 else b""


async def _next(
    http: h11.Connection, stream: ByteStream
) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
    async def receive() -> bytes:
        try:
            return await stream.receive()
        except anyio.EndOfStream:
            return b""

    return await next_event(http, receive)


@contextmanager
def _inside() -> Iterator[None]:
    """Translate errors that the client inside causes."""
    try:
        yield
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        raise HostGone("the client went away") from None
    except h11.RemoteProtocolError:
        raise EgressDenied("http", "the body of the request does not match its head") from None
    except h11.LocalProtocolError:  # the reply of the host cannot be written again
        raise EgressDenied("outside", "the reply is not HTTP/1.1") from None


@contextmanager
def _outside(host: str) -> Iterator[None]:
    """Translate errors that the host outside causes. Do not repeat its text: it knows the
    secret."""
    try:
        yield
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        raise EgressDenied("outside", f"{host} closed the connection") from None
    except h11.ProtocolError:
        raise EgressDenied(
            "outside", f"{host} closed the connection, or does not reply in HTTP/1.1"
        ) from None
