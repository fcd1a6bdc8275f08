"""A real service behind a real Unix socket, served by uvicorn in the test's own loop.

    async with live(tmp_path) as served:
        async with served.client() as client:
            reply = await client.get("/v1/sandboxes")

The fixtures `served` and `client` of shared_services.py share one service among all tests of a
process, and leave it without sandboxes after each module. Serve another one to configure, count or
close it.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from sbx.agent.settings import AgentSettings
from sbx.aio import Clock
from sbx.api.app import create_app
from sbx.api.server.http_protocol import KEEP_ALIVE_S, HttpProtocol
from sbx.api.server.settings import ServiceSettings
from sbx.service.service import Service

START_S = 60.0


class QuietServer(uvicorn.Server):
    """Takes no signals: they are the test runner's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class Served:
    """What is served, and how to reach it."""

    service: Service
    app: FastAPI
    socket: Path

    def client(self, key: str | None = None, **more: Any) -> httpx.AsyncClient:
        """Over the socket; without a `key` as the peer, which is the operator."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        return httpx.AsyncClient(
            transport=transport, base_url="http://sbx", headers=headers, timeout=60, **more
        )

    async def key_of(self, owner: str, *, operator: bool = False) -> str:
        _, text = await self.service.access.make_key(owner, operator=operator)
        return text

    async def empty(self) -> None:
        """Delete every sandbox, of every owner."""
        for one in list(self.service.sandboxes.every()):
            await self.service.sandboxes.end(one, "requested")

    async def raw(self, data: bytes, *, then_end: bool = False, within_s: float = 30.0) -> bytes:
        """Send bytes as they are; all that comes back until the service closes the connection."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            async with asyncio.timeout(within_s):
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    await writer.drain()
                    if then_end:
                        writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    return await reader.read()
                return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def live(
    directory: Path,
    *,
    clock: Clock | None = None,
    agent: AgentSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve a new service whose data lie in `directory`; `agent` names a model."""
    chosen = ServiceSettings(data_dir=directory / "data", socket=directory / "sbx.sock", **settings)
    async with Service(chosen, clock=clock or Clock()) as service:
        app = create_app(service, chosen, agent)
        async with serving(app, uds=str(chosen.socket)):
            yield Served(service, app, chosen.socket)


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI,
    *,
    uds: str | None = None,
    sockets: list[socket.socket] | None = None,
    most: int | None = None,
) -> AsyncIterator[None]:
    """Serve the app on a Unix socket, or on sockets that listen already, with at most so many
    connections."""
    config = uvicorn.Config(
        app,
        uds=uds,
        http=HttpProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=most,
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=sockets))
    try:
        async with asyncio.timeout(START_S):
            while not server.started:  # noqa: ASYNC110  # uvicorn tells it no other way
                await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task
