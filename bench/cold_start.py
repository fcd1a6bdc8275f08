"""From nothing to the result of 1+1, without pandas, with new processes.

    cold_start   a sandbox by the cold path; the broker, one per process, runs already
    first_use    a new Python process: `import sbx`, `Sandbox()`, `run("1+1")`, until it prints
    first_pandas the same with the policy data-science, and a data frame
    cli_run      `sbx run -c "print(1)"`, until it has ended

What bwrap alone takes is shown for comparison.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import median

from bench import baseline, paths
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import Runtime, Settings

_FIRST_USE = """
from sbx import Sandbox
with Sandbox() as box:
    print(box.run("1+1").result, flush=True)
"""
_PANDAS = "import pandas; int(pandas.DataFrame({'a': [1, 1]}).a.sum())"
_FIRST_PANDAS = f"""
from sbx import Sandbox
with Sandbox("data-science") as box:
    print(box.run({_PANDAS!r}).result, flush=True)
"""
_IPYKERNEL = """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
client.execute_interactive("print(2)", timeout=60)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
_IPYKERNEL_PANDAS = _IPYKERNEL.replace('"print(2)"', repr(_PANDAS.replace("int(", "print(")))
_IPYKERNEL_NAME = "a new process: ipykernel by jupyter_client, 1+1"


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


async def _first_use(rounds: int, progress: Progress) -> Samples:
    return await _first(rounds, progress, _FIRST_USE, _IPYKERNEL, _IPYKERNEL_NAME)


async def _first_pandas(rounds: int, progress: Progress) -> Samples:
    name = "a new process: ipykernel by jupyter_client, a data frame"
    return await _first(rounds, progress, _FIRST_PANDAS, _IPYKERNEL_PANDAS, name)


async def _first(
    rounds: int, progress: Progress, code: str, compared_code: str, name: str
) -> Samples:
    measured, compared = await in_turn(
        rounds,
        lambda: _answer_ms((sys.executable, "-c", code), "2"),
        lambda: _answer_ms((sys.executable, "-c", compared_code), "2"),
        progress,
    )
    return Samples(measured, compared, name)


async def _cli_run(rounds: int, progress: Progress) -> Samples:
    command = (sys.executable, "-m", "sbx", "run", "-c", "print(1)")
    measured, compared = await in_turn(
        rounds,
        lambda: _answer_ms(command, "1", ended=True),
        lambda: _answer_ms((sys.executable, "-c", _IPYKERNEL), "2", ended=True),
        progress,
    )
    return Samples(measured, compared, f"{_IPYKERNEL_NAME}, and its end")


async def _answer_ms(command: Sequence[str], answer: str, *, ended: bool = False) -> float:
    """Return the time until a command has printed this line, or until it has `ended`."""
    began = time.perf_counter()
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=null)
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().strip()
    answered = time.perf_counter()
    code = await process.wait()
    if line != answer or code != 0:
        raise NotMeasured(f"{command[-1]} printed {line!r} and ended with {code}")
    return ((time.perf_counter() if ended else answered) - began) * 1000


BENCHES = (
    Bench("cold_start", "ms", 400.0, _cold_start, 15, 3, usual=baseline.KERNEL_MS),
    Bench("first_use", "ms", 300.0, _first_use, 15, 3),
    Bench("first_pandas", "ms", 1200.0, _first_pandas, 10, 3),
    Bench("cli_run", "ms", 350.0, _cli_run, 15, 3),
)
