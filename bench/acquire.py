"""A sandbox asks for its kernel: workspace mounted, in its cgroup, sealed, the receipt checked.

The sandbox and its workspace exist before the clock starts; pandas is imported when it stops.
"""

import time

from bench import baseline, paths
from bench.samples import Bench, Progress, Samples, in_turn
from sbx import Policy, Runtime

_BASELINE = "ipykernel by jupyter_client, started, pandas imported"
_EVERY = 6


async def _from_pool(rounds: int, progress: Progress) -> Samples:
    return await _acquire(rounds, progress, paths.DATA_SCIENCE, "pool")


async def _by_fork(rounds: int, progress: Progress) -> Samples:
    return await _acquire(rounds, progress, paths.WITHOUT_POOL, "fork")


async def _acquire(rounds: int, progress: Progress, policy: Policy, path: str) -> Samples:
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, policy)

        async def acquire_ms() -> float:
            async with await runtime.create(policy) as box:
                if path == "pool":
                    await runtime.warm(policy)
                began = time.perf_counter()
                receipt = await box.start()
                ended = time.perf_counter()
                paths.came_by(receipt, path)
                await paths.answers(box)
            return (ended - began) * 1000

        async def baseline_ms() -> float:
            return await baseline.start_ms(policy.preload)

        measured, compared = await in_turn(rounds, acquire_ms, baseline_ms, progress, every=_EVERY)
    return Samples(measured, compared, _BASELINE)


BENCHES = (
    Bench("acquire_pool", "ms", 3.0, _from_pool, rounds=60, quick_rounds=12),
    Bench("acquire_fork", "ms", 15.0, _by_fork, rounds=60, quick_rounds=12),
)
