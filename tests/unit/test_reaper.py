"""One round of the reaper does everything that is due, and nothing else."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from sbx.errors import Broken
from sbx.runtime.settings import Settings
from sbx.service.models import TaskReport
from sbx.service.reaper import ROUND_S, Reaper
from sbx.service.reserve import Reserve
from tests.fake_clock import FakeClock

TOTAL = 10_000


@dataclass
class One:
    """A sandbox, as the reaper sees it."""

    expired: bool = False
    over: bool = False
    idle: bool = False
    fails: Exception | None = None
    done: list[str] = field(default_factory=list)

    def announce_expiry(self) -> None:
        pass

    async def expire(self) -> None:
        self.done.append("expire")
        if self.fails is not None:
            raise self.fails

    async def stop_idle(self) -> None:
        self.done.append("stop_idle")


class Sandboxes:
    """Sandboxes with a number of idle kernels, each of which has 100 bytes."""

    def __init__(self, *every: One, idle: int = 0) -> None:
        self._every = every
        self.idle = idle
        self.ended: list[str] = []
        self.collected = 0
        self.kernels = self
        self.go = asyncio.Event()

    def every(self) -> list[One]:
        return list(self._every)

    async def evict_one(self, why: str) -> bool:
        if not self.idle:
            return False
        self.idle -= 1
        self.ended.append(why)
        return True

    async def collect(self) -> list[TaskReport]:
        """Stand in for the garbage collector too."""
        self.collected += 1
        await self.go.wait()
        return []


def reaper(sandboxes: Sandboxes, clock: FakeClock, tmp_path: Path, **given: Any) -> Reaper:
    chosen = {"gc_interval": 0, "memory_reserve": 500} | given.pop("settings", {})
    settings = Settings(data_dir=tmp_path, **chosen)
    return Reaper(cast("Any", sandboxes), clock, settings, garbage=cast("Any", sandboxes), **given)


def plenty() -> tuple[int, int]:
    return TOTAL, TOTAL


async def test_expired_sandboxes_end_once_and_idle_ones_stop(tmp_path: Path) -> None:
    fresh, expired, over = One(), One(expired=True), One(expired=True, over=True)
    idle, broken = One(idle=True), One(expired=True, fails=Broken("it cannot end"))
    everyone = Sandboxes(fresh, broken, expired, over, idle)
    await reaper(everyone, FakeClock(), tmp_path, available=plenty).round()
    done = [one.done for one in (fresh, expired, over, idle, broken)]
    assert done == [[], ["expire"], [], ["stop_idle"], ["expire"]]


@pytest.mark.parametrize(("available", "ended"), [(500, 0), (499, 1), (201, 3), (0, 4)])
async def test_idle_kernels_end_until_the_reserve_of_memory_is_available(
    tmp_path: Path, available: int, ended: int
) -> None:
    sandboxes = Sandboxes(idle=4)
    now = lambda: (available + 100 * len(sandboxes.ended), TOTAL)  # noqa: E731
    await reaper(sandboxes, FakeClock(), tmp_path, available=now).round()
    assert sandboxes.ended == ["memory_pressure"] * ended


async def test_a_tenth_of_the_memory_is_the_reserve_by_default(tmp_path: Path) -> None:
    for available, ended in ((TOTAL // 10, 0), (TOTAL // 10 - 1, 1)):
        sandboxes = Sandboxes(idle=1)
        settings = {"memory_reserve": None}
        now = (available, TOTAL)
        await reaper(
            sandboxes, FakeClock(), tmp_path, available=lambda now=now: now, settings=settings
        ).round()
        assert len(sandboxes.ended) == ended


async def test_memory_that_cannot_be_read_ends_no_kernel(tmp_path: Path) -> None:
    def unreadable() -> tuple[int, int]:
        raise KeyError("MemAvailable")

    sandboxes = Sandboxes(idle=1)
    await reaper(sandboxes, FakeClock(), tmp_path, available=unreadable).round()
    assert sandboxes.ended == []


async def test_reserve_of_the_disk_is_allocated_again_once_there_is_room(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve")
    try:
        whole = reserve.allocated
        assert reserve.give_up()
        assert reserve.full
        assert reserve.allocated < whole
        made = reaper(Sandboxes(), FakeClock(), tmp_path, available=plenty, reserve=reserve)
        await made.round()
        assert not reserve.full
        assert reserve.allocated == whole
    finally:
        reserve.close()


async def test_a_collection_begins_when_it_is_due_and_never_beside_another(tmp_path: Path) -> None:
    clock, sandboxes = FakeClock(), Sandboxes()
    made = reaper(sandboxes, clock, tmp_path, available=plenty, settings={"gc_interval": 60})

    async def collected() -> int:
        await made.round()
        await asyncio.sleep(0)
        return sandboxes.collected

    assert await collected() == 0
    clock.advance(60)
    assert [await collected(), await collected()] == [1, 1]
    clock.advance(60)
    assert await collected() == 1  # the first one goes on
    sandboxes.go.set()
    assert made._collection is not None
    await made._collection
    clock.advance(60)
    assert await collected() == 2


async def test_a_round_that_fails_is_followed_by_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, one = FakeClock(), One(expired=True)
    sandboxes = Sandboxes(one)
    failures = iter([OSError("a fault")])

    class Projects:
        async def close_idle(self) -> None:
            if (error := next(failures, None)) is not None:
                raise error

    running = asyncio.create_task(
        reaper(sandboxes, clock, tmp_path, available=plenty, projects=Projects()).run()
    )
    try:
        async with asyncio.timeout(60):
            while len(one.done) < 2:
                await asyncio.sleep(0)
                clock.advance(ROUND_S)
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert "a round of the reaper failed" in caplog.text
