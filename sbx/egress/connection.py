"""One connection from inside: its requests one after another, each judged anew, or one tunnel.

    head → Asked → judged → resolved → judged → connected to an address that was judged
    CONNECT: then 200 → the first message of TLS → judged → bytes, or where the host has a secret or
             rules, TLS that ends here and requests within it

A redirect is an answer like others; who follows it comes back with a request.
"""

import asyncio
import ssl
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from sbx.egress import denials, http_heads
from sbx.egress.client_hello import NotTls, deny, read_hello
from sbx.egress.denials import EgressDenied, HostGone
from sbx.egress.forward import Exchange, Upstream
from sbx.egress.hosts import is_address, written
from sbx.egress.limits import ConnectionLimits, misplaced
from sbx.egress.resolver import NotReached, connect, own
from sbx.egress.rules import EgressDecision, ProxyRequest, RuleResult, has_rules, judge
from sbx.egress.secrets import Headers, SecretMisuse, password
from sbx.egress.stream import BudgetExceeded, ProxyStream, copy, together

_CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_LINGER_MAX = 1024 * 1024
_PATH_MAX = 1024  # characters that are recorded
_PORT_OF_TLS = 443
_PORT_OF_HTTP = 80


@dataclass(slots=True)
class _UnderWay:
    """What was allowed and has not ended: its end is recorded, too."""

    asked: ProxyRequest
    verdict: RuleResult
    address: str
    wire: ProxyStream
    received: int  # by the wire before it
    sent: int


class ProxyConnection:
    def __init__(self, terms: ConnectionLimits, wire: ProxyStream) -> None:
        self._terms = terms
        self._wire = wire
        self._asked: ProxyRequest | None = None  # what a refusal is about
        self._answer: ByteStream | None = wire  # where it can still be said
        self._under_way: _UnderWay | None = None
        self._upstream: Upstream | None = None
        self._idle = False  # between requests

    async def run(self, *, refused: EgressDenied | None = None) -> None:
        """Until it ends by itself, is refused, or its time is over; `refused` at once."""
        seconds = self._terms.network.time_max
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
                most = self._terms.network.bytes_max
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
            self._end("the proxy was closed")
            self._wire.close()
            if self._upstream is not None:
                self._upstream.wire.close()

    # -- requests ----------------------------------------------------------------------------------

    async def _requests(self, stream: ByteStream, within: ProxyRequest | None) -> None:
        """`within`: the CONNECT whose TLS this is."""
        left, again = b"", True
        patience = self._terms.patience
        while again:
            self._asked, self._answer, self._idle = within, stream, True
            head = await http_heads.read_head(
                stream,
                left,
                idle_s=patience.idle,
                head_s=patience.head,
                turn=self._terms.reading.turn,
            )
            if head is None:
                return
            self._idle = False
            http, request = head
            asked = self._asked = http_heads.asked_of(request, within)
            self._look(request, asked)
            if asked.method == "CONNECT":
                for name, value in request.headers:
                    self._terms.look(f"the header {name.decode('latin-1')}", value)
                await self._connect(asked, http.trailing_data[0])
                return
            again = await self._exchange(stream, http, request, asked, secure=within is not None)
            left = http.trailing_data[0]

    def _look(self, request: h11.Request, asked: ProxyRequest) -> None:
        """At everything in the head save the values of headers, which may hold a placeholder."""
        self._terms.look("the method", request.method)
        self._terms.look("the host", asked.host.encode())
        self._terms.look("the path", request.target)
        for name, value in request.headers:
            self._terms.look("the name of a header", name)
            where = f"the header {name.decode('latin-1')}"
            self._terms.trip(where, value)
            self._terms.trip(where, password(value) or b"")

    async def _exchange(
        self,
        stream: ByteStream,
        http: h11.Connection,
        request: h11.Request,
        asked: ProxyRequest,
        *,
        secure: bool,
    ) -> bool:
        await self._judged(asked)
        if http_heads.upgrades(request):
            raise EgressDenied("http", "there is no upgrade to another protocol through this proxy")
        head = self._head(request, asked, secure=secure)
        upstream = await self._reach(asked, secure=secure)
        veil = (
            self._terms.vault.veil(asked.host) if self._terms.vault.concerns(asked.host) else None
        )
        exchange = Exchange(self._terms, stream, self._wire, http, upstream, veil)
        try:
            again = await exchange.run(request, head)
        finally:
            if exchange.begun:
                self._answer = None
        self._end()
        if not again:
            await self._part()
        return again

    def _head(self, request: h11.Request, asked: ProxyRequest, *, secure: bool) -> h11.Request:
        """What is sent in its place. Raises Refused for a placeholder that cannot be replaced."""
        default = _PORT_OF_TLS if secure else _PORT_OF_HTTP
        try:
            headers = self._terms.vault.filled(
                request.headers.raw_items(), asked.host, secure=secure
            )
        except SecretMisuse as error:
            raise misplaced(error) from None
        headers = http_heads.without(http_heads.end_to_end(headers), b"host", b"expect")
        if has_rules(self._terms.network, asked.host):
            headers = http_heads.without_overrides(headers)
        if self._terms.vault.concerns(asked.host):
            headers = [
                *http_heads.without(http_heads.without_ranges(headers), b"accept-encoding"),
                (b"Accept-Encoding", b"identity"),
            ]
        if http_heads.has(request, b"transfer-encoding"):
            headers.append((b"Transfer-Encoding", b"chunked"))
        first: Headers = [(b"Host", written(asked.host, asked.port, default).encode())]
        path = asked.path or "/"
        return h11.Request(method=request.method, target=path.encode(), headers=first + headers)

    # -- tunnels -----------------------------------------------------------------------------------

    async def _connect(self, asked: ProxyRequest, left: bytes) -> None:
        if self._terms.reads(asked.host):
            await self._judged(asked)
            await self._terms.allowed.turn()
            await self._confirm(asked, left)
            await self._requests(await self._end_tls(asked), asked)
            return
        upstream = await self._reach(asked, secure=None)
        await self._confirm(replace(asked, addresses=(upstream.address,)), left)
        try:
            await together(copy(self._wire, upstream.wire), copy(upstream.wire, self._wire))
        except OSError:
            raise HostGone("one side broke off") from None
        self._end()

    async def _confirm(self, asked: ProxyRequest, left: bytes) -> None:
        """Say 200, and see that the TLS which follows is for the host that was asked for."""
        self._answer = None
        self._wire.put_back(left)
        try:
            await self._wire.send(_CONNECTED)
            async with asyncio.timeout(self._terms.patience.tls):
                hello, read = await read_hello(self._wire)
        except TimeoutError:
            raise EgressDenied("tls.sni", "no TLS began in time") from None
        except NotTls as error:
            raise EgressDenied("tls.sni", f"{error}: through CONNECT goes TLS only") from None
        except OSError:
            raise HostGone("whoever asked went away") from None
        verdict = judge(self._terms.network, replace(asked, hello=hello))
        if not verdict.allowed:
            await deny(self._wire)
            raise EgressDenied(verdict.rule, verdict.reason)
        self._wire.put_back(read)

    async def _end_tls(self, asked: ProxyRequest) -> ByteStream:
        assert self._terms.tls is not None, "what is read needs the means to"
        try:
            async with asyncio.timeout(self._terms.patience.tls):
                return await TLSStream.wrap(
                    self._wire,
                    server_side=True,
                    ssl_context=self._terms.tls.authority.context(asked.host),
                    standard_compatible=False,
                )
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            raise HostGone("whoever asked does not take our certificate, or went away") from None

    # -- the host outside --------------------------------------------------------------------------

    async def _judged(self, asked: ProxyRequest) -> RuleResult:
        verdict = judge(self._terms.network, asked)
        if not verdict.allowed:
            raise EgressDenied(verdict.rule, verdict.reason)
        self._terms.meter.check()
        return verdict

    async def _reach(self, asked: ProxyRequest, *, secure: bool | None) -> Upstream:
        """A connection for what is asked, which is recorded as allowed from here on. `secure` None
        is for a tunnel: the TLS in it is not ours."""
        verdict = await self._judged(asked)
        await self._terms.allowed.turn()
        kept = self._upstream
        if kept is None or not kept.again(asked.host, asked.port, bool(secure)):
            if kept is not None:
                kept.wire.close()
            self._upstream = None
            kept = self._upstream = await self._opened(asked)
            if secure:
                kept.stream, kept.secure = await self._begin_tls(kept), True
        self._under_way = _UnderWay(
            asked, verdict, kept.address, kept.wire, kept.wire.received, kept.wire.sent
        )
        self._record(asked, verdict, kept.address)
        return kept

    async def _opened(self, asked: ProxyRequest) -> Upstream:
        addresses: tuple[str, ...] = (asked.host,)
        try:
            if not is_address(asked.host):
                addresses = await self._terms.resolver.resolve(asked.host, asked.port)
            await self._judged(replace(asked, addresses=addresses, own=own(addresses)))
            sock = await connect(addresses, asked.port, self._terms.patience.connect)
        except NotReached as error:
            raise EgressDenied("outside", f"{asked.host} was not reached: {error}") from None
        wire = ProxyStream(sock, meter=self._terms.meter)
        address = str(sock.getpeername()[0])
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=http_heads.HEAD_MAX)
        return Upstream(asked.host, asked.port, False, address, wire, wire, http)

    async def _begin_tls(self, upstream: Upstream) -> ByteStream:
        assert self._terms.tls is not None, "what is read needs the means to"
        host = upstream.host
        try:
            async with asyncio.timeout(self._terms.patience.tls):
                return await TLSStream.wrap(
                    upstream.wire,
                    server_side=False,
                    hostname=host,
                    ssl_context=self._terms.tls.outside,
                    standard_compatible=False,
                )
        except ssl.SSLCertVerificationError as error:
            raise EgressDenied(
                "outside", f"{host} is not who it says: {error.verify_message}"
            ) from None
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            raise EgressDenied("outside", f"no TLS began with {host}") from None

    # -- what is said and recorded -----------------------------------------------------------------

    async def _refuse(self, error: EgressDenied) -> None:
        verdict = error.verdict
        if self._under_way is None:
            self._record(self._asked, verdict, None)
        else:
            self._end(verdict.reason, rule=verdict.rule)
        await self._terms.refused.turn()
        if self._answer is None:
            return
        with _always():
            async with asyncio.timeout(self._terms.patience.linger):
                await self._answer.send(denials.reply(verdict, self._asked))
        await self._part()

    async def _part(self) -> None:
        """Say no more, and read what is still coming: closed with bytes unread, linux would take
        back what was said."""
        with _always():
            async with asyncio.timeout(self._terms.patience.linger):
                await self._wire.send_eof()
                read = 0
                while read < _LINGER_MAX:
                    read += len(await self._wire.receive())

    def _end(self, reason: str = "", *, rule: str | None = None) -> None:
        if (ended := self._under_way) is None:
            return
        self._under_way = None
        verdict = RuleResult(rule is None, rule or ended.verdict.rule, reason)
        self._record(
            ended.asked,
            verdict,
            ended.address,
            bytes_in=ended.wire.received - ended.received,
            bytes_out=ended.wire.sent - ended.sent,
            ended=True,
        )

    def _record(
        self,
        asked: ProxyRequest | None,
        verdict: RuleResult,
        address: str | None,
        *,
        bytes_in: int = 0,
        bytes_out: int = 0,
        ended: bool = False,
    ) -> None:
        asked = asked or ProxyRequest("", "", 0)
        self._terms.record(
            EgressDecision(
                at=self._terms.clock(),
                sandbox=self._terms.sandbox,
                allowed=verdict.allowed,
                rule=verdict.rule,
                host=asked.host,
                port=asked.port,
                method=asked.method,
                path=asked.path and asked.path[:_PATH_MAX],
                address=address,
                reason=verdict.reason,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                ended=ended,
            )
        )


def _always() -> AbstractContextManager[None]:
    """To whoever is told no: it may have left, or not listen."""
    return suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream)
