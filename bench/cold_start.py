"""From `Sandbox()` to the result of 1+1, without pandas: everything that a first cell waits for."""

import time

from bench import baseline
from bench.samples import Progress, Samples
from sbx import Sandbox

NAME = "cold_start"
ROUNDS, QUICK_ROUNDS = 15, 5
MUST_MS = 400.0


def measure(rounds: int, progress: Progress) -> Samples:
    """Alternate with a new ipykernel. The broker, one per process, is started before the clock."""
    with Sandbox() as box:
        box.start()
    measured, compared = [], []
    for number in range(rounds):
        measured.append(_cold_start_ms())
        compared.append(baseline.cold_start_ms())
        progress(number + 1, rounds)
    return Samples(NAME, "ms", measured, compared, "ipykernel by jupyter_client", MUST_MS)


def _cold_start_ms() -> float:
    began = time.perf_counter()
    with Sandbox() as box:
        run = box.run("1+1")
        ended = time.perf_counter()
        assert run.result == "2", run
    return (ended - began) * 1000
