"""The matrix of tests/data_matrix.py: the things that an older backup brings back."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from matrix_acts import THINGS, Restarted, cells, check_restarted, restored

ACT = "restore an older backup"
pytestmark = pytest.mark.timeout(400)  # the fixture makes everything


@pytest_asyncio.fixture(scope="module")
async def restarted() -> AsyncIterator[Restarted]:
    async with restored(ACT, older=True) as restarted:
        yield restarted


@pytest.mark.parametrize("thing", [thing for thing, _ in cells(THINGS, (ACT,))])
async def test_cell(restarted: Restarted, thing: str) -> None:
    place, made = restarted
    await check_restarted(place, made[thing], thing, ACT)
