"""The matrix of tests/data_matrix.py: sandboxes, sessions, and the things in them."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from matrix_acts import LIVE, cells, check_live
from matrix_places import Place, live_place

THINGS = (
    "session",
    "conversation",
    "upload",
    "context",
    "file",
    "run",
    "command",
    "terminal",
    "grant",
    "token",
    "link",
)


@pytest_asyncio.fixture(scope="module")
async def place() -> AsyncIterator[Place]:
    async with live_place() as place:
        yield place


@pytest.mark.parametrize(("thing", "act"), cells(THINGS, LIVE))
async def test_cell(place: Place, thing: str, act: str) -> None:
    await check_live(place, thing, act)
