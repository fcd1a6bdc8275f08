"""The matrix of tests/data_matrix.py: everything after a backup and its restoration."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from matrix_acts import THINGS, Made, cells, check_restarted, made_all
from matrix_places import Place, process

from tests.data_matrix import cell_of

ACT = "backup and restore"
pytestmark = pytest.mark.timeout(400)  # the fixture makes everything
Restarted = tuple[Place, dict[str, Made]]


@pytest_asyncio.fixture(scope="module")
async def restored() -> AsyncIterator[Restarted]:
    async with process() as running, AsyncExitStack() as held:
        place = await running.start()
        made = await made_all(place, ACT, held)
        for name, each in made.items():  # runs are recorded soon after their reply
            if each.thing is not None:
                await place.where(each.thing.mark, cell_of(name, ACT).disk)
        running.store("backup", place.top / "kept")
        await running.end()
        running.store("restore", place.top / "kept")
        yield await running.start(), made


@pytest.mark.parametrize("thing", [thing for thing, _ in cells(THINGS, (ACT,))])
async def test_cell(restored: Restarted, thing: str) -> None:
    place, made = restored
    await check_restarted(place, made[thing], thing, ACT)
