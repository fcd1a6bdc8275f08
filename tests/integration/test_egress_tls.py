"""TLS through the egress proxy: tunnels that stay closed to it, and TLS that ends in it."""

import asyncio
import ssl
from pathlib import Path

import pytest
from egressing import (
    Certificates,
    allowing,
    closed,
    origin,
    refusal,
    reply,
    until_the_end,
    way,
)

from sbx.egress import Timeouts
from sbx.policy.tables import NetworkRule

HOST = "site.example"
HERE = {HOST: ["127.0.0.1"], "other.example": ["127.0.0.1"]}


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


def hello_for(name: str | None) -> bytes:
    """The first message of TLS, as a client says it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    said = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=name).do_handshake()
    return said.read()


async def test_a_tunnel_is_closed_to_the_proxy(tmp_path: Path, certificates: Certificates) -> None:
    """The client trusts the server's own certificate and no other, and gets through."""
    async with (
        origin(lambda heard: reply(heard.line), tls=certificates.server(HOST)) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        said = await out.ask(f"{HOST}:{site.port}", certificates.trust, "/secret/path")
        assert said.endswith(b"GET /secret/path HTTP/1.1")
        assert out.egress.certificates is None
    first, last = out.decisions
    assert (first.method, first.path, first.address) == ("CONNECT", None, "127.0.0.1")
    assert last.ended
    assert last.allowed
    assert min(last.bytes_in, last.bytes_out) > 300


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("other.example", "the TLS to site.example names other.example as the server"),
        (None, "the TLS to site.example names no server"),
    ],
)
async def test_tls_for_another_server_than_was_asked_for_is_refused(
    tmp_path: Path, named: str | None, reason: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())

    heard: list[bytes] = []
    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}", "other.example"), HERE) as out,
    ):
        _, (reader, writer) = await out.tunnel(f"{HOST}:{site.port}")
        with closed(writer):
            writer.write(hello_for(named))
            assert await until_the_end(reader) == b"\x15\x03\x03\x00\x02\x02\x31"  # access_denied
        await asyncio.sleep(0.05)
        assert heard == [b""]
    last = out.decisions[-1]
    assert (last.allowed, last.rule, last.reason) == (False, "tls.sni", reason)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01"])
async def test_only_tls_goes_through_a_tunnel(tmp_path: Path, said: bytes) -> None:
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE, patience=Timeouts(tls=0.2)) as out,
    ):
        _, (reader, writer) = await out.tunnel(f"{HOST}:{site.port}")
        with closed(writer):
            writer.write(said)
            await until_the_end(reader)
        assert site.heard == []
    assert (out.decisions[-1].allowed, out.decisions[-1].rule) == (False, "tls.sni")


async def test_a_hello_in_small_pieces_passes_and_one_without_end_does_not(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.write(b"%d bytes" % len(heard[-1]))
        await writer.drain()

    heard: list[bytes] = []
    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        _, (reader, writer) = await out.tunnel(f"{HOST}:{site.port}")
        with closed(writer):
            hello = hello_for(HOST)
            for at in range(0, len(hello), 100):
                writer.write(hello[at : at + 100])
                await asyncio.sleep(0.001)
            writer.write(b"and more")
            writer.write_eof()  # the other direction stays open
            assert await until_the_end(reader) == b"%d bytes" % (len(hello) + len(b"and more"))
            assert heard == [hello + b"and more"]
        _, (reader, writer) = await out.tunnel(f"{HOST}:{site.port}")
        with closed(writer):
            record = b"\x16\x03\x01\x40\x00"
            writer.write(
                record
                + b"\x01\x00\xff\xff"
                + b"\x00" * (0x4000 - 4)
                + (record + b"\x00" * 0x4000) * 9
            )
            await until_the_end(reader)
        assert heard == [hello + b"and more", b""]
    assert out.decisions[-1].rule == "tls.sni"


async def test_what_comes_with_the_connect_is_not_lost(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d bytes" % len(await reader.read()))
        await writer.drain()

    async with (
        origin(serve=serve) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), HERE) as out,
    ):
        reader, writer = await out.open()
        with closed(writer):
            hello, to = hello_for(HOST), f"{HOST}:{site.port}"
            writer.write(f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n".encode() + hello)
            writer.write_eof()
            assert (await until_the_end(reader)).endswith(b"%d bytes" % len(hello))


async def test_an_address_needs_no_server_name(tmp_path: Path, certificates: Certificates) -> None:
    async with (
        origin(tls=certificates.server("127.0.0.1")) as site,
        way(tmp_path, allowing(f"127.0.0.1:{site.port}"), {}) as out,
    ):
        said = await out.ask(f"127.0.0.1:{site.port}", certificates.trust, "/")
        assert said.endswith(b"hello")
        assert out.looked_up == []


async def test_a_tunnel_ends_when_time_or_bytes_are_up(
    tmp_path: Path, certificates: Certificates
) -> None:
    big = reply(b"x" * (4 << 20))
    async with (
        origin(lambda _: big, tls=certificates.server(HOST)) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}", bytes_max=1 << 20), HERE) as out,
    ):
        said = await out.ask(f"{HOST}:{site.port}", certificates.trust, "/")
        assert len(said) < 1 << 20
    assert (out.decisions[-1].allowed, out.decisions[-1].rule) == (False, "network.bytes_max")
    async with (
        origin(tls=certificates.server(HOST)) as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}", time_max=0.3), HERE) as out,
        out.tls(f"{HOST}:{site.port}", certificates.trust) as (reader, _),
    ):
        assert await until_the_end(reader) == b""
    assert (out.decisions[-1].allowed, out.decisions[-1].rule) == (False, "network.time_max")


# -- TLS that ends in the proxy --------------------------------------------------------------------

RULES = (NetworkRule(host=HOST, methods=("GET",), paths=("/v1/*",)),)


async def test_rules_hold_within_tls_of_hosts_that_have_them(
    tmp_path: Path, certificates: Certificates
) -> None:
    server = certificates.server(HOST, "other.example")
    async with (
        origin(lambda heard: reply(heard.line), tls=server) as site,
        way(
            tmp_path,
            allowing(f"{HOST}:{site.port}", f"other.example:{site.port}", rule=RULES),
            HERE,
            outside=certificates.trust,
        ) as out,
    ):
        to = f"{HOST}:{site.port}"
        inside = out.inside
        inside.verify_flags |= ssl.VERIFY_X509_STRICT
        assert (await out.ask(to, inside, "/v1/x?y")).endswith(b"GET /v1/x?y HTTP/1.1")
        assert refusal(await out.ask(to, inside, "/v2"))["rule"] == "network.rule"
        assert refusal(await out.ask(to, inside, "/v1/x", body="a"))["rule"] == "network.rule"
        # Nobody else's TLS is touched: the other host shows its own certificate.
        said = await out.ask(f"other.example:{site.port}", certificates.trust, "/v2")
        assert said.endswith(b"GET /v2 HTTP/1.1")
        assert [heard.line for heard in site.heard] == [
            b"GET /v1/x?y HTTP/1.1",
            b"GET /v2 HTTP/1.1",
        ]
    paths = [(d.method, d.path, d.allowed) for d in out.decisions if not d.ended]
    assert paths == [
        ("GET", "/v1/x?y", True),
        ("GET", "/v2", False),
        ("POST", "/v1/x", False),
        ("CONNECT", None, True),
    ]


async def test_requests_within_tls_are_for_its_host(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with (
        origin(tls=certificates.server(HOST)) as site,
        way(
            tmp_path,
            allowing(f"{HOST}:{site.port}", "other.example", rule=RULES),
            HERE,
            outside=certificates.trust,
        ) as out,
    ):
        inside = out.inside
        to = f"{HOST}:{site.port}"
        for said, rule in (
            (f"GET /v1/ HTTP/1.1\r\nHost: {to}\r\n\r\n", None),
            ("GET /v1/ HTTP/1.1\r\nHost: other.example\r\n\r\n", "http.host"),
            (f"GET http://other.example/ HTTP/1.1\r\nHost: {to}\r\n\r\n", "http"),
            (f"CONNECT other.example:443 HTTP/1.1\r\nHost: {to}\r\n\r\n", "http"),
        ):
            async with out.tls(to, inside) as (reader, writer):
                writer.write(said.encode())
                if rule is None:
                    assert await reader.readuntil(b"hello")
                else:
                    assert refusal(await until_the_end(reader))["rule"] == rule
        assert site.connections == 1


async def test_requests_within_tls_share_a_connection(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with (
        origin(tls=certificates.server(HOST)) as site,
        way(
            tmp_path,
            allowing(f"{HOST}:{site.port}", rule=RULES),
            HERE,
            outside=certificates.trust,
        ) as out,
    ):
        inside = out.inside
        to = f"{HOST}:{site.port}"
        async with out.tls(to, inside) as (reader, writer):
            for _ in range(3):
                writer.write(f"GET /v1/ HTTP/1.1\r\nHost: {to}\r\n\r\n".encode())
                async with asyncio.timeout(60):
                    await reader.readuntil(b"hello")
        assert (len(site.heard), site.connections, out.looked_up) == (3, 1, [HOST])


async def test_a_server_that_is_not_who_it_says_is_not_asked(
    tmp_path: Path, certificates: Certificates
) -> None:
    stranger = Certificates()
    for server in (stranger.server(HOST), certificates.server("other.example")):
        async with (
            origin(tls=server) as site,
            way(
                tmp_path,
                allowing(f"{HOST}:{site.port}", rule=RULES),
                HERE,
                outside=certificates.trust,
            ) as out,
        ):
            inside = out.inside
            answer = refusal(await out.ask(f"{HOST}:{site.port}", inside, "/v1/"))
            assert (answer["status"], answer["rule"]) == ("502", "outside")
            assert "is not valid: " in answer["reason"]
            assert site.heard == []


async def test_the_authority_vouches_for_no_other_host(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Its key never leaves the runtime; if it did, what it signs would be worth nothing else."""
    from sbx.egress.certificates import Authority

    authority = Authority("box", (HOST, "*.sub.example", "192.0.2.7"))
    trust = ssl.create_default_context(cadata=authority.pem.decode())
    for host, good in (
        (HOST, True),
        ("a.sub.example", True),
        ("192.0.2.7", True),
        ("other.example", False),
        ("192.0.2.8", False),
    ):
        ends = [ssl.MemoryBIO() for _ in range(2)]
        client = trust.wrap_bio(ends[0], ends[1], server_hostname=host)
        server = authority.context(host).wrap_bio(ends[1], ends[0], server_side=True)
        assert _handshake(client, server) == good, host


def _handshake(client: ssl.SSLObject, server: ssl.SSLObject) -> bool:
    for _ in range(3):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return client.version() is not None
