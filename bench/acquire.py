"""A sandbox asks for its kernel: workspace mounted, in its cgroup, sealed, the receipt checked.

    acquire_pool, acquire_fork   a sandbox that nothing was made ahead for, as its request narrows
                                 the policy: it and its workspace exist when the clock starts, and
                                 an idle kernel, or one forked now, enters it
    acquire_new                  a new sandbox, made and its kernel taken out of its berth

pandas is imported when the clock stops.
"""

import time

from bench import baseline, paths
from bench.samples import Bench, Progress, Samples, in_turn
from sbx import Policy, Runtime

_BASELINE = "ipykernel by jupyter_client, started, pandas imported"
_EVERY = 6
_NARROWER = {"limits": {"tasks_max": 127}}


async def _from_pool(rounds: int, progress: Progress) -> Samples:
    return await _acquire(rounds, progress, paths.DATA_SCIENCE, "pool")


async def _by_fork(rounds: int, progress: Progress) -> Samples:
    return await _acquire(rounds, progress, paths.WITHOUT_POOL, "fork")


async def _acquire(rounds: int, progress: Progress, policy: Policy, path: str) -> Samples:
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, policy)

        async def acquire_ms() -> float:
            async with await runtime.create(policy, narrower=_NARROWER) as box:
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


async def _new(rounds: int, progress: Progress) -> Samples:
    async with Runtime() as runtime:
        policy = paths.DATA_SCIENCE
        await paths.zygote_started(runtime, policy)

        async def acquire_ms() -> float:
            await runtime.warm(policy, new=True)
            began = time.perf_counter()
            box = await runtime.create(policy)
            try:
                receipt = await box.start()
                ended = time.perf_counter()
                paths.came_by(receipt, "pool")
                await paths.answers(box)
            finally:
                await box.close()
            return (ended - began) * 1000

        async def baseline_ms() -> float:
            return await baseline.start_ms(policy.preload)

        measured, compared = await in_turn(rounds, acquire_ms, baseline_ms, progress, every=_EVERY)
    return Samples(measured, compared, _BASELINE)


BENCHES = (
    Bench("acquire_new", "ms", None, _new, 60, 12, usual=baseline.KERNEL_WITH_PANDAS_MS),
    Bench("acquire_pool", "ms", 3.0, _from_pool, 60, 12, usual=baseline.KERNEL_WITH_PANDAS_MS),
    Bench("acquire_fork", "ms", 10.0, _by_fork, 60, 12, usual=baseline.KERNEL_WITH_PANDAS_MS),
)
