"""Every test here runs twice: embedded, and connected to a service on a real socket."""

from collections.abc import AsyncIterator, Iterator

import pytest

from both_faces.faces import FACES, Box, Make, asynchronous, blocking
from sbx import Sandbox


@pytest.fixture(scope="module", params=FACES)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with blocking(request.param) as make:
        yield make


@pytest.fixture(scope="module")
def cells(make: Make) -> Iterator[Sandbox]:
    """One sandbox for all tests that leave its kernel usable."""
    with make() as box:
        yield box


@pytest.fixture(params=FACES)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    async with asynchronous(request.param) as box:
        yield box
