"""What the egress proxy reads, for any bytes at all: bounded, and never in two ways."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbx.egress import denials
from sbx.egress.addresses import is_exempt, reserved
from sbx.egress.connection import HELLO_MAX, NotTls, read_hello
from sbx.egress.denials import EgressDenied, HostGone
from sbx.egress.hosts import NoHost, authority, canonical, is_address, written
from sbx.egress.http_heads import HEAD_MAX, parse_request, read_head
from sbx.egress.limits import FairQueue
from sbx.egress.rules import ClientHello, ProxyRequest, judge
from sbx.egress.secrets import PlaceholderScanner, Secret, SecretMisuse, SecretStore
from sbx.egress.stream import ProxyStream
from sbx.policy import destinations
from sbx.policy.tables import Network, NetworkRule

letters = st.sampled_from(list("aZ09.-_%:[]@/\\ \t\n*xn" + "\u00fc\u3002\uff11\u00df\u200d\u0130"))
pieces = st.sampled_from(
    ["example", ".", "org", "xn--", "127", "0x7f", "%2e", "%25", "[", "::1", "]"]
)
hosts = st.text(letters, max_size=30) | st.lists(pieces, max_size=8).map("".join) | st.text()


@given(hosts)
def test_a_host_has_one_spelling_or_is_none(text: str) -> None:
    try:
        host = canonical(text)
    except NoHost:
        return
    bracketed = f"[{host}]" if ":" in host else host
    assert canonical(bracketed) == canonical(bracketed.upper()) == host
    assert len(host) <= 253
    assert re.fullmatch(r"[a-z0-9._:-]+", host)
    assert authority(written(host, 8443, 443)) == (host, 8443)
    assert authority(written(host, 443, 443), 443) == (host, 443)
    if is_address(host):
        assert destinations.is_address(host)
    else:  # libc takes it for a name as well
        try:
            socket.inet_aton(host)
        except OSError:
            return
        raise AssertionError(f"{host} is an address to libc")


rules = st.lists(
    st.builds(
        NetworkRule,
        host=st.sampled_from(["a.example", "*.a.example"]),
        methods=st.sampled_from(["any", ("GET",), ("GET", "POST")]),
        paths=st.sampled_from(["any", ("/v1/*",), ("/v1", "/")]),
    ),
    max_size=3,
).map(tuple)
addresses = st.ip_addresses().map(str)


@given(
    rules,
    st.sampled_from(["a.example", "b.a.example", "evil.example", "10.0.0.1"]),
    st.text(st.sampled_from(list("/v1.%2ef;\\?a")), max_size=12).map(lambda text: f"/{text}"),
    st.none() | st.lists(addresses, max_size=3).map(tuple),
    st.none() | st.builds(ClientHello, st.none() | st.text(max_size=12)),
)
def test_what_is_allowed_is_listed_and_public_and_meant(
    rules: tuple[NetworkRule, ...],
    host: str,
    path: str,
    found: tuple[str, ...] | None,
    hello: ClientHello | None,
) -> None:
    network = Network(
        mode="proxy",
        allow=("a.example", "*.a.example"),
        rule=rules,
        allow_private=("a.example", "192.0.2.0/24"),
    )
    verdict = judge(network, ProxyRequest("GET", host, 443, path, found, hello))
    assert verdict.reason if not verdict.allowed else verdict.rule.startswith("network.allow: ")
    if verdict.allowed:
        assert host.endswith("a.example")
        for address in found or ():
            assert reserved(address) is None or is_exempt(address, host, network.allow_private)
        assert hello is None or (hello.sni is not None and canonical(hello.sni) == host)
        held = [rule for rule in rules if destinations.host_covers(rule.host, host)]
        if held and all(rule.paths != "any" for rule in held):
            assert "/.." not in path.replace("%2e", ".").replace("%2E", ".")


words = st.sampled_from(
    [
        *(b"GET ", b"CONNECT ", b"http://a.example", b"a.example:443", b"/", b" HTTP/1.1", b" "),
        *(
            b"\r\n",
            b"\r\n",
            b"\r\n\r\n",
            b"\n",
            b"\r",
            b"\0",
            b"\t",
            b"Host: a.example",
            b"Host: b",
        ),
        *(b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Content-Length: 4", b"X: y"),
    ]
)
said = st.lists(words | st.binary(max_size=4), max_size=14).map(b"".join)
good = st.just(b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n")


@given(said | st.tuples(good, said).map(b"".join), st.integers(1, 40))
def test_a_head_is_read_in_one_way_or_refused(data: bytes, size: int) -> None:
    async def read(wire: ProxyStream) -> None:
        found = await read_head(wire, b"", idle_s=1, head_s=1, turn=FairQueue().turn)
        if found is None:
            assert data == b""
            return
        http, request = found
        asked = parse_request(request, None)
        head = data[: data.index(b"\r\n\r\n")]
        assert not re.search(rb"(?<!\r)\n|\r(?!\n)|\0", head)
        assert not (b"Content-Length" in head and b"Transfer-Encoding" in head.replace(b" ", b""))
        assert (asked.method == "CONNECT") == (asked.path is None)
        assert asked.host == canonical(asked.host if ":" not in asked.host else f"[{asked.host}]")
        assert isinstance(http, h11.Connection)

    _over_a_socket(data, size, read, (EgressDenied, HostGone))


@given(st.integers(HEAD_MAX, HEAD_MAX * 3))
def test_a_head_is_never_read_beyond_its_bound(size: int) -> None:
    async def read(wire: ProxyStream) -> None:
        try:
            await read_head(wire, b"", idle_s=1, head_s=1, turn=FairQueue().turn)
        finally:
            assert wire.received <= HEAD_MAX + 64 * 1024 + 1

    _over_a_socket(b"a" * size, 1 << 20, read, (EgressDenied, HostGone))


hello = ssl.MemoryBIO()
_client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="a.example")
try:
    _client.do_handshake()
except ssl.SSLWantReadError:
    HELLO = hello.read()


@given(
    st.binary(max_size=200)
    | st.tuples(st.integers(0, len(HELLO)), st.binary(max_size=8)).map(
        lambda change: HELLO[: change[0]] + change[1] + HELLO[change[0] + len(change[1]) :]
    ),
    st.integers(1, 600),
)
# A name that is not ASCII is refused by ssl itself, which says so on stderr as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_first_message_of_tls_is_read_or_refused(data: bytes, size: int) -> None:
    async def read(wire: ProxyStream) -> None:
        found, came = await read_hello(wire)
        assert found.sni is None or isinstance(found.sni, str)
        assert data.startswith(came)
        assert len(came) <= HELLO_MAX

    _over_a_socket(data, size, read, (NotTls,))


VALUE = "aab/aab+c"
vaults = st.just(SecretStore({"S": Secret("S", "S", ("a.example",), "X-Key", VALUE)}))


@given(
    vaults,
    st.lists(
        st.sampled_from([b"a", b"b", b"aab", b"/aab", b"+c", VALUE.encode(), b"%2F", b"x"])
    ).map(b"".join),
    st.data(),
)
def test_no_division_into_pieces_brings_a_value_in(
    vault: SecretStore, body: bytes, data: st.DataObject
) -> None:
    veil, shown, at = vault.veil("a.example"), b"", 0
    while at < len(body):
        size = data.draw(st.integers(1, 12))
        shown += veil.feed(body[at : at + size])
        at += size
    shown += veil.end()
    assert VALUE.encode() not in shown
    assert shown == vault.veil("a.example").over(body)


@given(vaults, st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 50))
def test_no_division_into_pieces_lets_a_placeholder_out(
    vault: SecretStore, before: bytes, after: bytes, size: int
) -> None:
    body = before + vault.environment["S"].encode() + after
    scan = PlaceholderScanner(vault, "the body")
    try:
        for at in range(0, len(body), size):
            scan.feed(body[at : at + size])
    except SecretMisuse:
        return
    raise AssertionError("it went out")


@given(st.text(), st.text(max_size=50))
def test_a_refusal_is_one_reply_whatever_it_says(reason: str, host: str) -> None:
    reply = denials.reply(EgressDenied("rule", reason).verdict, ProxyRequest("GET", host, 1))
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    http.receive_data(reply)
    response = http.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 403
    while isinstance(http.next_event(), h11.Data):
        pass
    assert http.trailing_data == (b"", False)


def _over_a_socket(
    data: bytes,
    size: int,
    read: Callable[[ProxyStream], Any],
    expected: tuple[type[Exception], ...],
) -> None:
    """`data` comes in pieces of `size`, and then the end."""

    async def both() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        wire = ProxyStream(ours)

        async def send() -> None:
            loop = asyncio.get_running_loop()
            try:
                for at in range(0, len(data), size):
                    await loop.sock_sendall(theirs, data[at : at + size])
                    await asyncio.sleep(0)
            except OSError:
                pass
            theirs.close()

        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(60):
                await read(wire)
        except expected:
            pass
        finally:
            wire.close()
            await sending

    asyncio.run(both())
