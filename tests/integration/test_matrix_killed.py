"""The matrix of tests/data_matrix.py: everything after `kill -9` of the service and a new start."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from matrix_acts import THINGS, Made, begin_all, cells, check_restarted, made_all
from matrix_places import Place, process

ACT = "kill -9 and restart"
pytestmark = pytest.mark.timeout(400)  # the fixture makes everything
Restarted = tuple[Place, dict[str, Made]]


@pytest_asyncio.fixture(scope="module")
async def restarted() -> AsyncIterator[Restarted]:
    async with process() as running, AsyncExitStack() as held:
        made = await made_all(await running.start(), ACT, held)
        await begin_all(made)
        running.kill()
        yield await running.start(), made


@pytest.mark.parametrize("thing", [thing for thing, _ in cells(THINGS, (ACT,))])
async def test_cell(restarted: Restarted, thing: str) -> None:
    place, made = restarted
    await check_restarted(place, made[thing], thing, ACT)
