"""kill -9 of each process, at rest, during a run and during a start: all inside dies, and nothing
waits for ever; the next runtime sweeps what a dead one could not."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import sbx
from sbx import AsyncSandbox, Runtime, Sandbox, Settings, Status
from sbx.errors import Broken, SbxError
from sbx.isolation import launch
from sbx.isolation.cgroups import probe
from sbx.protocol.runs import Cause, RunEnd, Stdout

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0


def broker() -> psutil.Process:
    (found,) = children_with("sbx.isolation.broker", psutil.Process())
    return found


def jails_of(itself: psutil.Process) -> list[psutil.Process]:
    """The bwraps that a broker started; what it tried its host with may still be ending."""
    return children_with("--args", itself)


def children_with(word: str, parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in parent.children():
        with suppress(psutil.NoSuchProcess):  # or it is a zombie
            if any(word in part for part in child.cmdline()):
                found.append(child)
    return found


def inside(box: AsyncSandbox) -> dict[str, psutil.Process]:
    """The processes of its one jail, from outside: bwrap, PID 1, the kernel."""
    (bwrap,) = jails_of(broker())
    (pid1,) = bwrap.children()
    return {"bwrap": bwrap, "pid 1": pid1, "kernel": pid1.children()[0]}


def lives(process: psutil.Process) -> bool:
    return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)


async def gone(process: psutil.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while lives(process):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


# -- what is inside a jail -------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["bwrap", "pid 1", "kernel"])
async def test_killed_during_a_run_the_run_says_so_and_the_next_works(
    victim: str, box: AsyncSandbox
) -> None:
    async for event in box.stream("import time\nprint('busy')\ntime.sleep(60)"):
        if isinstance(event, Stdout) and "busy" in event.text:
            jail = inside(box)
            kill(jail[victim])
    assert isinstance(event, RunEnd)
    run = event.run
    assert (run.status, run.cause, run.state_lost) == (Status.KILLED, Cause.CRASHED, True)
    for process in jail.values():
        await gone(process)
    assert (await box.run("1 + 1")).result == "2"


@pytest.mark.parametrize("victim", ["bwrap", "pid 1", "kernel"])
async def test_killed_at_rest_the_next_run_says_that_the_state_is_lost(
    victim: str, box: AsyncSandbox
) -> None:
    await box.run("kept = 1; open('kept', 'w').close()")
    jail = inside(box)
    kill(jail[victim])
    for process in jail.values():
        await gone(process)
    await asyncio.sleep(0.1)
    run = await box.run("import os; ('kept' in globals(), os.path.exists('kept'))")
    assert (run.status, run.result, run.state_lost) == ("ok", "(False, True)", True)


@pytest.mark.parametrize("victim", ["bwrap", "pid 1"])
async def test_killed_beneath_a_command_the_command_says_so(victim: str, box: AsyncSandbox) -> None:
    await box.start()
    async for event in box.stream_shell("echo begun; sleep 60"):
        if isinstance(event, Stdout):
            kill(inside(box)[victim])
    assert isinstance(event, RunEnd)
    run = event.run
    assert (run.status, run.cause) == (Status.KILLED, Cause.CRASHED)
    assert (await box.shell("true")).ok


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.002, 0.003, 0.005, 0.01])
async def test_bwrap_killed_while_it_starts_leaves_nothing_and_the_next_start_works(
    delay_s: float,
) -> None:
    """Its first child waits for it without end until it has set its own parent-death signal; where
    there is no cgroup, nothing else would find that child. The module's own check does."""
    async with Runtime(Settings(cgroups=False)) as runtime, await runtime.create() as box:
        itself = broker()
        starting = asyncio.create_task(box.run("1"))
        async with asyncio.timeout(PATIENCE_S):
            while not (bwraps := jails_of(itself)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.sleep(delay_s)
        kill(bwraps[0])
        with pytest.raises(SbxError) as raised:
            await starting
        assert raised.value.code in ("launch_failed", "start_failed", "jail_gone")
        assert (await box.run("1")).ok


# -- the broker ------------------------------------------------------------------------------------


async def test_broker_killed_during_a_run_ends_the_run_and_all_inside(box: AsyncSandbox) -> None:
    async for event in box.stream("import time\nprint('busy')\ntime.sleep(60)"):
        if isinstance(event, Stdout) and "busy" in event.text:
            jail = inside(box)
            kill(broker())
    assert isinstance(event, RunEnd)
    assert (event.run.status, event.run.state_lost) == (Status.KILLED, True)
    for process in jail.values():
        await gone(process)
    with pytest.raises(Broken) as raised:
        await box.run("1")
    assert raised.value.code == "broker_died"
    assert raised.value.hint


async def test_broker_killed_at_rest_leaves_files_within_reach(
    runtime: Runtime, box: AsyncSandbox
) -> None:
    await box.files.write("a", "b")
    await box.run("1")
    kill(broker())
    assert await box.files.read("a") == "b"
    with pytest.raises(Broken):
        await runtime.create()
    await box.close()


ORDERS = ("hello", "make_sandbox", "launch", "inspect", "counters", "kill", "drop_sandbox")


@pytest.mark.parametrize("order", ORDERS)
async def test_broker_that_dies_at_any_order_fails_it_and_nothing_waits(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when the order is on its way; whether it got to it is left to chance."""
    real = launch.Broker._send

    async def send(self: launch.Broker, packet: bytes, fds: Any) -> None:
        if f'"do": "{order}"'.encode() in packet and self._process is not None:
            self._process.kill()
        await real(self, packet, fds)

    monkeypatch.setattr(launch.Broker, "_send", send)
    failed: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        try:
            async with Runtime() as runtime, await runtime.create() as box:
                await box.run("1 / 0")
        except SbxError as error:
            failed.append(error.code)
    assert failed in (["broker_died"], ["start_failed"], [])


def test_a_sandbox_made_after_the_shared_broker_died_has_a_new_one() -> None:
    with Sandbox() as box:
        box.run("1")
        kill(broker())
        with pytest.raises(Broken):
            _ = [box.run("1") for _ in range(2)]  # the first may have begun, and ends as killed
    with Sandbox() as box:
        assert box.run("1").ok
    sbx.close()


# -- the program that embeds -----------------------------------------------------------------------

PROGRAM = """
import sys
from sbx import Sandbox
box = Sandbox()
box.run("x = 1")
print(box.receipt.host_uid, flush=True)
print(*[event for event in box.stream("import time; time.sleep(60)")])
"""


@pytest.fixture
def embedding() -> Iterator["subprocess.Popen[str]"]:
    """A program in the middle of a run."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stdout.readline()
    yield program
    program.kill()
    program.wait()
    program.stdout.close()


async def test_everything_inside_dies_with_the_program(
    embedding: "subprocess.Popen[str]",
) -> None:
    below = psutil.Process(embedding.pid).children(recursive=True)
    assert len(below) >= 4
    began = time.monotonic()
    embedding.kill()
    for process in below:
        await gone(process)
    assert time.monotonic() - began < 5


async def test_the_next_runtime_sweeps_what_a_dead_one_left(
    embedding: "subprocess.Popen[str]", own_temporary_directory: Path
) -> None:
    """The broker is killed first, so that neither of the two can tidy up."""
    await asyncio.sleep(0.3)
    (itself,) = psutil.Process(embedding.pid).children()
    below = psutil.Process(embedding.pid).children(recursive=True)
    kill(itself)
    embedding.kill()
    for process in below:
        await gone(process)
    embedding.wait()
    await asyncio.to_thread(os.waitpid, itself.pid, 0)  # adopted; a zombie would count as living
    left = [
        own_temporary_directory / name
        for name in os.listdir(own_temporary_directory)
        if name.startswith("sbx-")
    ]
    assert left
    assert groups_of(itself.pid) or not probe().controllers
    async with Runtime() as runtime:
        async with await runtime.create() as box:
            assert (await box.run("1")).ok
        assert not [(path, os.listdir(path)) for path in left if path.exists()]
        assert not groups_of(itself.pid)


def groups_of(pid: int) -> list[str]:
    """The cgroups of one broker, by the pid in their names."""
    tops = [part.mountpoint for part in psutil.disk_partitions(all=True) if "cgroup" in part.fstype]
    return [
        path for top in tops for path, _, _ in os.walk(top) if f"-{pid}-" in os.path.basename(path)
    ]
