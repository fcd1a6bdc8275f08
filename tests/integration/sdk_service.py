"""The service of shared_services.py over TCP as well, for the SDKs of other products.

sdk     its address and keys: `sdk.url`, `await sdk.key("ann")`
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio
import uvicorn
from live_app import START_S, QuietServer, Served

from sbx.api.server.http_protocol import HttpProtocol


@dataclass(frozen=True)
class SdkService:
    """`host` is host and port of loopback."""

    served: Served
    host: str

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    async def key(self, owner: str) -> str:
        return await self.served.key_of(owner)


@pytest_asyncio.fixture(scope="module")
async def sdk(served: Served) -> AsyncIterator[SdkService]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            served.app,
            http=HttpProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        server = QuietServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            async with asyncio.timeout(START_S):
                while not server.started:  # noqa: ASYNC110  # uvicorn tells it no other way
                    await asyncio.sleep(0.01)
            host, port = listening.getsockname()[:2]
            yield SdkService(served, f"{host}:{port}")
        finally:
            server.should_exit = server.force_exit = True
            await serving
