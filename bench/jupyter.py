"""A kernel for a notebook client: the same code of jupyter_client drives ours and stock ipykernel.

    jupyter_start    from nothing until the reply to a first cell, `1+1`
    jupyter_pandas   the same until the reply to `import pandas`, which ours has imported before
    jupyter_cell     `1+1` in a live kernel, until its reply and the idle status after it are here

In a start are: a KernelManager made, the kernelspec read, the kernel started, the connection file
written, a client made, its channels connected, a cell sent and answered. Ours is what
`sbx kernelspec install` installs, so the notebook's directory is its workspace. It comes from the
pool, which has filled itself again before the clock starts.

jupyter_client waits by itself at two places. It sleeps for 10 ms at the end of each start_kernel:
that is in both figures. Its wait_for_ready, which many clients call before their first cell, ends
when nothing has come for 0.2 s: that is left out of both, since it would be most of the time of a
kernel from the pool. Below the table stands what both take with wait_for_ready, and what they take
without the 10 ms; and what the first kernel of a process takes, which starts the runtime, the
zygote and whatever it imports.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager

from bench.notebook import Notebook, NotebookKernel, client_thread
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx.jupyter.kernelspec import KernelspecDir, install
from sbx.runtime import shared

# Of the machine that the bounds were set on, the lower end of what was measured there.
_START_MS = 450.0
_PANDAS_MS = 800.0
_CELL_MS = 4.5
_OURS = "sbx-bench"
_BASELINE = "ipykernel by the same client"
_OWNER = 1000  # a workspace of uid 0 is refused
_EVERY = 2
_SLEEP_MS = 10.0
_IDLE_S = 30.0
_LOOK_S = 0.01
_WARM_UP = 20


async def _start(rounds: int, progress: Progress) -> Samples:
    return await _started(rounds, progress, "1+1")


async def _start_with_pandas(rounds: int, progress: Progress) -> Samples:
    return await _started(rounds, progress, "import pandas")


async def _started(rounds: int, progress: Progress, code: str) -> Samples:
    async with _kernels() as kernels:
        ours, stock = kernels.start_ms, kernels.stock_start_ms
        await stock(code)  # jupyter_client imports what it needs with the first
        first = await kernels.first_start_ms(code)
        measured, compared = await in_turn(
            rounds, lambda: ours(code), lambda: stock(code), progress, every=_EVERY
        )
        also = {"without the 10 ms": median(measured) - _SLEEP_MS}
        also["ipykernel without them"] = median(compared) - _SLEEP_MS
        ready = await in_turn(
            max(1, rounds // 10),
            lambda: ours(code, ready=True),
            lambda: stock(code, ready=True),
            lambda done, total: None,
        )
        also["with wait_for_ready"] = median(ready[0])
        also["ipykernel with it"] = median(ready[1])
        also["the first of a process"] = first
    return Samples(measured, compared, _BASELINE, also)


async def _cell(rounds: int, progress: Progress) -> Samples:
    async with (
        _kernels() as kernels,
        kernels.live(kernels.ours) as ours,
        kernels.live(kernels.stock) as stock,
    ):

        async def cell_ms(notebook: Notebook) -> float:
            took: float = await kernels.in_thread(notebook.cell_ms)
            return took

        for notebook in (ours, stock):
            await kernels.in_thread(notebook.ready)
            for _ in range(_WARM_UP):
                await cell_ms(notebook)
        measured, compared = await in_turn(
            rounds, lambda: cell_ms(ours), lambda: cell_ms(stock), progress, every=_EVERY
        )
    return Samples(measured, compared, _BASELINE)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Ours and the stock one, in the same directory, for the same client."""

    ours: NotebookKernel
    stock: NotebookKernel
    in_thread: Callable[..., Awaitable[Any]]

    async def start_ms(self, code: str, *, ready: bool = False) -> float:
        """Ours, from the pool. Raises NotMeasured when it came another way."""
        runtime = shared.shared_runtime().runtime
        async with asyncio.timeout(_IDLE_S):
            while not runtime.idle:  # noqa: ASYNC110  # the pool tells nobody
                await asyncio.sleep(_LOOK_S)
        before = runtime.starts.served.get("pool", 0)
        took: float = await self.in_thread(self.ours.start_ms, code, ready)
        if runtime.starts.served.get("pool", 0) == before:
            raise NotMeasured(f"a kernel came another way than from the pool: {runtime.starts}")
        return took

    async def first_start_ms(self, code: str) -> float:
        """Ours, where nothing of sbx runs yet."""
        await asyncio.to_thread(shared.close)
        took: float = await self.in_thread(self.ours.start_ms, code)
        return took

    async def stock_start_ms(self, code: str, *, ready: bool = False) -> float:
        took: float = await self.in_thread(self.stock.start_ms, code, ready)
        return took

    @asynccontextmanager
    async def live(self, kernel: NotebookKernel) -> AsyncIterator[Notebook]:
        held = ExitStack()
        try:
            yield await self.in_thread(held.enter_context, kernel.started())
        finally:
            await self.in_thread(held.close)


@asynccontextmanager
async def _kernels() -> AsyncIterator[_Kernels]:
    """Nothing of them is left afterwards, nor of the runtime that this process shares."""
    with tempfile.TemporaryDirectory(prefix="sbx-bench-") as directory:
        ours, stock = _installed(Path(directory))
        try:
            async with client_thread() as in_thread:
                yield _Kernels(ours, stock, in_thread)
        finally:
            await asyncio.to_thread(shared.close)


def _installed(directory: Path) -> Iterator[NotebookKernel]:
    """Ours as it is installed, and the one that Jupyter brings along."""
    notebooks = directory / "notebooks"
    notebooks.mkdir()
    if os.geteuid() == 0:
        os.chown(notebooks, _OWNER, _OWNER)
    place = KernelspecDir(directory)
    install(_OURS, place=place)
    specs = KernelSpecManager(kernel_dirs=[str(place.directory)])
    return (NotebookKernel(name, specs, notebooks) for name in (_OURS, NATIVE_KERNEL_NAME))


BENCHES = (
    Bench("jupyter_start", "ms", _START_MS / 10, _start, 60, 6, usual=_START_MS),
    Bench("jupyter_pandas", "ms", _PANDAS_MS / 10, _start_with_pandas, 60, usual=_PANDAS_MS),
    Bench("jupyter_cell", "ms", _CELL_MS, _cell, 600, 200, usual=_CELL_MS),
)
