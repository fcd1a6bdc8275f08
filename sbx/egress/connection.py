"""One connection from inside: requests one after another, each judged separately, or one tunnel.

    head → ProxyRequest → judged → resolved → judged → connected to an address that was judged
    CONNECT: then 200 → the first message of TLS → judged → bytes, or, if the host has a secret or
             rules, TLS that ends here and requests within it

A redirect is a reply like others: the client that follows it sends a new request.
"""

import asyncio
import ssl
from contextlib import AbstractContextManager, suppress

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream
from msgspec import Struct
from msgspec.structs import replace

from sbx.egress import denials, http_heads
from sbx.egress.denials import EgressDenied, HostGone
from sbx.egress.forward import Exchange, outgoing_head
from sbx.egress.hosts import is_address
from sbx.egress.limits import ConnectionLimits
from sbx.egress.resolver import NotReached, connect, own
from sbx.egress.rules import (
    UNLISTED,
    ClientHello,
    EgressDecision,
    ProxyRequest,
    RuleResult,
    judge,
)
from sbx.egress.secrets import password
from sbx.egress.stream import BudgetExceeded, ProxyStream, copy, together
from sbx.egress.upstream import Upstream
from sbx.policy.destinations import LOOPBACK, THIS_HOST, Destination
from sbx.protocol.grants import Access

_CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_LINGER_MAX = 1024 * 1024
_PATH_MAX = 1024  # characters that are recorded
HELLO_MAX = 32 * 1024  # with keys of post-quantum exchanges it takes some 2 KiB
_RECORD_MAX = 16 * 1024


class _OpenRequest(Struct):
    """A request that was allowed and has not ended: its end is recorded, too."""

    request: ProxyRequest
    verdict: RuleResult
    address: str
    wire: ProxyStream
    received: int  # by the wire before it
    sent: int


class ProxyConnection:
    def __init__(self, terms: ConnectionLimits, wire: ProxyStream) -> None:
        self.terms = terms
        self._wire = wire
        self._request: ProxyRequest | None = None  # the subject of a refusal
        self._reply: ByteStream | None = wire  # where a refusal can still be sent
        self._open_request: _OpenRequest | None = None
        self._upstream: Upstream | None = None
        self._idle = False  # between requests
        self._cut_reason = "the proxy was closed"

    @property
    def is_allowed(self) -> bool:
        """Return whether the open request is still allowed; grants end."""
        opened = self._open_request
        if opened is None:
            return True
        return judge(self.terms.network, opened.request, self.terms.granted_hosts).allowed

    def cut(self, reason: str) -> None:
        """Set the reason that is recorded when this connection is cancelled."""
        self._cut_reason = reason

    async def run(self, *, refused: EgressDenied | None = None) -> None:
        """Serve the connection until it ends, is refused, or its time is over. With `refused`,
        refuse it at once."""
        seconds = self.terms.network.time_max
        try:
            try:
                async with asyncio.timeout(seconds):
                    if refused is not None:
                        raise refused
                    await self._requests(self._wire, None)
            except TimeoutError:
                if not self._idle:
                    await self._refuse(
                        EgressDenied("network.time_max", f"it took more than {seconds:g} s")
                    )
            except BudgetExceeded:
                most = self.terms.network.bytes_max
                await self._refuse(
                    EgressDenied(
                        "network.bytes_max", f"this sandbox has used up its {most} bytes of network"
                    )
                )
            except EgressDenied as error:
                await self._refuse(error)
            except HostGone as error:
                self._end(str(error))
        finally:
            self._end(self._cut_reason)
            self._wire.close()
            if self._upstream is not None:
                self._upstream.wire.close()

    # -- requests ----------------------------------------------------------------------------------

    async def _requests(self, stream: ByteStream, within: ProxyRequest | None) -> None:
        """Serve the requests of a stream. `within`: the CONNECT whose TLS this is."""
        left, again = b"", True
        patience = self.terms.patience
        while again:
            self._request, self._reply, self._idle = within, stream, True
            parsed = await http_heads.read_head(
                stream,
                left,
                idle_s=patience.idle,
                head_s=patience.head,
                turn=self.terms.reading.turn,
            )
            if parsed is None:
                return
            self._idle = False
            http, head = parsed
            request = self._request = http_heads.parse_request(head, within)
            self._look(head, request)
            if request.method == "CONNECT":
                for name, value in head.headers:
                    self.terms.look(f"the header {name.decode('latin-1')}", value)
                await self._connect(request, http.trailing_data[0])
                return
            again = await self._exchange(stream, http, head, request, secure=within is not None)
            left = http.trailing_data[0]

    def _look(self, head: h11.Request, request: ProxyRequest) -> None:
        """Look for placeholders and honeytokens in the head. The values of headers may have a
        placeholder."""
        self.terms.look("the method", head.method)
        self.terms.look("the host", request.host.encode())
        self.terms.look("the path", head.target)
        for name, value in head.headers:
            self.terms.look("the name of a header", name)
            where = f"the header {name.decode('latin-1')}"
            self.terms.trip(where, value)
            self.terms.trip(where, password(value) or b"")

    async def _exchange(
        self,
        stream: ByteStream,
        http: h11.Connection,
        head: h11.Request,
        request: ProxyRequest,
        *,
        secure: bool,
    ) -> bool:
        await self._judged(request)
        if http_heads.upgrades(head):
            raise EgressDenied("http", "there is no upgrade to another protocol through this proxy")
        outgoing = outgoing_head(self.terms, head, request, secure=secure)
        upstream = await self._reach(request, secure=secure)
        vault = self.terms.vault
        veil = vault.veil(request.host) if vault.concerns(request.host) else None
        exchange = Exchange(self.terms, stream, self._wire, http, upstream, veil)
        try:
            again = await exchange.run(head, outgoing)
        finally:
            if exchange.begun:
                self._reply = None
        self._end()
        if not again:
            await self._part()
        return again

    # -- tunnels -----------------------------------------------------------------------------------

    async def _connect(self, request: ProxyRequest, left: bytes) -> None:
        if self.terms.reads(request.host):
            await self._judged(request)
            await self.terms.allowed.turn()
            await self._confirm(request, left)
            await self._requests(await self._end_tls(request), request)
            return
        upstream = await self._reach(request, secure=None)
        await self._confirm(replace(request, addresses=(upstream.address,)), left)
        try:
            await together(copy(self._wire, upstream.wire), copy(upstream.wire, self._wire))
        except OSError:
            raise HostGone("one side closed the connection") from None
        self._end()

    async def _confirm(self, request: ProxyRequest, left: bytes) -> None:
        """Reply 200, and check that the TLS which follows is for the requested host."""
        self._reply = None
        self._wire.put_back(left)
        try:
            await self._wire.send(_CONNECTED)
            async with asyncio.timeout(self.terms.patience.tls):
                hello, read = await read_hello(self._wire)
        except TimeoutError:
            raise EgressDenied("tls.sni", "no TLS began in time") from None
        except NotTls as error:
            raise EgressDenied("tls.sni", f"{error}: through CONNECT goes TLS only") from None
        except OSError:
            raise HostGone("the client went away") from None
        granted = self.terms.granted_hosts
        verdict = judge(self.terms.network, replace(request, hello=hello), granted)
        if not verdict.allowed:
            await deny(self._wire)
            raise EgressDenied(verdict.rule, verdict.reason)
        self._wire.put_back(read)

    async def _end_tls(self, request: ProxyRequest) -> ByteStream:
        assert self.terms.tls is not None, "a connection that is read has the means for TLS"
        try:
            async with asyncio.timeout(self.terms.patience.tls):
                return await TLSStream.wrap(
                    self._wire,
                    server_side=True,
                    ssl_context=self.terms.tls.authority.context(request.host),
                    standard_compatible=False,
                )
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            raise HostGone("the client does not accept our certificate, or went away") from None

    # -- the host outside --------------------------------------------------------------------------

    async def _judged(self, request: ProxyRequest) -> RuleResult:
        verdict = judge(self.terms.network, request, self.terms.granted_hosts)
        if not verdict.allowed:
            unlisted = verdict.rule == UNLISTED and bool(request.port)
            where = str(Destination(request.host, request.port))
            access = Access("network", where) if unlisted else None
            raise EgressDenied(verdict.rule, verdict.reason, access)
        self.terms.meter.check()
        return verdict

    async def _reach(self, request: ProxyRequest, *, secure: bool | None) -> Upstream:
        """Return a connection for a request, which is recorded as allowed from now on. `secure`
        None: a tunnel, whose TLS is not ours."""
        verdict = await self._judged(request)
        await self.terms.allowed.turn()
        kept = self._upstream
        if kept is None or not kept.can_serve(request.host, request.port, secure=bool(secure)):
            if kept is not None:
                kept.wire.close()
            self._upstream = None
            kept = await self._open(request, secure=bool(secure))
        self._open_request = _OpenRequest(
            request, verdict, kept.address, kept.wire, kept.wire.received, kept.wire.sent
        )
        self._record(request, verdict, kept.address)
        return kept

    async def _open(self, request: ProxyRequest, *, secure: bool) -> Upstream:
        addresses: tuple[str, ...] = (request.host,)
        try:
            if request.host in THIS_HOST:
                addresses = LOOPBACK
            elif not is_address(request.host):
                addresses = await self.terms.resolver.resolve(request.host, request.port)
            await self._judged(replace(request, addresses=addresses, own=own(addresses)))
            sock = await connect(addresses, request.port, self.terms.patience.connect)
        except NotReached as error:
            raise EgressDenied("outside", f"{request.host} was not reached: {error}") from None
        upstream = self._upstream = Upstream(request.host, request.port, sock, self.terms.meter)
        if secure:
            assert self.terms.tls is not None, "a connection that is read has the means for TLS"
            await upstream.begin_tls(self.terms.tls.outside, self.terms.patience.tls)
        return upstream

    # -- refusals and records ----------------------------------------------------------------------

    async def _refuse(self, error: EgressDenied) -> None:
        verdict = error.verdict
        if error.access is not None and self.terms.grants is not None:
            self.terms.grants.note_refused(error.access)
        if self._open_request is None:
            self._record(self._request, verdict, None)
        else:
            self._end(verdict.reason, rule=verdict.rule)
        await self.terms.refused.turn()
        if self._reply is None:
            return
        with _always():
            async with asyncio.timeout(self.terms.patience.linger):
                await self._reply.send(denials.reply(verdict, self._request))
        await self._part()

    async def _part(self) -> None:
        """Send no more, and read the bytes that still arrive. If a socket is closed with unread
        bytes, Linux discards the bytes that were sent."""
        with _always():
            async with asyncio.timeout(self.terms.patience.linger):
                await self._wire.send_eof()
                read = 0
                while read < _LINGER_MAX:
                    read += len(await self._wire.receive())

    def _end(self, reason: str = "", *, rule: str | None = None) -> None:
        if (ended := self._open_request) is None:
            return
        self._open_request = None
        self._record(
            ended.request,
            RuleResult(rule is None, rule or ended.verdict.rule, reason),
            ended.address,
            bytes_in=ended.wire.received - ended.received,
            bytes_out=ended.wire.sent - ended.sent,
            ended=True,
        )

    def _record(
        self,
        request: ProxyRequest | None,
        verdict: RuleResult,
        address: str | None,
        *,
        bytes_in: int = 0,
        bytes_out: int = 0,
        ended: bool = False,
    ) -> None:
        request = request or ProxyRequest("", "", 0)
        self.terms.record(
            EgressDecision(
                at=self.terms.clock(),
                sandbox=self.terms.sandbox,
                allowed=verdict.allowed,
                rule=verdict.rule,
                host=request.host,
                port=request.port,
                method=request.method,
                path=request.path and request.path[:_PATH_MAX],
                address=address,
                reason=verdict.reason,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                ended=ended,
            )
        )


def _always() -> AbstractContextManager[None]:
    """Ignore the errors of a client that has left, or does not read its refusal."""
    return suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream)


class NotTls(Exception):
    """The bytes are not the beginning of TLS."""


async def read_hello(wire: ProxyStream) -> tuple[ClientHello, bytes]:
    """Return the first message of TLS and the bytes that were read. Raise NotTls.

    Only OpenSSL reads the message. It begins the server's side of TLS with the bytes so far, until
    it has read the message and asks for the name. There it ends: it has no key to continue with.
    """
    names: list[str | None] = []

    def stop(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int:
        names.append(name)
        return ssl.ALERT_DESCRIPTION_ACCESS_DENIED

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = stop
    incoming = ssl.MemoryBIO()
    beginning = context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
    read = b""
    while len(read) < HELLO_MAX:
        try:
            piece = await wire.receive(_RECORD_MAX)
        except anyio.EndOfStream:
            raise NotTls("it ended before TLS began") from None
        read += piece
        incoming.write(piece)
        try:
            beginning.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            if names:
                return ClientHello(names[0]), read
            break
    raise NotTls("the first bytes are not those of TLS 1.2 or later")


async def deny(wire: ProxyStream) -> None:
    """Send the alert `access_denied`: it means in TLS what 403 means in HTTP."""
    await wire.send(b"\x15\x03\x03\x00\x02\x02" + bytes([ssl.ALERT_DESCRIPTION_ACCESS_DENIED]))
