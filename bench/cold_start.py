"""From nothing to the result of 1+1, without pandas: sandbox made, every process started anew.

The broker, one per process, runs before the clock starts. What bwrap alone takes is shown beside.
"""

import time
from statistics import median

from bench import baseline, paths
from bench.samples import Bench, Progress, Samples, in_turn
from sbx import Runtime, Settings


async def _cold_start(rounds: int, progress: Progress) -> Samples:
    bwrap: list[float] = []
    async with Runtime(Settings(fast_path=False)) as runtime:

        async def cold_start_ms() -> float:
            bwrap.append(baseline.bwrap_ms())
            began = time.perf_counter()
            async with await runtime.create() as box:
                await paths.answers(box)
                ended = time.perf_counter()
                paths.came_by(box.receipt, "cold")
            return (ended - began) * 1000

        measured, compared = await in_turn(
            rounds, cold_start_ms, baseline.first_result_ms, progress
        )
    name = "ipykernel by jupyter_client, started, 1+1"
    return Samples(measured, compared, name, {"plain bwrap, true": median(bwrap)})


BENCHES = (Bench("cold_start", "ms", 400.0, _cold_start, 15, 3, usual=baseline.KERNEL_MS),)
