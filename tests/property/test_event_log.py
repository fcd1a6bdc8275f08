"""Followers of an event log, whatever is appended and dropped while they read."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from sbx.event_log import EventLog
from tests.tiers import examples

# An event (its size, and whether it is droppable), or a turn of the followers.
STEPS = st.lists(st.tuples(st.integers(0, 9), st.booleans()) | st.none(), max_size=30)


@settings(max_examples=examples(100))
@given(STEPS, st.none() | st.integers(0, 20), st.integers(-2, 30))
def test_resumed_follower_gets_the_events_that_were_kept(
    steps: list[tuple[int, bool] | None], size_max: int | None, after: int
) -> None:
    live, resumed, kept = asyncio.run(_run(steps, size_max, after))
    events = [step for step in steps if step is not None]
    assert [number for number, _ in live] == sorted({number for number, _ in live})
    assert all(events[number - 1] == event for number, event in live)
    assert resumed == [entry for entry in kept if entry[0] > after]
    assert set(kept) <= set(live) or size_max is None
    if size_max is None:
        assert kept == live == list(enumerate(events, 1))
    else:
        size = sum(event[0] for _, event in kept)
        assert size <= size_max or len(kept) == 1
        assert bool(kept) == bool(events)


Entries = list[tuple[int, tuple[int, bool]]]


async def _run(
    steps: list[tuple[int, bool] | None], size_max: int | None, after: int
) -> tuple[Entries, Entries, Entries]:
    """Return the events that a follower got live, later from `after` on, and later in full."""
    log = EventLog[tuple[int, bool]](size_max)

    async def follow(after: int) -> Entries:
        return [entry async for entry in log.follow(after)]

    live = asyncio.create_task(follow(0))
    for step in steps:
        if step is None:
            await asyncio.sleep(0)
        else:
            log.append(step, step[0], droppable=step[1])
    log.close()
    return await live, await follow(after), await follow(0)
