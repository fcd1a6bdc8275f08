"""From the kill of a live kernel until it is gone.

The clock stops when `stop` returns, and by then every process of the jail must have ended, and its
namespaces and mounts with them; the empty cgroup is removed right after. The baseline's stops
earlier, when its one process is gone.
"""

import time
from statistics import median

from bench import baseline, paths, processes
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import AsyncSandbox, Runtime


async def _teardown(rounds: int, progress: Progress) -> Samples:
    bwrap: list[float] = []
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, paths.DATA_SCIENCE)

        async def teardown_ms() -> float:
            bwrap.append(baseline.bwrap_kill_ms())
            async with await runtime.create(paths.DATA_SCIENCE) as box:
                return await _stop_ms(box)

        async def baseline_ms() -> float:
            async with baseline.ipykernel(paths.DATA_SCIENCE.preload) as kernel:
                return await kernel.kill_ms()

        measured, compared = await in_turn(rounds, teardown_ms, baseline_ms, progress, every=6)
    name = "ipykernel by jupyter_client, killed"
    return Samples(measured, compared, name, {"plain bwrap, killed": median(bwrap)})


async def _stop_ms(box: AsyncSandbox) -> float:
    receipt = await box.start()
    paths.came_by(receipt, "pool", "fork")
    await paths.answers(box)
    inside = processes.by_pid_namespace(processes.descendants())[receipt.namespaces["pid"]]
    with processes.watched(inside) as fds:
        began = time.perf_counter()
        await box.stop()
        stopped = time.perf_counter()
        if not processes.ended(fds):
            raise NotMeasured("the kernel was said to be gone, and a process of it lives")
    return (stopped - began) * 1000


BENCHES = (Bench("teardown", "ms", 3.0, _teardown, 60, 12, usual=baseline.TEARDOWN_MS),)
