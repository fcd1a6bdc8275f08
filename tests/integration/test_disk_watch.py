"""The files of a jail are looked at while it does something, and only then."""

import asyncio
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbx import Runtime
from sbx.errors import Conflict
from sbx.kernels.memory_watcher import HiddenGrowth
from sbx.linux import hidden_files
from sbx.policy.tables import LimitsPolicy
from sbx.runtime.files import disk_limit, free_space
from sbx.workspace.host_directory import HostDirectory


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  # it is another process's, which sets no event
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_limit, "_PERIOD_S", 0.05)
    monkeypatch.setattr(disk_limit, "_ROUND_S", 0.1)


@pytest.mark.full_tier
async def test_what_a_run_left_behind_is_watched(runtime: Runtime) -> None:
    fill = "def fill(): open('big', 'wb').write(bytes(8 << 20))"
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        await box.run(f"import threading\n{fill}\nthreading.Timer(1, fill).start()")
        await until(lambda: box.receipt is None)
        assert (await box.run("1")).state_lost


async def test_error_between_two_runs_does_not_end_the_watch(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """statvfs(2) of an idle jail was not within a `try`: its error ended the task, and the next
    runs had no disk limit."""
    failures = [OSError(errno.EIO, "the disk fails")] * 2

    async def fails(threads: Any, fd: int) -> tuple[int, int]:
        # The probe of a run has its own `try`.
        if failures and sys._getframe(1).f_code.co_name == "_look":
            raise failures.pop()
        return await current(threads, fd)

    def hides(self: HiddenGrowth, *_: int) -> int:
        self.hiding = True  # then the space is read before and after the idle time
        return 0

    current = free_space.current
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        await box.run("1")
        monkeypatch.setattr(HiddenGrowth, "charge", hides)
        monkeypatch.setattr(free_space, "current", fails)
        await box.run("1")
        await until(lambda: len(failures) < 2)
        ended = await box.run(
            "import time; open('big', 'wb').write(bytes(8 << 20)); time.sleep(20)"
        )
        assert (ended.status, ended.cause) == ("killed", "disk")


async def test_kernel_ends_whose_watch_fails_again_and_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a bug")

    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        await box.run("1")
        monkeypatch.setattr(disk_limit, "EarlyStop", fails)
        ended = await box.run("import time; time.sleep(20)")
        assert ended.status == "killed"


@pytest.mark.full_tier
async def test_so_is_what_its_processes_leave_behind(runtime: Runtime) -> None:
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        await box.run("1")
        await box.shell("(sleep 1; head -c 8M /dev/zero > big; sleep 60) >/dev/null 2>&1 &")
        await until(lambda: box.receipt is None)


@pytest.mark.full_tier
async def test_an_idle_jail_is_asked_and_its_files_are_not_looked_at(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    asked: list[disk_limit.IdleProbe] = []
    measured, lasts = disk_limit.DiskLimit._measured, disk_limit.IdleProbe.lasts

    def look(*at: Any) -> Any:
        looks.append(at)
        return measured(*at)

    def ask(quiet: disk_limit.IdleProbe) -> bool:
        asked.append(quiet)
        return lasts(quiet)

    monkeypatch.setattr(disk_limit.DiskLimit, "_measured", look)
    monkeypatch.setattr(disk_limit.IdleProbe, "lasts", ask)
    async with await runtime.create() as box:
        await box.run("1")
        await until(lambda: len(asked) > 3 and asked[-3] is asked[-1])
        before, asked_before = len(looks), len(asked)
        await until(lambda: len(asked) > asked_before + 5)
        assert len(looks) == before > 0


async def test_where_only_the_broker_may_look_it_counts_files_without_a_name(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a service that gave up root: the processes of its jails are other users'."""
    asked: list[int] = []

    def refused(*_: Any) -> tuple[int, int]:
        asked.append(1)
        raise PermissionError

    monkeypatch.setattr(hidden_files, "unlinked_of", refused)
    hoard = """
import os, time
file = open("f", "wb", 0)
os.unlink("f")
file.write(bytes({size} << 20))
time.sleep({seconds})
"""
    async with await runtime.create(narrower={"limits": {"workspace_max": "8MiB"}}) as box:
        assert (await box.run(hoard.format(size=4, seconds=1))).ok
        done = await box.run(hoard.format(size=16, seconds=50))
        assert (str(done.status), str(done.cause)) == ("killed", "disk")
    assert asked


async def test_a_run_after_a_kill_is_left_alone_unless_it_grows_again(runtime: Runtime) -> None:
    """What was left is tolerated in full, though the look that ended its writer stopped early."""
    fill = "for n in range({}, {}): open(f'f{{n}}', 'wb').write(bytes(1 << 20))\n"
    hold = "import time; time.sleep({})"
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:
        assert str((await box.run(fill.format(0, 20) + hold.format(50))).cause) == "disk"
        assert (await box.run(hold.format(1))).ok
        assert str((await box.run(fill.format(20, 24) + hold.format(50))).cause) == "disk"
        cleared = "import glob, os\nfor path in glob.glob('f*')[:-2]: os.unlink(path)"
        assert (await box.run(cleared)).ok


async def test_no_kernel_starts_over_files_far_above_the_limit(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace of 49.5 GB under a limit of 1 GiB stayed usable: its size was tolerated."""
    monkeypatch.setattr(disk_limit, "_OVERSHOOT", 0)
    fill = "open(str(time.time()), 'wb').write(bytes(20 << 20))"
    async with await runtime.create(narrower={"limits": {"workspace_max": "4MiB"}}) as box:

        async def until_refused() -> None:
            while True:  # on a slow disk a kernel ends before it is far above the limit
                done = await box.run(f"import time\n{fill}\ntime.sleep(50)")
                assert str(done.cause) == "disk"

        with pytest.raises(Conflict) as raised:
            await until_refused()
        assert (raised.value.code, raised.value.details["limit"]) == ("workspace_full", 4 << 20)
        for entry in await box.files.list():
            if entry.kind == "file":
                await box.files.delete(entry.path)
        assert (await box.run("1")).ok


@pytest.mark.unprivileged
async def test_growth_of_a_host_directory_ends_the_kernel(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 GiB passed. Files that were there before do not count, and many of them cost nothing."""
    monkeypatch.setattr(free_space, "_STEP", 1 << 20)
    (tmp_path / "before").write_bytes(bytes(64 << 20))
    fill = """
import os, time
for n in range({}):
    with open('grown', 'ab') as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
time.sleep({})
"""
    narrower = {"limits": {"workspace_max": "32MiB"}}
    async with await runtime.create(workspace=tmp_path, narrower=narrower) as box:
        assert (await box.run(fill.format(8, 0.5))).ok
        done = await box.run(fill.format(400, 50))
        assert (str(done.status), str(done.cause)) == ("killed", "disk")
        assert (await box.run("1")).ok


async def test_growth_by_the_user_of_a_host_directory_is_tolerated(tmp_path: Path) -> None:
    directory = HostDirectory.open(tmp_path, jail_uid=os.getuid())
    growth = free_space.HostGrowth(directory, LimitsPolicy(workspace_max=96 << 20))
    (tmp_path / "build").write_bytes(bytes(200 << 20))
    os.sync()
    assert growth.measure(directory, [], 10)[0] <= 96 << 20
    directory.close()
