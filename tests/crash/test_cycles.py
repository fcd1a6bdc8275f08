"""Many kernels come and go, by every path of the fast one, and nothing piles up."""

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from chain import PATIENCE_S, broker, descendants, is_tidy, nest, nests, until

from sbx import Runtime, Settings
from sbx.kernels.pool import scaling
from sbx.kernels.pool.warm_pool import Pool

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.timeout(600)]
CI_CYCLES = 200  # they show a leak as well as the others, only less of it
FULL_CYCLES = 1000
AT_ONCE = 8
IDLE = 4  # pool.max_idle
FORK = {"pool": {"max_idle": 0}}
GROWTH_MAX = 4 << 20


@pytest.mark.full_tier
async def test_cycles_leave_everything_as_it_was(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    tenth = (FULL_CYCLES if pytestconfig.getoption("--full") else CI_CYCLES) // 10
    async with Runtime(Settings(data_dir=tmp_path)) as runtime:
        for _ in range(2):  # the first grows what is used from then on: threads' heaps, caches
            await cycles(runtime, tenth)
            await at_rest(runtime)
        before, grown = counts(tmp_path), await growth(runtime, tenth)
        if max(grown.values()) >= GROWTH_MAX:
            grown = await growth(runtime, tenth)  # a heap full of holes grows once, a leak again
        assert counts(tmp_path) == before
        served = runtime.starts.served
        assert served["pool"] >= 5 * IDLE
        assert sum(served.values()) == served["pool"] + served["fork"]
        assert runtime.starts.failed == {}
        assert max(grown.values()) < GROWTH_MAX, grown


async def growth(runtime: Runtime, tenth: int) -> dict[str, int]:
    """By how many bytes each long-lived process grows over most of the cycles."""
    resident = memory()
    for _ in range(8):
        await cycles(runtime, tenth)
        await at_rest(runtime)
    return {who: now - resident[who] for who, now in memory().items()}


async def cycles(runtime: Runtime, count: int) -> None:
    async def some() -> None:
        for number in range(count // AT_ONCE):
            async with await runtime.create(narrower=FORK if number % 2 else {}) as box:
                assert (await box.run("1 + 1")).result == "2"

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def at_rest(runtime: Runtime) -> None:
    """Wait until nothing is left but one zygote and as many prewarmed kernels as there may be."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await renewed(runtime)
            await runtime.warm(count=IDLE, new=True)
            # The forks for the prewarmed kernels may have been the last of a zygote. When that is
            # replaced, nothing is tidy until its prewarmed kernels have ended.
            await until(lambda: is_tidy(runtime) or not is_renewed(runtime))
            if is_renewed(runtime) and is_tidy(runtime):
                break
    assert len(nest().jails()) == len(nest().entered()) == IDLE


async def renewed(runtime: Runtime) -> None:
    """A zygote that has forked a thousand is replaced; its nest lasts as long as what it forked."""
    async with asyncio.timeout(PATIENCE_S):
        while True:  # one of the old zygote may be about to be prewarmed
            for pool in pools(runtime):
                await pool.shrink(0)
                pool.lineage.tend()
            if is_renewed(runtime):
                return
            await asyncio.sleep(0.05)


def is_renewed(runtime: Runtime) -> bool:
    """Whether there is one zygote, which is not due to be replaced and not being replaced."""
    lineages = [pool.lineage for pool in pools(runtime)]
    return len(nests(broker())) == 1 and not any(
        one._starting is not None
        or one.zygote is None
        or one._leaving
        or scaling.needs_replacing(one._wear(one.zygote))
        for one in lineages
    )


def pools(runtime: Runtime) -> list[Pool]:
    assert runtime._starter is not None
    return list(runtime._starter._pools.values())


def counts(data: Path) -> dict[str, int]:
    """What could pile up, as numbers."""
    itself = broker()
    mounts = Path(f"/proc/{itself.pid}/mountinfo").read_text().splitlines()
    return {
        "broker's descriptors": len(os.listdir(f"/proc/{itself.pid}/fd")),
        "own descriptors": len(os.listdir("/proc/self/fd")),
        "zygote's descriptors": len(os.listdir(f"/proc/{nest().zygote.pid}/fd")),
        "keeper's descriptors": len(os.listdir(f"/proc/{nest().keeper.pid}/fd")),
        "processes": len(descendants(itself)),
        "mounts of the broker": len(mounts),
        "own mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": groups(itself.pid),
        "files": sum(len(names) + len(files) for _, names, files in os.walk(data)),
    }


def groups(pid: int) -> int:
    """How many cgroups a broker has, by the pid in their names."""
    tops = [part.mountpoint for part in psutil.disk_partitions(all=True) if "cgroup" in part.fstype]
    paths = (path for top in tops for path, _, _ in os.walk(top))
    return sum(f"-{pid}-" in path for path in paths)


def memory() -> dict[str, int]:
    """Bytes that each long-lived process has for itself. What only waits for Python to find its
    cycles is no leak, and how long it waits depends on all that was ever imported here."""
    gc.collect()
    who: dict[str, Callable[[], psutil.Process]] = {
        "runtime": psutil.Process,
        "broker": broker,
        "zygote": lambda: nest().zygote,
        "keeper": lambda: nest().keeper,
    }
    return {name: _resident(find().pid) for name, find in who.items()}


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10
