"""The zygotes of one policy, one after the other: with zygotes of paper and a clock set by hand."""

import asyncio
from typing import Any, cast

import pytest
from manual_clock import ManualClock

from sbx.errors import SbxError, Unavailable
from sbx.isolation.broker.jail import Jail, ZygoteHandle
from sbx.kernels.pool import zygotes
from sbx.kernels.pool.zygotes import ZygoteGroup


class PaperJail:
    kernel_pid = None
    zygote = None


class PaperZygote:
    """Forks jails of paper; `breaks` makes it fail."""

    def __init__(self) -> None:
        self.forks = 0
        self.may_fork = asyncio.Event()
        self.may_fork.set()
        self.in_flight = 0
        self.breaks: SbxError | None = None
        self._gone = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._gone.done()

    async def gone(self) -> str:
        return cast("str", await asyncio.shield(self._gone))

    async def fork(self, *, ahead: bool = False) -> Jail:
        self.forks += 1
        self.in_flight += 1
        await asyncio.sleep(0)
        await self.may_fork.wait()
        self.in_flight -= 1
        if not self.alive:
            raise Unavailable("the zygote ended", code="zygote_gone")
        if self.breaks is not None:
            raise self.breaks
        return cast("Jail", PaperJail())

    async def idle(self) -> None:
        while self.in_flight:
            await self.may_fork.wait()
            await asyncio.sleep(0)

    async def retire(self) -> None:
        self.die()

    def die(self) -> None:
        if self.alive:
            self._gone.set_result("killed")


class Nursery:
    """Starts zygotes of paper and keeps all it ever started."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.made: list[PaperZygote] = []
        self.ends = 0
        self.fails: SbxError | None = None
        self.starts = 0
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.lineage = ZygoteGroup(self._start, self.clock.loop, self._ended)

    async def _start(self) -> ZygoteHandle:
        self.starts += 1
        await self.may_start.wait()
        if self.fails is not None:
            raise self.fails
        self.made.append(PaperZygote())
        return cast("ZygoteHandle", self.made[-1])

    def _ended(self) -> None:
        self.ends += 1

    @property
    def alive(self) -> list[bool]:
        return [zygote.alive for zygote in self.made]


@pytest.fixture
async def nursery() -> Any:
    nursery = Nursery()
    yield nursery
    await nursery.lineage.close()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_who_come_at_first_wait_for_one_zygote(nursery: Nursery) -> None:
    await asyncio.gather(*(nursery.lineage.fork() for _ in range(20)))
    assert nursery.starts == 1
    assert nursery.made[0].forks == 20


async def test_start_goes_on_for_the_others_when_the_first_gives_up(nursery: Nursery) -> None:
    nursery.may_start.clear()
    first, second = (asyncio.create_task(nursery.lineage.fork()) for _ in range(2))
    await turns()
    first.cancel()
    nursery.may_start.set()
    assert await second
    assert first.cancelled()
    assert nursery.starts == 1


async def test_failed_start_is_told_to_all_and_not_repeated_before_its_time(
    nursery: Nursery,
) -> None:
    nursery.fails = Unavailable("a preload leaves a thread", code="zygote_failed")
    answer = await asyncio.gather(
        *(nursery.lineage.fork() for _ in range(3)), return_exceptions=True
    )
    assert answer == [nursery.fails] * 3
    with pytest.raises(Unavailable, match="leaves a thread; not tried again for 1 s") as early:
        await nursery.lineage.fork()
    assert early.value.code == "zygote_unavailable"
    nursery.clock.advance(1)
    nursery.fails = None
    assert await nursery.lineage.fork()
    assert nursery.starts == 2


async def test_delay_grows_with_every_start_that_fails(nursery: Nursery) -> None:
    nursery.fails = Unavailable("no", code="zygote_failed")
    delays = []
    for _ in range(5):
        with pytest.raises(Unavailable):
            await nursery.lineage.fork()
        await turns()
        delays.append(nursery.lineage.rests_s)
        nursery.clock.advance(delays[-1])
    assert delays == [1, 2, 4, 8, 16]


async def test_zygote_that_served_for_long_and_dies_is_replaced_at_once(nursery: Nursery) -> None:
    await nursery.lineage.fork()
    nursery.clock.advance(100)
    nursery.made[0].die()
    await turns()
    assert nursery.ends == 1
    assert nursery.lineage.rests_s == 0
    await nursery.lineage.fork()
    assert nursery.alive == [False, True]


async def test_many_forks_that_fail_together_count_as_one_failure(nursery: Nursery) -> None:
    await nursery.lineage.fork()
    nursery.made[0].breaks = Unavailable("no memory", code="launch_failed")
    tries = (nursery.lineage.fork() for _ in range(9))
    answer = await asyncio.gather(*tries, return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in answer)
    assert nursery.lineage.rests_s == 1
    assert nursery.alive == [False]


async def test_worn_zygote_forks_on_until_its_successor_is_there(nursery: Nursery) -> None:
    await nursery.lineage.fork()
    nursery.clock.advance(3600)
    nursery.may_start.clear()
    nursery.lineage.tend()
    await turns()
    await nursery.lineage.fork()
    assert [zygote.forks for zygote in nursery.made] == [2]
    nursery.may_start.set()
    await turns()
    await nursery.lineage.fork()
    assert [zygote.forks for zygote in nursery.made] == [2, 1]
    assert nursery.alive == [False, True]
    assert nursery.ends == 0


async def succeeded(nursery: Nursery) -> asyncio.Task[Jail]:
    """A worn zygote has a successor, while a fork from it is still in flight: that fork."""
    await nursery.lineage.fork()
    nursery.made[0].may_fork.clear()
    fork = asyncio.create_task(nursery.lineage.fork())
    await turns()
    nursery.clock.advance(3600)
    nursery.lineage.tend()
    await turns()
    assert len(nursery.made) == 2
    return fork


async def test_zygote_that_is_replaced_first_ends_what_it_forks(nursery: Nursery) -> None:
    fork = await succeeded(nursery)
    assert nursery.alive == [True, True]
    nursery.made[0].may_fork.set()
    assert await fork
    await turns()
    assert nursery.alive == [False, True]
    assert nursery.lineage.rests_s == 0


async def test_zygote_that_never_ends_its_fork_is_retired_in_the_end(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "_IN_FLIGHT_S", 0.01)
    fork = await succeeded(nursery)
    async with asyncio.timeout(60):
        await nursery.made[0].gone()
    assert nursery.alive == [False, True]
    fork.cancel()


async def test_close_ends_also_a_zygote_that_still_forks(nursery: Nursery) -> None:
    fork = await succeeded(nursery)
    await nursery.lineage.close()
    assert nursery.alive == [False, False]
    fork.cancel()


async def test_closed_lineage_replaces_nothing(nursery: Nursery) -> None:
    await nursery.lineage.fork()
    nursery.clock.advance(3600)
    closing = asyncio.create_task(nursery.lineage.close())
    await asyncio.sleep(0)
    nursery.lineage.tend()
    await closing
    assert nursery.starts == 1


async def test_worn_zygote_serves_on_when_no_successor_can_be_had(nursery: Nursery) -> None:
    await nursery.lineage.fork()
    nursery.clock.advance(3600)
    nursery.fails = Unavailable("no", code="zygote_failed")
    nursery.lineage.tend()
    await turns()
    nursery.lineage.tend()
    await turns()
    assert await nursery.lineage.fork()
    assert (nursery.starts, nursery.alive) == (2, [True])


async def test_closed_lineage_has_no_zygote_and_starts_none(nursery: Nursery) -> None:
    await nursery.lineage.fork()
    await nursery.lineage.close()
    assert nursery.alive == [False]
    with pytest.raises(Unavailable):
        await nursery.lineage.fork()
    assert nursery.starts == 1


async def test_closing_ends_a_start_and_whoever_waits_for_it_is_told(nursery: Nursery) -> None:
    nursery.may_start.clear()
    waiting = asyncio.create_task(nursery.lineage.fork())
    await turns()
    await nursery.lineage.close()
    with pytest.raises(Unavailable):
        await waiting
    assert nursery.made == []
