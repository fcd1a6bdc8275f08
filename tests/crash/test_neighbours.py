"""Resource attacks one after another against a real service: the innocent sandbox beside them never
misses an answer, each attack ends with its cause, and nothing of it stays.

How fast the neighbour answers meanwhile is for `scripts/bench neighbour`: a test asserts no times.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from serving import Service, service

from bench.attacks import ATTACKS, MARK, Attack
from sbx.client import Client, RemoteSandbox
from tests.tiers import rows

MIB = 1 << 20
GROWS_MAX = 96 * MIB  # of the service, over all attacks: output that waits for its reader is 16 MiB
SETTLE_S = 60.0
ONE_OF_EACH_RESOURCE = {
    "fork bomb",
    "malloc",
    "disk by inodes",
    "CPU on all cores",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    with service() as running:
        yield running


@pytest_asyncio.fixture(scope="module")
async def client(served: Service) -> AsyncIterator[Client]:
    async with Client(served.socket) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def innocent(client: Client) -> AsyncIterator[RemoteSandbox]:
    """Counts its own cells, so one that got lost, or a kernel that was replaced, would be seen."""
    async with await client.create() as box:
        await box.run("answered = 0")
        yield box


@pytest.fixture(scope="module", autouse=True)
def used(served: Service, innocent: RemoteSandbox) -> tuple[int, int]:
    """What the service used before it was attacked."""
    return _used(served)


async def _answers(innocent: RemoteSandbox, over: asyncio.Event) -> int:
    """How many cells it answered until it was over, each of them and in their order."""
    first = run = await innocent.run("answered += 1; answered")
    asked = 1
    while not over.is_set():
        run = await innocent.run("answered += 1; answered")
        asked += 1
        assert (run.ok, run.state_lost) == (True, False), run
    assert int(run.result or "0") == int(first.result or "0") + asked - 1
    return asked


@pytest.mark.parametrize(
    "attack",
    rows(ATTACKS, [attack for attack in ATTACKS if attack.name in ONE_OF_EACH_RESOURCE]),
    ids=lambda attack: attack.name.replace(" ", "-"),
)
async def test_an_attack_is_ended_and_its_neighbour_answers_every_cell(
    served: Service, client: Client, innocent: RemoteSandbox, attack: Attack
) -> None:
    over = asyncio.Event()
    async with await client.create(narrower={"limits": dict(attack.narrower)}) as attacker:
        await attacker.run("'a kernel of its own'")
        answering = asyncio.create_task(_answers(innocent, over))
        try:
            ended = await attack.strike(attacker)
        finally:
            over.set()
            answered = await answering
        assert ended in attack.ends
        assert answered > 1
        again = await attacker.run("6 * 7")
        assert again.result == "42", again
        id = attacker.id
    assert await asyncio.to_thread(_left_at_last, served, id) == []


@pytest.mark.full_tier
@pytest.mark.parametrize("attack", ATTACKS[:1], ids=["control"])
async def test_what_an_attack_leaves_would_be_found(
    served: Service, client: Client, attack: Attack
) -> None:
    """The control of the check for what is left: while the attack goes on it finds a lot."""
    async with await client.create() as attacker:
        await attacker.run("'a kernel of its own'")
        striking = asyncio.create_task(attack.strike(attacker))
        found: list[str] = []
        while not striking.done() and not found:
            found = await asyncio.to_thread(_left, served, attacker.id)
        await striking
    assert found


async def test_the_service_has_not_grown(
    served: Service, used: tuple[int, int], innocent: RemoteSandbox
) -> None:
    """Runs last, after all of them."""
    memory, descriptors = _used(served)
    assert memory - used[0] < GROWS_MAX
    assert descriptors - used[1] <= 16  # kept-alive connections, kernels that are kept ready
    assert (await innocent.run("answered > 0")).result == "True"


def _used(served: Service) -> tuple[int, int]:
    process = psutil.Process(served.process.pid)
    return process.memory_info().rss, process.num_fds()


def _left(served: Service, sandbox: str) -> list[str]:
    """Processes and control groups of an attack."""
    found = [f"process {pid}" for pid in _marked(served)]
    found += [str(path) for path in _groups(sandbox)]
    return found


def _marked(served: Service) -> Iterator[int]:
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == MARK:
                yield process.pid


def _groups(sandbox: str) -> Iterator[Path]:
    for mount in psutil.disk_partitions(all=True):
        if mount.fstype in ("cgroup", "cgroup2"):
            for path, _, _ in os.walk(mount.mountpoint):
                if os.path.basename(path) == f"box-{sandbox}":
                    yield Path(path)


def _left_at_last(served: Service, sandbox: str) -> list[str]:
    """What is still there after a while: a group is removed after its last process has gone."""
    end = time.monotonic() + SETTLE_S
    while (found := _left(served, sandbox)) and time.monotonic() < end:
        time.sleep(0.05)
    return found
