"""Fifty sandboxes asked for in the same instant: how long each waits until its kernel is ready.

The baseline is four at once, for fifty would keep the machine busy for a minute: the ratio is kind
to it.
"""

import asyncio
import time

from bench import baseline, paths
from bench.at_once import at_once
from bench.samples import Bench, Progress, Samples
from sbx import AsyncSandbox, Runtime

_AT_ONCE = 50
_BASELINE_AT_ONCE = 4


async def _parallel_create(rounds: int, progress: Progress) -> Samples:
    measured: list[float] = []
    compared: list[float] = []
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, paths.DATA_SCIENCE)
        for number in range(rounds):
            measured += await _round(runtime)
            compared += await at_once(
                _BASELINE_AT_ONCE, lambda: baseline.start_ms(paths.DATA_SCIENCE.preload)
            )
            progress(number + 1, rounds)
    name = f"ipykernel by jupyter_client, pandas imported, {_BASELINE_AT_ONCE} at once"
    return Samples(measured, compared, name)


async def _round(runtime: Runtime) -> list[float]:
    boxes: list[AsyncSandbox] = []

    async def create_ms() -> float:
        box = await runtime.create(paths.DATA_SCIENCE)
        boxes.append(box)
        receipt = await box.start()
        ended = time.perf_counter()
        paths.came_by(receipt, "pool", "fork")
        return (ended - began) * 1000

    began = time.perf_counter()
    try:
        return await at_once(_AT_ONCE, create_ms)
    finally:
        await asyncio.gather(*(box.close() for box in boxes))


BENCHES = (Bench("parallel_create", "ms", 150.0, _parallel_create, rounds=5, quick_rounds=1),)
