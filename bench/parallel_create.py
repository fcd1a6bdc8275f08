"""Fifty sandboxes asked for in the same instant: how long each waits until its kernel is ready.

The policy keeps as many kernels in berths, as one does that expects such a burst; what it is with
as many that are only idle, and with the policy's own pool, where all but a few are forked, is
told beside it. The baseline is four at once,
for fifty would keep the machine busy for a minute: the ratio is kind to it.
"""

import asyncio
import time
from statistics import median

from bench import baseline, paths
from bench.at_once import at_once
from bench.samples import Bench, Progress, Samples
from sbx import AsyncSandbox, Policy, Runtime
from sbx.policy.tables import PoolPolicy

_AT_ONCE = 50
_BASELINE_AT_ONCE = 4
_IDLE = paths.DATA_SCIENCE.model_copy(update={"pool": PoolPolicy(min_idle=0, max_idle=_AT_ONCE)})


async def _parallel_create(rounds: int, progress: Progress) -> Samples:
    measured: list[float] = []
    idle: list[float] = []
    forked: list[float] = []
    compared: list[float] = []
    for number in range(rounds):
        async with Runtime() as runtime:
            await runtime.warm(_IDLE, count=_AT_ONCE, new=True)
            measured += await _round(runtime, _IDLE, "pool")
        async with Runtime() as runtime:
            await runtime.warm(_IDLE, count=_AT_ONCE)
            idle += await _round(runtime, _IDLE, "pool")
        async with Runtime() as runtime:
            await paths.zygote_started(runtime, paths.DATA_SCIENCE)
            forked += await _round(runtime, paths.DATA_SCIENCE, "pool", "fork")
        compared += await at_once(
            _BASELINE_AT_ONCE, lambda: baseline.start_ms(paths.DATA_SCIENCE.preload)
        )
        progress(number + 1, rounds)
    name = f"ipykernel by jupyter_client, pandas imported, {_BASELINE_AT_ONCE} at once"
    also = {"only idle": median(idle), "forked on order": median(forked)}
    return Samples(measured, compared, name, also)


async def _round(runtime: Runtime, policy: Policy, *came_by: str) -> list[float]:
    boxes: list[AsyncSandbox] = []

    async def create_ms() -> float:
        box = await runtime.create(policy)
        boxes.append(box)
        receipt = await box.start()
        ended = time.perf_counter()
        paths.came_by(receipt, *came_by)
        return (ended - began) * 1000

    began = time.perf_counter()
    try:
        return await at_once(_AT_ONCE, create_ms)
    finally:
        await asyncio.gather(*(box.close() for box in boxes))


BENCHES = (Bench("parallel_create", "ms", 150.0, _parallel_create, rounds=5, quick_rounds=1),)
