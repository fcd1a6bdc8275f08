"""The files of a jail are looked at while it does something, and only then."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sbx import Runtime
from sbx.runtime import disk


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  # it is another process's, which sets no event
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_PERIOD_S", 0.05)
    monkeypatch.setattr(disk, "_ROUND_S", 0.1)


async def test_what_a_run_left_behind_is_watched(runtime: Runtime) -> None:
    fill = "def fill(): open('big', 'wb').write(bytes(8 << 20))"
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        await box.run(f"import threading\n{fill}\nthreading.Timer(1, fill).start()")
        await until(lambda: box.receipt is None)
        assert (await box.run("1")).state_lost


async def test_so_is_what_its_processes_leave_behind(runtime: Runtime) -> None:
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        await box.run("1")
        await box.shell("(sleep 1; head -c 8M /dev/zero > big; sleep 60) >/dev/null 2>&1 &")
        await until(lambda: box.receipt is None)


async def test_an_idle_jail_is_asked_and_its_files_are_not_looked_at(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    asked: list[disk._Quiet] = []
    measured, lasts = disk._measured, disk._Quiet.lasts

    def look(*at: Any) -> Any:
        looks.append(at)
        return measured(*at)

    def ask(quiet: disk._Quiet) -> bool:
        asked.append(quiet)
        return lasts(quiet)

    monkeypatch.setattr(disk, "_measured", look)
    monkeypatch.setattr(disk._Quiet, "lasts", ask)
    async with await runtime.create() as box:
        await box.run("1")
        await until(lambda: len(asked) > 3 and asked[-3] is asked[-1])
        before, asked_before = len(looks), len(asked)
        await until(lambda: len(asked) > asked_before + 5)
        assert len(looks) == before > 0
