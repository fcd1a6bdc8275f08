"""A shell command beside a live kernel, inside the same walls: `true`, until its exit code is here.

The baseline is bash started by subprocess.run, with the same arguments and no walls.
"""

import time

from bench import baseline, paths
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import Runtime


async def _shell_roundtrip(rounds: int, progress: Progress) -> Samples:
    async with Runtime() as runtime, await runtime.create(paths.DATA_SCIENCE) as box:
        await paths.answers(box)

        async def shell_ms() -> float:
            began = time.perf_counter()
            run = await box.shell("true")
            ended = time.perf_counter()
            if not run.ok:
                raise NotMeasured(f"`true` gave {run}")
            return (ended - began) * 1000

        async def baseline_ms() -> float:
            return baseline.subprocess_ms("true")

        await shell_ms()
        measured, compared = await in_turn(rounds, shell_ms, baseline_ms, progress)
    return Samples(measured, compared, "subprocess.run of bash")


BENCHES = (Bench("shell_roundtrip", "ms", 5.0, _shell_roundtrip, rounds=200, quick_rounds=80),)
