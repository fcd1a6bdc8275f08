"""The event log: numbers, followers, its end and its limit."""

import asyncio

import pytest

from sbx.errors import Unavailable
from sbx.event_log import ChangeSignal, EventLog


async def followed(log: EventLog[str], after: int = 0) -> list[tuple[int, str]]:
    return [entry async for entry in log.follow(after)]


def log_of(*events: str) -> EventLog[str]:
    log = EventLog[str]()
    for event in events:
        log.append(event)
    return log


async def test_numbers_begin_at_1_and_stay_the_same() -> None:
    log = log_of("a", "b", "c")
    log.close()
    assert await followed(log) == [(1, "a"), (2, "b"), (3, "c")]
    assert await followed(log, after=2) == [(3, "c")]
    assert await followed(log, after=-5) == await followed(log)


async def test_followers_receive_later_events_until_the_end() -> None:
    log = log_of("a")
    early, late = (asyncio.create_task(followed(log, after)) for after in (0, 2))
    await asyncio.sleep(0)
    for event in ("b", "c"):
        log.append(event)
        await asyncio.sleep(0)
    log.close()
    assert await early == [(1, "a"), (2, "b"), (3, "c")]
    assert await late == [(3, "c")]


async def test_number_beyond_the_newest_waits_for_later_events() -> None:
    log = log_of("a")
    follower = asyncio.create_task(followed(log, after=3))
    for event in ("b", "c", "d", "e"):
        await asyncio.sleep(0)
        log.append(event)
    log.close()
    assert await follower == [(4, "d"), (5, "e")]


async def test_follower_of_a_failed_run_gets_events_then_the_error() -> None:
    log = log_of("a")
    log.close(Unavailable("no kernel"))
    assert await log.next(0) == (1, "a")
    with pytest.raises(Unavailable):
        await followed(log)
    await log.wait_closed()


async def test_wait_closed_ignores_events() -> None:
    log = log_of()
    end = asyncio.create_task(log.wait_closed())
    log.append("a")
    await asyncio.sleep(0)
    assert not end.done()
    log.close()
    await end


async def test_read_returns_a_page_and_nothing_at_the_end() -> None:
    log = log_of("a", "b", "c")
    log.close()
    assert await log.read(0, 2) == ["a", "b"]
    assert await log.read(2, 2) == ["c"]
    assert await log.read(3, 2) == []


async def test_log_beyond_its_limit_drops_droppable_events_first() -> None:
    log = EventLog[str](size_max=5000)
    for number in range(1, 21):
        log.append("x", 500, droppable=number % 2 == 0)
    log.close()
    assert log.size <= 5000
    assert log.last == 20
    assert [number for number, _ in await followed(log)] == list(range(1, 21, 2))


async def test_log_without_droppable_events_drops_the_oldest() -> None:
    log = EventLog[str](size_max=3)
    for event in "abcde":
        log.append(event, 1)
    log.append("large", 100)
    log.close()
    assert await followed(log) == [(6, "large")]


async def test_change_during_a_read_is_not_missed() -> None:
    changes = ChangeSignal()
    change = changes.next
    changes.notify()
    await change.wait()
    assert not changes.next.is_set()
