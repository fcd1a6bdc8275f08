"""From the write that exceeds the disk limit until the run has ended, where the disk is watched.

The cell reports when it exceeded the limit: kernel and host read the same clock. It writes one MiB
at a time, so that the host's disk alone reports no burst. The baseline is a run that its time-out
ends: the same end, without the search for the files.
"""

import time

from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import AsyncSandbox, Runtime
from sbx.policy import load

_LIMIT_MIB = 32
_TIMEOUT_S = 0.5
_GROW = f"""
import time
with open("grown", "wb", 0) as file:
    for _ in range({_LIMIT_MIB} + 1):
        file.write(bytes(1 << 20))
        time.sleep(0.002)
    print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
    time.sleep(60)
"""


async def _disk_end(rounds: int, progress: Progress) -> Samples:
    policy = load("default")
    limits = policy.limits.model_copy(update={"workspace_max": _LIMIT_MIB << 20})
    policy = policy.model_copy(update={"limits": limits})
    async with Runtime() as runtime:

        async def disk_ms() -> float:
            async with await runtime.create(policy) as box:
                return await _end_ms(box)

        async def timeout_ms() -> float:
            async with await runtime.create(policy) as box:
                await box.start()
                began = time.monotonic()
                await box.run("import time; time.sleep(60)", timeout=_TIMEOUT_S)
                return (time.monotonic() - began - _TIMEOUT_S) * 1000

        measured, compared = await in_turn(rounds, disk_ms, timeout_ms, progress)
    return Samples(measured, compared, "a run ended by its time-out")


async def _end_ms(box: AsyncSandbox) -> float:
    receipt = await box.start()
    means = next(str(wall["means"]) for wall in receipt.walls if wall["name"] == "disk")
    if not means.startswith("watched"):
        raise NotMeasured(f"the disk limit of this host is not watched: {means}")
    run = await box.run(_GROW, timeout=60)
    ended = time.monotonic()
    if run.cause != "disk":
        raise NotMeasured(f"the run ended as {run.status}, {run.cause}")
    return (ended - float(run.stdout)) * 1000


BENCHES = (Bench("disk_end", "ms", 1000.0, _disk_end, rounds=20, quick_rounds=5),)
