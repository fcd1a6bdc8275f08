"""A script of JavaScript beside a live kernel, inside the same walls, until its exit code is here.

The baseline is node started by subprocess.run with the same script in a file, an empty environment
and no walls. Most of both is node's own start.
"""

import subprocess
import tempfile
import time

from bench import paths
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import Runtime
from sbx.environments.directory import Environments
from sbx.policy import load
from sbx.runtime.processes.languages import available
from sbx.runtime.settings import Settings

_SCRIPT = "console.log(6 * 7)"


async def _node_oneshot(rounds: int, progress: Progress) -> Samples:
    tool = available(load("default"), Environments(Settings().environments)).get("javascript")
    if tool is None or tool.name != "node":
        raise NotMeasured("there is no node on this host")
    with tempfile.NamedTemporaryFile("w", suffix=".cjs") as file:
        file.write(_SCRIPT)
        file.flush()
        async with Runtime() as runtime, await runtime.create(paths.DATA_SCIENCE) as box:
            await paths.answers(box)

            async def script_ms() -> float:
                began = time.perf_counter()
                run = await box.run_script(_SCRIPT, "javascript")
                ended = time.perf_counter()
                if run.stdout != "42\n":
                    raise NotMeasured(f"the script gave {run}")
                return (ended - began) * 1000

            async def baseline_ms() -> float:
                return _subprocess_ms(tool.path, file.name)

            await script_ms()
            await baseline_ms()
            measured, compared = await in_turn(rounds, script_ms, baseline_ms, progress)
    return Samples(measured, compared, "subprocess.run of node")


def _subprocess_ms(node: str, script: str) -> float:
    began = time.perf_counter()
    subprocess.run([node, script], env={}, check=True, capture_output=True)
    return (time.perf_counter() - began) * 1000


BENCHES = (Bench("node_oneshot", "ms", None, _node_oneshot, rounds=60, quick_rounds=20),)
