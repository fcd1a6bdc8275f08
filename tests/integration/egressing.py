"""An egress proxy between a client and servers of our own, all over real sockets.

The servers are on the loopback, at 127.0.0.1 or .2; names lead where the test says. What stands
between is what a sandbox has: the Unix socket of an `Egress`.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from sbx.egress import Egress, EgressDecision, Secret, Timeouts
from sbx.egress.proxy import SOCKET
from sbx.policy.grants import Grants
from sbx.policy.tables import Network

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
LONG_S = 60


@dataclass(frozen=True)
class Heard:
    """A request as a server heard it."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def header(self, name: str) -> bytes | None:
        found = re.search(rb"(?im)^" + name.encode() + rb": *(.*?)\r$", self.head)
        return found and found[1]


@dataclass
class Origin:
    """A server outside. `answer` makes a reply, of which it sends what it is."""

    port: int
    heard: list[Heard] = field(default_factory=list)
    connections: int = 0


def reply(body: bytes = b"hello", *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@asynccontextmanager
async def origin(
    answer: Callable[[Heard], bytes] = lambda _: reply(),
    *,
    tls: ssl.SSLContext | None = None,
    address: str = "127.0.0.1",
    port: int = 0,
    serve: Serve | None = None,
) -> AsyncIterator[Origin]:
    """A server of HTTP, or of whatever `serve` does with a connection."""
    known = Origin(0)
    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            if serve is not None:
                await serve(reader, writer)
            else:
                while True:
                    heard = await hear(reader, writer)
                    known.heard.append(heard)
                    writer.write(answer(heard))
                    await writer.drain()
                    if heard.header("Connection") == b"close":
                        break
        writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(talk(reader, writer))
        tasks.add(task)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(begin, address, port, ssl=tls)
    known.port = server.sockets[0].getsockname()[1]
    try:
        yield known
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
        await asyncio.sleep(0)  # TLS takes a turn of the loop to close


async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Heard:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"expect: 100-continue" in head.lower():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = b""
    if found := re.search(rb"(?im)^content-length: *(\d+)", head):
        body = await reader.readexactly(int(found[1]))
    elif re.search(rb"(?im)^transfer-encoding: *chunked", head):
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return Heard(head, body)


@dataclass
class Way:
    """The way out of a sandbox, and what was recorded of it."""

    egress: Egress
    socket: Path
    decisions: list[EgressDecision]
    looked_up: list[str]

    @property
    def inside(self) -> ssl.SSLContext:
        """What a client inside trusts where TLS ends at the proxy."""
        assert self.egress.certificates is not None
        return ssl.create_default_context(cadata=self.egress.certificates.decode())

    async def open(self) -> Streams:
        """A connection as the relay inside makes it."""
        fd = os.open(self.socket.parent, os.O_PATH)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:  # by the descriptor: the paths of tests are too long for the address of a socket
            path = f"/proc/self/fd/{fd}/{self.socket.name}"
            await asyncio.get_running_loop().sock_connect(sock, path)
        except BaseException:
            sock.close()
            raise
        finally:
            os.close(fd)
        return await asyncio.open_connection(sock=sock)

    async def say(self, said: bytes) -> bytes:
        """All that is answered to these bytes, until the proxy closes."""
        reader, writer = await self.open()
        with closed(writer):
            writer.write(said)
            return await until_the_end(reader)

    async def get(self, url: str, *headers: str, method: str = "GET", body: str = "") -> bytes:
        """One request to the proxy for plain HTTP."""
        host = url.removeprefix("http://").partition("/")[0]
        lines = [f"{method} {url} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return await self.say("\r\n".join([*lines, "", body]).encode())

    async def tunnel(self, to: str) -> tuple[bytes, Streams]:
        """The head of the reply to a CONNECT, and the connection."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n".encode())
        async with asyncio.timeout(LONG_S):
            return await reader.readuntil(b"\r\n\r\n"), (reader, writer)

    @asynccontextmanager
    async def tls(self, to: str, trust: ssl.SSLContext) -> AsyncIterator[Streams]:
        """TLS through a CONNECT, as a client inside has it."""
        said, (reader, writer) = await self.tunnel(to)
        with closed(writer):
            assert said.startswith(b"HTTP/1.1 200 "), said
            async with asyncio.timeout(LONG_S):
                await writer.start_tls(trust, server_hostname=to.rpartition(":")[0])
            yield reader, writer

    async def ask(
        self, to: str, trust: ssl.SSLContext, path: str, *headers: str, body: str = ""
    ) -> bytes:
        """One request of HTTPS."""
        async with self.tls(to, trust) as (reader, writer):
            method = "POST" if body else "GET"
            lines = [f"{method} {path} HTTP/1.1", f"Host: {to}", "Connection: close", *headers]
            if body:
                lines.append(f"Content-Length: {len(body)}")
            writer.write("\r\n".join([*lines, "", body]).encode())
            return await until_the_end(reader)


@contextlib.contextmanager
def closed(writer: asyncio.StreamWriter) -> Any:
    try:
        yield
    finally:
        writer.transport.abort()


async def until_the_end(reader: asyncio.StreamReader) -> bytes:
    read = b""
    async with asyncio.timeout(LONG_S):
        with suppress(ConnectionResetError, ssl.SSLError):
            while piece := await reader.read(1 << 20):
                read += piece
    return read


def refusal(said: bytes) -> dict[str, str]:
    """What a refused request is told, with its status."""
    head = said.partition(b"\r\n\r\n")[0].decode()
    found = re.search(r"(?m)^Sbx-Egress: (.*)\r?$", head)
    assert found, head
    return {"status": head.split(" ", 2)[1], **json.loads(found[1])}


@asynccontextmanager
async def way(
    directory: Path,
    network: Network,
    names: Mapping[str, list[str]] | Callable[[str], list[str]],
    *,
    secrets: Mapping[str, Secret] | None = None,
    patience: Timeouts | None = None,
    outside: ssl.SSLContext | None = None,
    honeytokens: Callable[[str], str | None] | None = None,
    need_grant: Collection[str] = (),
    grants: Grants | None = None,
) -> AsyncIterator[Way]:
    """An open proxy, for which names lead where `names` says."""
    decisions: list[EgressDecision] = []
    looked_up: list[str] = []

    async def lookup(host: str, port: int) -> list[str]:
        looked_up.append(host)
        found = names(host) if callable(names) else names.get(host, [])
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return found

    egress = await Egress.open(
        "box",
        network,
        secrets or {},
        need_grant=need_grant,
        record=decisions.append,
        lookup=lookup,
        patience=patience,
        outside=outside,
        honeytokens=honeytokens,
    )
    try:
        egress.listen(directory / "egress", None, grants)
        yield Way(egress, directory / "egress" / SOCKET, decisions, looked_up)
    finally:
        await egress.close()


def allowing(*hosts: str, **more: Any) -> Network:
    """A policy for these hosts, which may be on the loopback."""
    return Network(mode="proxy", allow=hosts, **{"allow_private": ("127.0.0.0/8",), **more})


class Certificates:
    """An authority of the world outside, which only these tests trust."""

    def __init__(self) -> None:
        self._authority = trustme.CA()
        self.trust = ssl.create_default_context(cadata=self._authority.cert_pem.bytes().decode())

    def server(self, *names: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(*names).configure_cert(context)
        return context
