"""Limits of a run: crossing one ends with the cause named, and the next call works.

The tests of each limit as a wall are in tests/escape/test_limits.py.
"""

import os
from pathlib import Path

import pytest

from sbx import AsyncSandbox, Run, Runtime, Settings
from sbx.errors import BadRequest, Unavailable
from sbx.linux import mounts
from sbx.protocol.runs import Cause

MIB = 1 << 20
EAT = """
hoard = []
while True:
    hoard.append(bytearray(8 << 20))
    hoard[-1][::4096] = b'x' * 2048
"""


async def limited(runtime: Runtime, **limits: str | int) -> AsyncSandbox:
    return await runtime.create(narrower={"limits": limits})


async def works_again(box: AsyncSandbox, *, lost: bool) -> None:
    run = await box.run("1 + 1")
    assert (run.status, run.result, run.state_lost) == ("ok", "2", lost)


def ended(run: Run) -> tuple[str, Cause | None, bool]:
    return run.status.value, run.cause, run.state_lost


@pytest.mark.needs("memory")
async def test_memory_by_the_cgroup(runtime: Runtime) -> None:
    box = await limited(runtime, memory_max="128MiB")
    await box.run("kept = 1")
    run = await box.run(EAT)
    assert ended(run) == ("killed", Cause.MEMORY, True)
    assert run.error is not None
    assert (run.error.name, str(128 * MIB) in run.error.value) == ("MemoryLimit", True)
    await works_again(box, lost=True)
    walls = (await box.start()).walls
    assert not any(wall["weaker"] for wall in walls if wall["name"] != "disk")


async def test_memory_by_the_watcher_where_there_is_no_cgroup() -> None:
    async with Runtime(Settings(cgroups=False)) as runtime:
        box = await limited(runtime, memory_max="256MiB")
        receipt = await box.start()
        weaker = {wall["name"] for wall in receipt.walls if wall["weaker"]}
        assert weaker - {"disk"} == {"memory", "tasks", "cpu"}
        run = await box.run(f"import time\n{EAT}    time.sleep(0.05)")
        assert ended(run) == ("killed", Cause.MEMORY, True)
        await works_again(box, lost=True)


@pytest.mark.parametrize("limits", [{"run_timeout": "1s"}, {"wall_time": "1s"}])
async def test_a_run_without_a_time_out_has_the_default_of_the_policy(
    runtime: Runtime, limits: dict[str, str]
) -> None:
    box = await limited(runtime, **limits)
    assert ended(await box.run("while True: pass")) == ("timeout", None, False)
    assert ended(await box.shell("sleep 20")) == ("timeout", None, False)
    await works_again(box, lost=False)


async def test_a_run_may_request_more_than_the_default_and_not_more_than_the_maximum(
    runtime: Runtime,
) -> None:
    box = await limited(runtime, run_timeout="0.2s", wall_time="100s")
    assert (await box.run("import time; time.sleep(0.5); 1", timeout=100)).result == "1"
    with pytest.raises(BadRequest) as raised:
        await box.run("1", timeout=101)
    assert raised.value.code == "limit_widened"
    assert raised.value.details == {"field": "timeout", "limit": 100.0}


async def test_output_of_a_cell() -> None:
    # A busy host may take more than the second of grace until the kernel runs again.
    async with Runtime(Settings(interrupt_grace=30)) as runtime:
        box = await limited(runtime, output_max="64KiB")
        run = await box.run("kept = 1\nwhile True: print('x' * 100)")
        assert (run.status, run.cause, run.truncated) == ("killed", Cause.OUTPUT, True)
        assert run.stdout.startswith("x" * 100)
        assert len(run.stdout) <= 64 << 10
        assert run.error is not None
        assert run.error.name == "OutputLimit"
        run = await box.run("kept")
        assert (run.result, run.state_lost) == ("1", False)


async def test_output_of_a_cell_that_does_not_heed_the_interrupt(runtime: Runtime) -> None:
    box = await limited(runtime, output_max="64KiB")
    run = await box.run(
        "import signal, os\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "while True:\n    try: os.write(1, b'x' * 1000)\n    except BaseException: pass"
    )
    assert (run.status, run.cause, run.truncated) == ("killed", Cause.OUTPUT, True)
    assert (await box.run("1")).ok


async def test_disk(runtime: Runtime) -> None:
    box = await limited(runtime, workspace_max="4MiB")
    run = await box.run(
        "import itertools, time\nfor n in itertools.count():\n"
        "    open(str(n), 'wb').write(bytes(1 << 20)); time.sleep(0.05)"
    )
    assert ended(run) == ("killed", Cause.DISK, True)
    assert run.error is not None
    assert run.error.name == "DiskLimit"
    run = await box.run("import glob, os\nfor name in glob.glob('[0-9]*'): os.unlink(name)")
    assert (run.status, run.state_lost) == ("ok", True)
    await works_again(box, lost=False)


async def test_one_sandbox_s_conversations_share_its_memory(runtime: Runtime) -> None:
    if not runtime.capabilities.layer("memory").available:
        pytest.skip("this host limits no memory by cgroup")
    box = await limited(runtime, memory_max="192MiB")
    other = box.conversation("other")
    assert (await other.run("held = b'x' * (90 << 20)")).ok
    runs = [await one.run("held = b'x' * (90 << 20)") for one in (box, other, box)]
    assert any(run.cause is Cause.MEMORY or run.state_lost for run in runs)


# -- a full disk -----------------------------------------------------------------------------------


@pytest.mark.needs("root")
async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts.tmpfs(str(disk), "size=4m,mode=0711")
    try:
        async with Runtime(Settings(data_dir=disk)) as runtime:
            box = await runtime.create()
            run = await box.run("open('all', 'wb').write(bytes(8 << 20))")
            assert run.error is not None
            assert (run.error.name, "28" in run.error.value) == ("OSError", True)
            for call in (
                box.files.write("more", b"x" * (1 << 20)),
                box.uploads.put_bytes("more", b"x" * (1 << 20)),
            ):
                with pytest.raises(Unavailable) as raised:
                    await call
                assert (raised.value.code, bool(raised.value.hint)) == ("no_space", True)
            assert await box.uploads.list() == ()
            assert (await box.run("import os; os.unlink('all')")).ok
            await box.files.write("more", b"x" * (1 << 20))
            await box.close()
            assert os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize > 3 << 20
    finally:
        mounts.detach(str(disk))


@pytest.mark.needs("root")
async def test_a_disk_that_was_full_before_is_an_error_of_start_or_create(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts.tmpfs(str(disk), "size=64k,nr_inodes=3,mode=0711")
    try:
        with pytest.raises(Unavailable) as raised:
            async with Runtime(Settings(data_dir=disk)) as runtime:
                await runtime.create()
        assert (raised.value.code, bool(raised.value.hint)) == ("no_space", True)
    finally:
        mounts.detach(str(disk))
