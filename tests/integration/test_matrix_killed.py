"""The matrix of tests/data_matrix.py: everything after `kill -9` of the service and a new start."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from matrix_acts import THINGS, Restarted, cells, check_restarted, killed

ACT = "kill -9 and restart"
pytestmark = pytest.mark.timeout(400)  # the fixture makes everything


@pytest_asyncio.fixture(scope="module")
async def restarted() -> AsyncIterator[Restarted]:
    async with killed(ACT) as restarted:
        yield restarted


@pytest.mark.parametrize("thing", [thing for thing, _ in cells(THINGS, (ACT,))])
async def test_cell(restarted: Restarted, thing: str) -> None:
    place, made = restarted
    await check_restarted(place, made[thing], thing, ACT)
