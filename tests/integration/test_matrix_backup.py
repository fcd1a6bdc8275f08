"""The matrix of tests/data_matrix.py: everything after a backup and its restoration, and what an
older backup brings back of deleted things."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from matrix_acts import THINGS, Made, begin_all, cells, check_restarted, delete_all, made_all
from matrix_places import Place, process

from tests.data_matrix import cell_of

ACTS = ("backup and restore", "restore an older backup")
pytestmark = pytest.mark.timeout(400)  # the fixture makes everything
Restarted = tuple[Place, dict[str, Made]]


@pytest_asyncio.fixture(scope="module", params=ACTS)
async def restored(request: pytest.FixtureRequest) -> AsyncIterator[Restarted]:
    async with process() as running, AsyncExitStack() as held:
        place = await running.start()
        made = await made_all(place, request.param, held)
        if request.param == "backup and restore":
            await begin_all(made)
        for name, each in made.items():  # runs are recorded soon after their reply
            if each.thing is not None:
                await place.where(each.thing.mark, cell_of(name, "backup and restore").disk)
        running.store("backup", place.top / "kept")
        if request.param != "backup and restore":
            await delete_all(made)
        await running.end()
        running.store("restore", place.top / "kept")
        yield await running.start(), made


@pytest.mark.parametrize(
    ("restored", "thing", "act"),
    [(act, thing, act) for act in ACTS for thing, _ in cells(THINGS, (act,))],
    indirect=["restored"],
    scope="module",
)
async def test_cell(restored: Restarted, thing: str, act: str) -> None:
    place, made = restored
    await check_restarted(place, made[thing], thing, act)
