"""One request and its reply, read and written anew: nothing goes through that h11 did not take in.

Both directions run at once, since a server may answer before it has heard all. What is sent is
searched for placeholders and honeytokens; what a host with secrets answers has placeholders in the
place of values, and is asked for in a coding that can be searched.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import h11
from anyio.abc import ByteStream

from sbx.egress.denials import EgressDenied, HostGone
from sbx.egress.http_heads import end_to_end, has, without
from sbx.egress.limits import ConnectionLimits, misplaced
from sbx.egress.secrets import Headers, PlaceholderScanner, SecretMisuse
from sbx.egress.stream import ProxyStream
from sbx.egress.veil import Compressed, RedactingStream, Sniffer

_INTERIM_MAX = 16  # replies 1xx before the one that counts
_OVERLAP = 512  # bytes of a body that a honeytoken may lie across
_SEARCHED_AT_ONCE = 16 << 10  # bytes of a reply; the others wait that long
_BODILESS = frozenset({204, 304})
_ARCHIVES = frozenset(
    f"application/{name}".encode()
    for name in (
        *("octet-stream", "gzip", "x-gzip", "tar+gzip", "x-tar", "x-gtar", "x-compressed-tar"),
        *("zstd", "x-bzip2", "x-xz", "vnd.docker.image.rootfs.diff.tar.gzip"),
        *("vnd.oci.image.layer.v1.tar+gzip", "vnd.oci.image.layer.v1.tar+zstd"),
    )
)


@dataclass(slots=True)
class Upstream:
    """A connection to a host outside, to an address that was checked."""

    host: str
    port: int
    secure: bool
    address: str
    wire: ProxyStream
    stream: ByteStream
    http: h11.Connection

    def again(self, host: str, port: int, secure: bool) -> bool:
        """Whether it can take another request, for this host."""
        if (host, port, secure) != (self.host, self.port, self.secure):
            return False
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        if self.http.trailing_data[0] or not self.wire.quiet():
            return False  # it says what nobody asked for, or is gone
        self.http.start_next_cycle()
        return True


class Exchange:
    """`begun`: the reply is on its way in, so that it is too late to refuse."""

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
        """Send `head` and what follows `request`, and bring back the reply. True when another
        request may come on this connection. Raises Refused, Gone."""
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
        """What the inside sends. Trailers are left out."""
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
        """Send it. False when the host has closed: it may have answered nevertheless."""
        try:
            await self._send_out(event)
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            return False
        return True

    async def _watch(self) -> None:
        """A server may take minutes to answer: nobody waits for it once whoever asked has left.
        Who has only said all it had to say looks the same, and gets some time."""
        seen = False
        while not (seen and self._wire.left()):
            seen = self._wire.left()
            await asyncio.sleep(self._terms.patience.left)
        raise HostGone("whoever asked went away")

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
        first = b"" if _is_stream(response) else await anext(body, b"")  # it can be refused yet
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
        """Yield the body, with placeholders in the place of values. Raises Refused."""
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
                    f"the reply of {self._upstream.host} is compressed and does not say so, so it "
                    "cannot be searched for secrets",
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
            for _ in range(_INTERIM_MAX):
                event = await _next(self._upstream.http, self._upstream.stream)
                if isinstance(event, h11.InformationalResponse):
                    continue
                if not isinstance(event, h11.Response):
                    break
                if has(event, b"transfer-encoding") and has(event, b"content-length"):
                    raise EgressDenied(
                        "outside", f"{self._upstream.host} says in two ways how long its reply is"
                    )
                return event
        raise EgressDenied(
            "outside", f"{self._upstream.host} answers with something else than HTTP"
        )

    def _veiled(
        self, veil: RedactingStream, response: h11.Response, headers: Headers, bodiless: bool
    ) -> Headers:
        coded = [value for name, value in response.headers if name == b"content-encoding"]
        if not bodiless:
            if any(value.strip().lower() not in (b"", b"identity") for value in coded):
                raise EgressDenied(
                    "secrets",
                    f"{self._upstream.host} answers in a coding it was not asked for, which cannot "
                    "be searched for secrets",
                )
            headers = without(headers, b"content-length")  # which a placeholder changes
        return [(name, veil.over(value)) for name, value in headers if veil.over(name) == name]

    async def _pass_on(self, data: bytes) -> None:
        if data:
            with _inside():
                await self._send_in(h11.Data(data))

    async def _send_in(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self._inside.send(data)


def _is_archive(response: h11.Response) -> bool:
    """Return whether the reply declares that it is a file that may well be compressed, such as a
    package that is downloaded."""
    return _type_of(response) in _ARCHIVES


def _is_stream(response: h11.Response) -> bool:
    """Return whether its head is waited for before there is anything in the body."""
    return _type_of(response) == b"text/event-stream"


def _type_of(response: h11.Response) -> bytes:
    types = [value for name, value in response.headers if name == b"content-type"]
    return types[0].partition(b";")[0].strip().lower() if len(types) == 1 else b""


async def _next(
    http: h11.Connection, stream: ByteStream
) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
    """The others have their turn before each: of one piece that was read, a chunk may be a byte."""
    await asyncio.sleep(0)
    while (event := http.next_event()) is h11.NEED_DATA:
        try:
            http.receive_data(await stream.receive())
        except anyio.EndOfStream:
            http.receive_data(b"")
        await asyncio.sleep(0)
    return event


@contextmanager
def _inside() -> Iterator[None]:
    """What goes wrong here is the doing of whoever is inside."""
    try:
        yield
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        raise HostGone("whoever asked went away") from None
    except h11.RemoteProtocolError:
        raise EgressDenied("http", "the body of the request is not as its head says") from None
    except h11.LocalProtocolError:  # what the host outside said cannot be said again
        raise EgressDenied("outside", "the reply is not of HTTP/1.1") from None


@contextmanager
def _outside(host: str) -> Iterator[None]:
    """… and here of the host outside, whose words are not repeated: it has seen the secret."""
    try:
        yield
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        raise EgressDenied("outside", f"{host} broke off") from None
    except h11.ProtocolError:
        raise EgressDenied("outside", f"{host} broke off, or does not answer in HTTP/1.1") from None
