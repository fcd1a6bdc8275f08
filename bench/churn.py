"""Create a sandbox with pandas, run a cell, destroy it: how many in a second, eight at a time.

The baseline imports no pandas, which would double its work: the ratio is kind to it.
"""

import time

from bench import baseline, paths
from bench.at_once import at_once
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import Runtime

_AT_A_TIME = 8
_EACH_ROUND = 48


async def _churn(rounds: int, progress: Progress) -> Samples:
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, paths.DATA_SCIENCE)

        async def one() -> None:
            async with await runtime.create(paths.DATA_SCIENCE) as box:
                await paths.answers(box)
                paths.came_by(box.receipt, "pool", "fork")

        async def per_second() -> float:
            began = time.perf_counter()
            await at_once(_EACH_ROUND, one, most=_AT_A_TIME)
            return _EACH_ROUND / (time.perf_counter() - began)

        measured, compared = await in_turn(
            rounds, per_second, _baseline_per_second, progress, every=2
        )
    name = f"ipykernel by jupyter_client, without pandas, {_AT_A_TIME} at a time"
    return Samples(measured, compared, name)


async def _baseline_per_second() -> float:
    async def one() -> None:
        async with baseline.ipykernel() as kernel:
            if await kernel.run("1+1") != "2":
                raise NotMeasured("the baseline's kernel gave no 2 for 1+1")

    began = time.perf_counter()
    await at_once(_AT_A_TIME, one)
    return _AT_A_TIME / (time.perf_counter() - began)


BENCHES = (Bench("churn", "/s", 80.0, _churn, 6, 1, better="higher", usual=baseline.CHURN_PER_S),)
