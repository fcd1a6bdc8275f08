"""The service of shared_services.py over TCP as well, for the SDKs of other products.

sdk     its address and keys: `sdk.url`, `await sdk.key("ann")`
"""

import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio
from live_app import Served, serving


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
        # Its connections inherit the option. Those of `sbx serve` have it from asyncio, which
        # recognizes TCP by the protocol number of the socket; create_server leaves it out.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with serving(served.app, sockets=[listening]):
            host, port = listening.getsockname()[:2]
            yield SdkService(served, f"{host}:{port}")
