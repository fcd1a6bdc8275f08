"""kill -9 of each process, at rest, during a run and during a start: all inside dies, and nothing
waits for ever; the next runtime sweeps what a dead one could not."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chain import PATIENCE_S, all_gone, broker, gone, kill, monitors, until, used_jail

import sbx
from sbx import AsyncSandbox, Runtime, Sandbox, Settings, Status
from sbx.errors import Broken, SbxError
from sbx.isolation.broker import client
from sbx.isolation.cgroups import probe
from sbx.protocol.runs import Cause, RunEnd, Stdout
from tests.tiers import rows

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = [
    *(("fork", name) for name in ("monitor", "keeper", "supervisor", "kernel")),
    *(("cold", name) for name in ("monitor", "supervisor", "kernel")),
]
EACH_VICTIM = [("fork", "monitor"), ("fork", "keeper"), ("cold", "supervisor"), ("fork", "kernel")]


@pytest.fixture
async def victim_box(runtime: Runtime, start: str) -> AsyncIterator[AsyncSandbox]:
    """A sandbox whose kernel starts by the path that the test names."""
    async with await runtime.create(narrower={"pool": {"start": start}}) as box:
        yield box


# -- what is inside a jail -------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "victim"), rows(VICTIMS, EACH_VICTIM))
async def test_killed_during_a_run_the_run_says_so_and_the_next_works(
    victim: str, victim_box: AsyncSandbox
) -> None:
    box = victim_box
    async for event in box.stream("import time\nprint('busy')\ntime.sleep(60)"):
        if isinstance(event, Stdout) and "busy" in event.text:
            jail = used_jail(box)
            kill(getattr(jail, victim))
    assert isinstance(event, RunEnd)
    run = event.run
    assert (run.status, run.cause, run.state_lost) == (Status.KILLED, Cause.CRASHED, True)
    await all_gone(jail)
    assert (await box.run("1 + 1")).result == "2"


@pytest.mark.parametrize(
    ("start", "victim"),
    rows(
        [("fork", "keeper"), ("fork", "supervisor"), ("fork", "kernel"), ("cold", "supervisor")],
        ci_tier=[("fork", "keeper"), ("fork", "kernel"), ("cold", "supervisor")],
    ),
)
async def test_killed_at_rest_the_next_run_says_that_the_state_is_lost(
    victim: str, victim_box: AsyncSandbox
) -> None:
    box = victim_box
    await box.run("kept = 1; open('kept', 'w').close()")
    jail = used_jail(box)
    kill(getattr(jail, victim))
    await all_gone(jail)
    await until(lambda: box.receipt is None)
    run = await box.run("import os; ('kept' in globals(), os.path.exists('kept'))")
    assert (run.status, run.result, run.state_lost) == ("ok", "(False, True)", True)


@pytest.mark.parametrize(
    ("start", "victim"),
    rows(
        [("fork", "keeper"), ("fork", "supervisor"), ("cold", "monitor")],
        ci_tier=[("fork", "supervisor")],
    ),
)
async def test_killed_beneath_a_command_the_command_says_so(
    victim: str, victim_box: AsyncSandbox
) -> None:
    box = victim_box
    await box.start()
    async for event in box.stream_shell("echo begun; sleep 60"):
        if isinstance(event, Stdout):
            kill(getattr(used_jail(box), victim))
    assert isinstance(event, RunEnd)
    run = event.run
    assert (run.status, run.cause) == (Status.KILLED, Cause.CRASHED)
    assert (await box.shell("true")).ok


@pytest.mark.parametrize("delay_s", rows([0, 0.001, 0.003, 0.01], [0.003]))
async def test_bwrap_killed_while_it_starts_leaves_nothing_and_the_next_start_works(
    delay_s: float,
) -> None:
    """Its first child waits for it without end until it has set its own parent-death signal; where
    there is no cgroup, nothing else would find that child. The module's own check does."""
    settings = Settings(cgroups=False, fast_path=False)
    async with Runtime(settings) as runtime, await runtime.create() as box:
        itself = broker()
        starting = asyncio.create_task(box.run("1"))
        async with asyncio.timeout(PATIENCE_S):
            while not (bwraps := monitors(itself)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.sleep(delay_s)
        kill(bwraps[0])
        await asyncio.wait([starting])
        if isinstance(error := starting.exception(), SbxError):
            assert error.code in ("launch_failed", "start_failed", "jail_gone")
        else:  # on a busy machine it had come further meanwhile
            assert starting.result().status in (Status.OK, Status.KILLED)
        assert (await box.run("1")).ok


# -- the broker ------------------------------------------------------------------------------------


async def test_broker_killed_during_a_run_ends_the_run_and_all_inside(box: AsyncSandbox) -> None:
    async for event in box.stream("import time\nprint('busy')\ntime.sleep(60)"):
        if isinstance(event, Stdout) and "busy" in event.text:
            jail = used_jail(box)
            kill(broker())
    assert isinstance(event, RunEnd)
    assert (event.run.status, event.run.state_lost) == (Status.KILLED, True)
    await all_gone(jail)
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


ORDERS = (
    *("hello", "make_sandbox", "launch", "start_zygote", "fork", "enter", "retire_zygote"),
    *("inspect", "counters", "kill", "drop_sandbox"),
)


@pytest.mark.parametrize("order", rows(ORDERS, ["make_sandbox", "fork", "enter", "inspect"]))
async def test_broker_that_dies_at_any_order_fails_it_and_nothing_waits(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when the order is on its way; whether it got to it is left to chance."""
    real = client.BrokerClient._send

    async def send(self: client.BrokerClient, packet: bytes, fds: Any) -> None:
        if f'"do": "{order}"'.encode() in packet and self._process is not None:
            self._process.kill()
        await real(self, packet, fds)

    monkeypatch.setattr(client.BrokerClient, "_send", send)
    failed: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        try:
            start = "cold" if order == "launch" else "fork"
            narrower = {"pool": {"start": start}}
            async with Runtime() as runtime, await runtime.create(narrower=narrower) as box:
                await box.run("1 / 0")
        except SbxError as error:
            failed.append(error.code)
    assert failed in (["broker_died"], ["start_failed"], [])


def run_on(box: Sandbox) -> None:
    """Run cells until one cannot: a kernel lives on for a moment after its broker."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        box.run("1")


def test_a_sandbox_made_after_the_shared_broker_died_has_a_new_one() -> None:
    with Sandbox() as box:
        box.run("1")
        kill(broker())
        with pytest.raises(Broken):
            run_on(box)
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
print(*[event for event in box.stream("import time; time.sleep(600)")])
"""


@pytest.fixture
async def swept() -> AsyncIterator[None]:
    """What is left of a program that was killed, the next runtime sweeps."""
    yield
    async with Runtime():
        pass


@pytest.fixture
def embedding(swept: None) -> Iterator["subprocess.Popen[str]"]:
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
    embedding.kill()
    for process in below:
        await gone(process)


async def test_the_next_runtime_sweeps_what_a_dead_one_left(
    embedding: "subprocess.Popen[str]", data_directories: Callable[[], set[Path]]
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
    left = data_directories()
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
