"""A jail that was killed and takes long to die: runs end as what they are, and others begin."""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sbx import AsyncSandbox, Runtime, Status
from sbx.isolation.broker import jail as broker_jail
from sbx.isolation.broker.client import BrokerClient
from sbx.protocol.runs import Cause

pytestmark = pytest.mark.needs("namespaces")

_FREEZER = Path("/sys/fs/cgroup/freezer")
DEAF = """
import time
while True:
    try:
        time.sleep(1)
    except KeyboardInterrupt:
        pass
"""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, Any]]]:
    """Jails whose end is told of only after the test, as under a load that lets nothing die."""
    held: list[tuple[BrokerClient, Mapping[str, Any]]] = []
    answer: list[Mapping[str, Any]] = []
    tell = BrokerClient.on_event

    def hold(self: BrokerClient, message: Mapping[str, Any]) -> None:
        if message["event"] != "gone":
            tell(self, message)
            return
        held.append((self, message))
        answer.append(message)

    with monkeypatch.context() as patch:
        patch.setattr(broker_jail, "_KILLED_S", 0.3)
        patch.setattr(BrokerClient, "on_event", hold)
        yield answer
    for broker, message in held:
        tell(broker, message)


async def ends_at_its_deadline(box: AsyncSandbox, left: list[Mapping[str, Any]]) -> None:
    run = await box.run(DEAF, timeout=0.3)
    assert (run.status, run.state_lost) == (Status.TIMEOUT, True)
    assert len(left) == 1


@pytest.mark.full_tier
async def test_a_cell_that_is_killed_at_its_deadline(
    runtime: Runtime, left: list[Mapping[str, Any]]
) -> None:
    async with await runtime.create() as box:
        await ends_at_its_deadline(box, left)
        async with asyncio.timeout(60):
            run = await box.run("1 + 1")
        assert (run.result, run.status) == ("2", Status.OK)


@pytest.mark.full_tier
async def test_a_cell_that_writes_too_much(runtime: Runtime, left: list[Mapping[str, Any]]) -> None:
    deaf = "while True:\n  try:\n    print('x' * 10_000)\n  except KeyboardInterrupt: pass"
    async with await runtime.create(narrower={"limits": {"output_max": 100_000}}) as box:
        run = await box.run(deaf)
        assert (run.status, run.cause) == (Status.KILLED, Cause.OUTPUT)
        assert (await box.run("1 + 1")).result == "2"


@pytest.mark.full_tier
async def test_a_kernel_that_ends_by_itself(
    runtime: Runtime, left: list[Mapping[str, Any]]
) -> None:
    async with await runtime.create() as box:
        run = await box.run("import os; os.kill(os.getpid(), 9)")
        assert (run.status, run.cause) == (Status.KILLED, Cause.CRASHED)
        assert (await box.run("1 + 1")).result == "2"


@pytest.mark.full_tier
async def test_a_stop_and_a_close_go_on(runtime: Runtime, left: list[Mapping[str, Any]]) -> None:
    async with await runtime.create() as box:
        await box.run("here = 1")
        await box.stop()
        assert (await box.run("'here' in dir()")).result == "False"
    assert len(left) == 2


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup in which nothing runs, and so nothing dies, until it is thawed."""
    group = _FREEZER / f"sbx-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"only the freezer of cgroup v1 keeps what was killed: {error}")
    try:
        yield group
    finally:
        _thaw(group)
        group.rmdir()


def _thaw(group: Path) -> None:
    (group / "freezer.state").write_text("THAWED")
    for _ in range(500):
        if not (group / "cgroup.procs").read_text():
            return
        time.sleep(0.01)


def _groups(box: AsyncSandbox) -> list[Path]:
    return list(Path("/sys/fs/cgroup/memory").rglob(f"*{box._group}"))


async def test_a_sandbox_closes_beside_a_jail_that_is_still_dying_which_is_buried_later(
    runtime: Runtime, freezer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_jail, "_KILLED_S", 0.3)
    async with await runtime.create() as box:
        await box.run("1")
        running = asyncio.create_task(box.run(DEAF, timeout=1))
        await asyncio.sleep(0.2)
        for pid in box._pids():
            (freezer / "cgroup.procs").write_text(str(pid))
        (freezer / "freezer.state").write_text("FROZEN")
        assert (await running).status is Status.TIMEOUT
        assert (await box.run("1 + 1")).result == "2"
    groups = _groups(box)
    assert groups
    _thaw(freezer)
    async with asyncio.timeout(60):
        while any(group.exists() for group in groups):  # noqa: ASYNC110  # linux sets no event
            await asyncio.sleep(0.01)
