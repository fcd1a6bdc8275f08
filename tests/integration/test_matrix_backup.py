"""The matrix of tests/data_matrix.py: everything after a backup and its restoration."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from matrix_acts import THINGS, Restarted, cells, check_restarted, restored

ACT = "backup and restore"
pytestmark = pytest.mark.timeout(400)  # the fixture makes everything


@pytest_asyncio.fixture(scope="module")
async def restarted() -> AsyncIterator[Restarted]:
    async with restored(ACT, older=False) as restarted:
        yield restarted


@pytest.mark.parametrize("thing", [thing for thing, _ in cells(THINGS, (ACT,))])
async def test_cell(restarted: Restarted, thing: str) -> None:
    place, made = restarted
    await check_restarted(place, made[thing], thing, ACT)
