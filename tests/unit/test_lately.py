"""What ended lately: told for so long, within so many bytes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sbx.lately import Lately
from tests.fake_clock import FakeClock


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def lately(clock: FakeClock) -> AsyncIterator[Lately[str, int]]:
    lately = Lately[str, int](clock, seconds=60, size_max=100)
    yield lately
    await lately.close()


async def test_it_is_told_for_its_time_and_then_it_is_let_go(
    lately: Lately[str, int], clock: FakeClock
) -> None:
    lately.keep("first", 1, 10)
    clock.advance(60)
    assert lately.get("first") == 1
    lately.keep("second", 2, 10)
    clock.advance(1)
    assert (lately.get("first"), lately.get("second")) == (None, 2)
    clock.advance(1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (len(lately), lately.size) == (1, 10)
    assert lately.get("second") == 2


async def test_the_oldest_gives_way_to_what_would_be_too_much(lately: Lately[str, int]) -> None:
    for number in range(4):
        lately.keep(str(number), number, 40)
    assert [lately.get(str(number)) for number in range(4)] == [None, None, 2, 3]
    lately.keep("huge", 5, 101)
    assert lately.get("huge") is lately.get("3") is None
    lately.keep("4", 4, 100)
    assert lately.get("4") == 4


async def test_of_one_key_only_the_last_counts_and_once(lately: Lately[str, int]) -> None:
    for number in range(9):
        lately.keep("same", number, 60)
    assert lately.get("same") == 8
    lately.forget("same")
    lately.forget("same")
    lately.keep("other", 9, 100)
    assert (lately.get("same"), lately.get("other")) == (None, 9)


async def test_closed_it_keeps_nothing_and_waits_for_nothing(lately: Lately[str, int]) -> None:
    before = asyncio.all_tasks()
    lately.keep("first", 1, 1)
    await lately.close()
    lately.keep("second", 2, 1)
    assert lately.get("first") is lately.get("second") is None
    assert asyncio.all_tasks() <= before
