"""What the protection of a host directory costs, against `host_executables = "allow"` in the same
directory: a repository of 20,000 files in 500 directories.

    host_start   a kernel of an existing sandbox, until its first cell has ended
    host_cell    `1+1` in a warm kernel
    host_write   a cell that writes 100 new files and removes them
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import Runtime
from sbx.policy import load
from sbx.runtime.sandbox import AsyncSandbox

_DIRECTORIES, _FILES = 500, 20_000
_OWNER = 4242
_WRITES = """
import os
for i in range(100):
    with open(f"new-{i}", "w") as file:
        file.write("x")
for i in range(100):
    os.unlink(f"new-{i}")
"""


def _repository(top: Path) -> None:
    top.chmod(0o755)
    for number in range(_DIRECTORIES):
        directory = top / f"d{number % 20}" / f"e{number}"
        directory.mkdir(parents=True)
        for file in range(_FILES // _DIRECTORIES):
            (directory / f"f{file}.py").write_text("x = 1\n")
    (top / ".git" / "hooks").mkdir(parents=True)
    if os.geteuid() == 0:
        for directory_name, _, files in os.walk(top):
            for name in (".", *files):
                os.chown(Path(directory_name, name), _OWNER, _OWNER)


async def _in_both(
    rounds: int,
    progress: Progress,
    act: Callable[[AsyncSandbox], Awaitable[float]],
) -> Samples:
    top = Path(tempfile.mkdtemp(prefix="sbx-bench-"))
    try:
        await asyncio.to_thread(_repository, top)
        async with Runtime() as runtime, AsyncExitStack() as held:
            boxes = []
            for mode in ("protect", "allow"):
                policy = load("default").model_copy(update={"host_executables": mode})
                made = await runtime.create(policy=policy, workspace=top)
                boxes.append(await held.enter_async_context(made))
            for box in boxes:
                await act(box)
            guarded, free = boxes
            measured, compared = await in_turn(
                rounds, lambda: act(guarded), lambda: act(free), progress
            )
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return Samples(measured, compared, 'host_executables = "allow"')


async def _start(box: AsyncSandbox) -> float:
    await box.stop()
    return await _cell(box, "1+1")


async def _cell(box: AsyncSandbox, code: str) -> float:
    began = time.perf_counter()
    run = await box.run(code)
    ended = time.perf_counter()
    if not run.ok:
        raise NotMeasured(f"the cell gave {run}")
    return (ended - began) * 1000


def _bench(name: str, act: Callable[[AsyncSandbox], Awaitable[float]], rounds: int) -> Bench:
    async def measure(rounds: int, progress: Progress) -> Samples:
        return await _in_both(rounds, progress, act)

    return Bench(name, "ms", None, measure, rounds=rounds)


BENCHES = (
    _bench("host_start", _start, 40),
    _bench("host_cell", lambda box: _cell(box, "1+1"), 200),
    _bench("host_write", lambda box: _cell(box, _WRITES), 60),
)
