"""A cell in a live kernel: its whole round trip, and the first byte that a busy one prints."""

import time
from typing import Any

from bench import baseline, paths
from bench.baseline import CELL_MS, FIRST_BYTE_MS, Ipykernel
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import AsyncSandbox, Runtime
from sbx.protocol.runs import Stdout

_BUSY = """
import time
print("x", end="")
over = time.perf_counter() + {busy_s}
while time.perf_counter() < over:
    pass
"""
_BUSY_S = 0.03
_BASELINE_BUSY_S = 0.3  # its bytes wait for 0.2 s, or for the end of the cell
_WARM_UP = 20


async def _cell_roundtrip(rounds: int, progress: Progress) -> Samples:
    async with (
        Runtime() as runtime,
        await runtime.create(paths.DATA_SCIENCE) as box,
        baseline.ipykernel() as kernel,
    ):

        async def cell_ms() -> float:
            began = time.perf_counter()
            run = await box.run("1+1")
            ended = time.perf_counter()
            if run.result != "2":
                raise NotMeasured(f"1+1 gave {run}")
            return (ended - began) * 1000

        for _ in range(_WARM_UP):
            await cell_ms()
            await kernel.cell_ms()
        measured, compared = await in_turn(rounds, cell_ms, kernel.cell_ms, progress, every=10)
    return Samples(measured, compared, "ipykernel by jupyter_client, 1+1 until idle")


async def _first_byte(rounds: int, progress: Progress) -> Samples:
    async with (
        Runtime() as runtime,
        await runtime.create(paths.DATA_SCIENCE) as box,
        baseline.ipykernel() as kernel,
    ):
        await paths.answers(box)
        measured, compared = await in_turn(
            rounds,
            lambda: _first_byte_ms(box),
            lambda: _baseline_first_byte_ms(kernel),
            progress,
            every=8,
        )
    return Samples(measured, compared, "ipykernel by jupyter_client, unflushed print")


async def _first_byte_ms(box: AsyncSandbox) -> float:
    """From the call to the first byte at the caller; the cell is busy for longer than that."""
    seen = None
    began = time.perf_counter()
    async for event in box.stream(_BUSY.format(busy_s=_BUSY_S)):
        if seen is None and isinstance(event, Stdout):
            seen = time.perf_counter()
    if seen is None:
        raise NotMeasured("a cell that prints gave no output")
    return (seen - began) * 1000


async def _baseline_first_byte_ms(kernel: Ipykernel) -> float:
    seen: list[float] = []

    def see(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            seen.append(time.perf_counter())

    began = time.perf_counter()
    await kernel.execute(_BUSY.format(busy_s=_BASELINE_BUSY_S), see)
    return (seen[0] - began) * 1000


BENCHES = (
    Bench("cell_roundtrip", "ms", 0.5, _cell_roundtrip, 1000, 400, usual=CELL_MS),
    Bench("first_byte", "ms", 2.0, _first_byte, 120, 40, usual=FIRST_BYTE_MS),
)
