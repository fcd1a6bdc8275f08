"""Public escapes by the proxy of a sandbox: names that two readers read as two hosts, and tunnels
that carry something else."""

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from egressing import Way, allowing, closed, origin, until_the_end, way

HOST = "site.example"
EVIL = "evil.example"
SPELLINGS = {
    "NUL": f"{EVIL}\0.{HOST}",
    "NUL at the end": f"{HOST}\0",
    "escaped NUL": f"{EVIL}%00.{HOST}",
    "LF": f"{EVIL}\n.{HOST}",
    "escaped LF": f"{EVIL}%0a.{HOST}",
    "CR LF": f"{EVIL}\r\n.{HOST}",
    "tab": f"{EVIL}\t.{HOST}",
    "space": f"{EVIL} .{HOST}",
    "escaped slash": f"{EVIL}%2f.{HOST}",
    "escaped twice": f"{EVIL}%252e{HOST}",
    "fragment": f"{EVIL}#.{HOST}",
    "query": f"{EVIL}?.{HOST}",
    "backslash": f"{EVIL}\\.{HOST}",
    "user": f"{HOST}@{EVIL}",
    "as a prefix": f"{HOST}.{EVIL}",
    "as a suffix": f"not{HOST}",
    "letters of another script": "s\u0456te.example",  # a Cyrillic i
    "two dots at the end": f"{HOST}..",
    "address of libc": "0x7f.1",
}
# Other spellings of the same host, which reach that host and no other.
ALIKE = {
    "upper case": "SITE.Example",
    "dot at the end": f"{HOST}.",
    "escaped letter": "s%69te.example",
    "fullwidth letters": "\uff53\uff49te.example",
    "ideographic dot": "site\u3002example",
}


def request(form: str, host: str, port: int) -> bytes:
    target = f"{host}:{port}"
    match form:
        case "CONNECT":
            text = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
        case "absolute URI":
            text = f"GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n"
        case "Host":
            text = (
                f"GET http://{HOST}:{port}/ HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n"
            )
        case _:
            raise AssertionError(form)
    return text.encode()


@pytest.mark.parametrize("form", ["CONNECT", "absolute URI", "Host"])
async def test_a_name_that_two_readers_read_differently_reaches_no_host(
    tmp_path: Path, form: str
) -> None:
    async with (
        origin() as site,
        way(
            tmp_path,
            allowing(f"{HOST}:{site.port}", f"*.{HOST}:{site.port}"),
            lambda _: ["127.0.0.1"],
        ) as out,
    ):
        for name, spelling in SPELLINGS.items():
            reply = await out.say(request(form, spelling, site.port))
            assert reply.split(b" ")[1] in (b"400", b"403"), (name, reply)
        assert (site.connections, out.looked_up) == (0, [])


@pytest.mark.parametrize("form", ["absolute URI", "Host"])
@pytest.mark.parametrize("spelling", ALIKE.values(), ids=ALIKE)
async def test_another_spelling_of_an_allowed_host_is_that_host(
    tmp_path: Path, form: str, spelling: str
) -> None:
    async with (
        origin() as site,
        way(tmp_path, allowing(f"{HOST}:{site.port}"), lambda _: ["127.0.0.1"]) as out,
    ):
        reply = await out.say(request(form, spelling, site.port))
        if reply.startswith(b"HTTP/1.1 200"):
            assert out.looked_up == [HOST]
            assert site.heard[0].header("Host") == f"{HOST}:{site.port}".encode()
        else:
            assert (reply[9:12], site.connections) == (b"400", 0)


def client_hello(names: list[bytes], *extensions: tuple[int, bytes]) -> bytes:
    """Return a first message of TLS with these server names and further extensions."""
    entries = b"".join(b"\0" + struct.pack(">H", len(name)) + name for name in names)
    every = [*extensions, (0, struct.pack(">H", len(entries)) + entries)] if names else extensions
    packed = b"".join(struct.pack(">HH", kind, len(data)) + data for kind, data in every)
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    body += struct.pack(">H", len(packed)) + packed
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + struct.pack(">H", len(message)) + message


ECH = (
    0xFE0D,
    b"\0\0\x01\0\x01\0" + struct.pack(">H", 32) + bytes(32) + struct.pack(">H", 16) + bytes(16),
)
TUNNELLED: dict[str, Callable[[int], bytes]] = {
    "no server name": lambda _: client_hello([]),
    "another server name": lambda _: client_hello([EVIL.encode()]),
    "a server name with NUL": lambda _: client_hello([f"{EVIL}\0.{HOST}".encode()]),
    "a server name with LF": lambda _: client_hello([f"{HOST}\n".encode()]),
    "two server names": lambda _: client_hello([HOST.encode(), EVIL.encode()]),
    "two extensions with names": lambda _: client_hello(
        [HOST.encode()], (0, b"\0\x0f\0\0\x0c" + EVIL.encode())
    ),
    "a hidden name and another server name": lambda _: client_hello([EVIL.encode()], ECH),
    "a hidden name and no server name": lambda _: client_hello([], ECH),
    "a second CONNECT": lambda port: f"CONNECT {EVIL}:{port} HTTP/1.1\r\n\r\n".encode(),
    "plain HTTP": lambda _: f"GET http://{EVIL}/ HTTP/1.1\r\nHost: {EVIL}\r\n\r\n".encode(),
    "plain HTTP/2": lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "SOCKS5": lambda _: b"\x05\x01\0",
    "SSH": lambda _: b"SSH-2.0-OpenSSH_9.9\r\n",
    "SMTP": lambda _: b"EHLO x\r\n",
}


@pytest.mark.parametrize("start", TUNNELLED.values(), ids=TUNNELLED)
async def test_a_tunnel_carries_tls_of_its_own_host_only(
    tmp_path: Path, start: Callable[[int], bytes]
) -> None:
    """A relay at an allowed host forwarded a second CONNECT to any host."""
    received, out = await tunnelled(tmp_path, start)
    assert received == b""
    assert (out.decisions[-1].allowed, out.decisions[-1].rule) == (False, "tls.sni")


async def test_a_hidden_server_name_changes_neither_address_nor_check(tmp_path: Path) -> None:
    """Browsers send such an extension at random, so it is no reason to refuse. Its inner name is
    for the server that was checked."""
    hello = client_hello([HOST.encode()], ECH)
    received, out = await tunnelled(tmp_path, lambda _: hello)
    assert received == hello
    assert out.looked_up == [HOST]


async def tunnelled(directory: Path, start: Callable[[int], bytes]) -> tuple[bytes, Way]:
    """Return the bytes that an allowed host received through a tunnel that starts so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        ended.set()

    received: list[bytes] = []
    ended = asyncio.Event()
    async with (
        origin(serve=serve) as site,
        way(
            directory, allowing(f"{HOST}:{site.port}"), {HOST: ["127.0.0.1"], EVIL: ["127.0.0.1"]}
        ) as out,
    ):
        head, (reader, writer) = await out.tunnel(f"{HOST}:{site.port}")
        assert head.startswith(b"HTTP/1.1 200 ")
        with closed(writer):
            writer.write(start(site.port))
            writer.write_eof()
            await until_the_end(reader)
        if site.connections:
            await ended.wait()
    return b"".join(received), out
