"""A service with the listeners of the console: `console.sock` and an address of TCP.

console     the fixture; `await console.login()` gives a browser's cookie
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from live_app import Served, serving
from places import short_directory

from sbx.agent.settings import AgentSettings
from sbx.aio import Clock
from sbx.api.app import create_app
from sbx.api.console.listener import ConsoleListener, address_of
from sbx.api.server.settings import ServiceSettings
from sbx.service.service import Service


@dataclass(frozen=True)
class Reply:
    """A reply as it came over the socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        code: str = self.json["error"]["code"]
        return code


@dataclass(frozen=True)
class Console:
    """`name` and `port` are those of the permanent listener; `path` is the Unix socket."""

    served: Served
    name: str
    port: int
    path: Path
    cookies: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"{self.name}:{self.port}"

    @property
    def origin(self) -> str:
        return f"http://{self.host}"

    @property
    def frames(self) -> str:
        return f"{self.name.replace('.', '-out.', 1)}:{self.port}"

    async def send(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: Any = None,
        *,
        unix: bool = False,
        raw: bytes | None = None,
    ) -> Reply:
        """Send one request as exactly these bytes, and read the whole reply."""
        content = b"" if body is None else json.dumps(body).encode()
        fields = {"Host": self.host, "Connection": "close", **(headers or {})}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        present = {name: value for name, value in fields.items() if value is not None}
        head = "".join(f"{name}: {value}\r\n" for name, value in present.items())
        sent = raw or f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + content
        if unix:
            reader, writer = await asyncio.open_unix_connection(str(self.path))
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(30):
                writer.write(sent)
                await writer.drain()
                answer = await reader.read()
        finally:
            writer.close()
        first, _, rest = answer.partition(b"\r\n\r\n")
        lines = first.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:])
        named = {name.lower(): value.strip() for name, _, value in pairs}
        if named.get("transfer-encoding") == "chunked":
            rest = _joined(rest)
        return Reply(int(lines[0].split()[1]), named, rest)

    def page(self, cookie: str | None = None, **more: str) -> dict[str, str]:
        """The headers of a request that the page of the console sends."""
        headers = {"Origin": self.origin, "X-Sbx-Console": "1", "Sec-Fetch-Site": "same-origin"}
        if cookie is not None:
            headers["Cookie"] = f"sbx_console={cookie}"
        return headers | more

    async def code(self, client: httpx.AsyncClient | None = None, **new: Any) -> str:
        """A code for the operator, or for the caller of a client."""
        if client is None:
            async with self.served.client() as operator:
                return await self.code(operator, **new)
        reply = await client.post("/api/v1/console/codes", json=new)
        assert reply.status_code == 201, reply.text
        code: str = reply.json()["code"]
        return code

    async def login(self, client: httpx.AsyncClient | None = None, **new: Any) -> str:
        code = await self.code(client, **new)
        reply = await self.send("POST", "/api/v1/console/login", self.page(), {"code": code})
        assert reply.status == 200, reply.body
        return reply.headers["set-cookie"].partition("=")[2].partition(";")[0]

    async def get(self, target: str, cookie: str, **headers: str) -> Reply:
        return await self.send("GET", target, self.page(cookie, **headers))

    async def call(self, method: str, target: str, cookie: str, body: Any = None) -> Reply:
        return await self.send(method, target, self.page(cookie), body)


def _joined(chunked: bytes) -> bytes:
    whole = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        count = int(size, 16)
        whole += rest[:count]
        chunked = rest[count + 2 :]
        if count == 0:
            break
    return whole


@asynccontextmanager
async def console_service(
    directory: Path,
    *,
    clock: Clock | None = None,
    agent: AgentSettings | None = None,
    port: int = 0,
    **settings: Any,
) -> AsyncIterator[Console]:
    chosen = ServiceSettings(data_dir=directory / "data", socket=directory / "sbx.sock", **settings)
    assert chosen.console_path is not None
    with (
        socket.socket(socket.AF_UNIX) as programs,
        socket.socket(socket.AF_UNIX) as browsers,
        socket.create_server(("127.0.0.1", port)) as tcp,
    ):
        for sock, path in ((programs, chosen.socket), (browsers, chosen.console_path)):
            path.unlink(missing_ok=True)
            sock.bind(str(path))
        async with Service(chosen, clock=clock or Clock()) as service:
            listener = ConsoleListener(
                await service.console.name(), str(chosen.console_path), address_of(tcp)
            )
            app = create_app(service, chosen, agent, listener)
            async with serving(app, sockets=[programs, browsers, tcp]):
                yield Console(
                    Served(service, app, chosen.socket),
                    listener.name,
                    address_of(tcp)[1],
                    chosen.console_path,
                )


@pytest_asyncio.fixture(scope="module")
async def console() -> AsyncIterator[Console]:
    with short_directory() as directory:
        async with console_service(directory) as console:
            yield console
