"""Every test here runs twice: embedded, and connected to a service on a real socket. A synchronous
one needs the service of another process, as nothing runs in the loop of the tests meanwhile."""

from collections.abc import AsyncIterator, Iterator

import pytest
from live_app import Served
from serving import Service

from both_faces.faces import FACES, Box, Make, blocking
from sbx import Runtime, Sandbox
from sbx.client import Client


@pytest.fixture(scope="module", params=FACES)
def make(request: pytest.FixtureRequest, service: Service) -> Iterator[Make]:
    with blocking(request.param, service.socket) as make:
        yield make


@pytest.fixture(scope="module")
def cells(make: Make) -> Iterator[Sandbox]:
    """One sandbox for all tests that leave its kernel usable."""
    with make() as box:
        yield box


@pytest.fixture(params=FACES)
async def box(
    request: pytest.FixtureRequest, runtime: Runtime, served: Served
) -> AsyncIterator[Box]:
    if request.param == "embedded":
        async with await runtime.create() as box:
            yield box
        return
    async with Client(served.socket) as client, await client.create() as box:
        yield box
