"""What kernels cost that do nothing: memory at fifty, CPU time at two hundred, pandas imported.

A jail's processes are those of its PID namespace. Besides them there are the zygote with what keeps
it, kernels idle for the next, and the broker; they are shown apart.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import fmean, median

from bench import baseline, paths, processes
from bench.at_once import at_once
from bench.samples import Bench, NotMeasured, Progress, Samples
from sbx import AsyncSandbox, Runtime
from sbx.linux import procfs

_JAILS_FOR_MEMORY = 50
_JAILS_FOR_CPU = 200
_KERNELS_FOR_MEMORY = 3
_KERNELS_FOR_CPU = 6
_PROCESSES_OF_A_JAIL = 2  # PID 1 and the kernel
_SETTLE_S = 2.0
_WINDOW_S = 10.0  # the runtime looks at its pools about as often


async def _pss_idle(rounds: int, progress: Progress) -> Samples:
    """The baseline goes first and is gone by then, or the two would share pages of libraries."""
    measured: list[float] = []
    compared: list[float] = []
    also: dict[str, float] = {}
    for number in range(rounds):
        async with _kernels(_KERNELS_FOR_MEMORY) as pids:
            compared += [processes.pss_mib([pid]) for pid in pids]
        async with _jails(_JAILS_FOR_MEMORY) as boxes:
            await asyncio.sleep(_SETTLE_S)
            inside, others = _processes_of(boxes)
            jails = [processes.pss_mib(pids) for pids in inside]
            also = {
                "mean": fmean(jails),
                **{f"{name}, in all": processes.pss_mib(pids) for name, pids in others.items()},
            }
        measured += jails
        progress(number + 1, rounds)
    name = f"ipykernel, pandas imported, {_KERNELS_FOR_MEMORY} at once"
    return Samples(measured, compared, name, also)


async def _idle_cpu(rounds: int, progress: Progress) -> Samples:
    """Both idle in the same windows. The runtime's own process counts, for it watches."""
    total = rounds + 2
    shares: list[dict[str, float]] = []
    compared: list[float] = []
    async with _jails(_JAILS_FOR_CPU) as boxes:
        progress(1, total)
        async with _kernels(_KERNELS_FOR_CPU) as kernels:
            progress(2, total)
            inside, others = _processes_of(boxes)
            groups = {"jails": [pid for pids in inside for pid in pids], **others}
            groups["runtime"] = [os.getpid()]
            await asyncio.sleep(_SETTLE_S)
            for number in range(rounds):
                found = await _shares({**groups, "baseline": kernels})
                compared.append(found.pop("baseline") * _JAILS_FOR_CPU / _KERNELS_FOR_CPU)
                shares.append(found)
                progress(number + 3, total)
        for box in boxes:
            await paths.answers(box)
    measured = [sum(found.values()) for found in shares]
    also = {name: median(found[name] for found in shares) for name in groups}
    name = f"ipykernel, idle: {_KERNELS_FOR_CPU}, reckoned for {_JAILS_FOR_CPU}"
    return Samples(measured, compared, name, also)


@asynccontextmanager
async def _jails(count: int) -> AsyncIterator[list[AsyncSandbox]]:
    """So many sandboxes with a kernel that answered once."""
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, paths.DATA_SCIENCE)

        async def idle() -> AsyncSandbox:
            box = await runtime.create(paths.DATA_SCIENCE)
            await paths.answers(box)
            paths.came_by(box.receipt, "pool", "fork")
            return box

        yield await at_once(count, idle, most=4)


@asynccontextmanager
async def _kernels(count: int) -> AsyncIterator[list[int]]:
    """The pids of so many kernels of today, with the same modules imported."""
    async with AsyncExitStack() as kernels:

        async def idle() -> int:
            kernel = baseline.ipykernel(paths.DATA_SCIENCE.preload)
            return (await kernels.enter_async_context(kernel)).pid

        yield await at_once(count, idle)


def _processes_of(boxes: Sequence[AsyncSandbox]) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Of each sandbox; then those that belong to none, by what they are."""
    brokers = [pid for pid in procfs.children(os.getpid()) if processes.is_broker(pid)]
    below = [pid for broker in brokers for pid in procfs.descendants(broker)]
    found = processes.by_pid_namespace(below)
    inside = []
    for box in boxes:
        if box.receipt is None:
            raise NotMeasured("an idle sandbox lost its kernel")
        pids = found.pop(box.receipt.namespaces["pid"], [])
        if len(pids) < _PROCESSES_OF_A_JAIL:
            raise NotMeasured(f"of an idle jail only {len(pids)} processes can be seen")
        inside.append(pids)
    rest = [pid for pids in found.values() for pid in pids if pid not in brokers]
    return inside, {"zygote and idle": rest, "broker": brokers}


async def _shares(groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Percent of one core that each group takes over some seconds."""
    began = time.perf_counter()
    before = {pid: processes.cpu_s(pid) for pids in groups.values() for pid in pids}
    await asyncio.sleep(_WINDOW_S)
    taken_s = {pid: (processes.cpu_s(pid) or 0) - (then or 0) for pid, then in before.items()}
    elapsed_s = time.perf_counter() - began
    return {
        name: sum(max(0.0, taken_s[pid]) for pid in pids) / elapsed_s * 100
        for name, pids in groups.items()
    }


BENCHES = (
    Bench("pss_idle", "MiB", 8.0, _pss_idle, rounds=1, quick_rounds=1),
    Bench("idle_cpu", "%", 0.1, _idle_cpu, rounds=3),
)
