"""Use a service like a busy host for many minutes, and check that it stays as it was.

    ./scripts/bench soak --minutes 30

Of 1,000 sandboxes, 200 have a live kernel. 100 clients use two of these each: mostly cells that
count, also files, uploads, commands, lists, and a sandbox that is replaced by a new one. Each reply
is checked. The run fails if a reply is an error or wrong, if a cell at the end takes more than 1.5
times as long as at the start, or if the memory of the service or of the broker grows.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import processes
from bench.at_once import at_once
from bench.samples import NotMeasured, figure, percentile
from bench.serving import served, service_pid, temporary_directory
from bench.torture.growth import slope
from sbx.client import Client, RemoteSandbox
from sbx.errors import SbxError
from sbx.linux import procfs

_SAMPLE_S = 5.0
_AT_ONCE = 20  # sandboxes that are created at the same time
_PART = 10  # the cells of the first part after the warm-up are compared with those of the last
_WARM_UP_S = 300.0  # until the garbage of deleted sandboxes has its level; at most a third
_SLOWER_MAX = 1.5
_GROWTH_MAX = 0.05  # of the median, over the measured time
_UPLOAD = os.urandom(100_000)
_SHOWN = 10
messages = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: seconds since the start of the load, and its duration."""

    at: float
    ms: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Proportional set size (MiB) and descriptors of a process at a time in seconds."""

    at: float
    mib: float
    fds: int


@dataclass(frozen=True, slots=True)
class Trend:
    """The memory of a process after the warm-up. `grown` is the rise over the measured time, as a
    part of the median."""

    mib: float
    mib_per_hour: float
    grown: float
    fds_first: int
    fds_last: int


@dataclass(frozen=True, slots=True)
class Report:
    minutes: float
    actions: dict[str, int]
    errors: dict[str, int]
    cells_per_s: float
    first_ms: tuple[float, float]  # p50 and p99
    last_ms: tuple[float, float]
    trends: dict[str, Trend]

    @property
    def problems(self) -> list[str]:
        """Return a sentence for each limit that is exceeded."""
        found = [f"{count} times: {error}" for error, count in self.errors.items()]
        times = self.last_ms[0] / self.first_ms[0]
        if times > _SLOWER_MAX:
            found.append(f"a cell takes {times:.2f} times as long at the end as at the start")
        for name, trend in self.trends.items():
            if trend.grown > _GROWTH_MAX:
                found.append(f"the memory of the {name} grows by {trend.mib_per_hour:.1f} MiB/h")
        return found

    def row(self) -> dict[str, Any]:
        return {"name": "soak", "met": not self.problems, **asdict(self)}


def report(
    seconds: float,
    cells: Sequence[Cell],
    memory: dict[str, list[Memory]],
    actions: Counter[str],
    errors: Counter[str],
) -> Report:
    """Summarise a run. Raise NotMeasured if it was too short for a comparison."""
    part, warm_up = seconds / _PART, min(_WARM_UP_S, seconds / 3)
    first = [cell.ms for cell in cells if warm_up <= cell.at < warm_up + part]
    last = [cell.ms for cell in cells if cell.at >= seconds - part]
    if not first or not last:
        raise NotMeasured("there were too few cells; use more --minutes")
    return Report(
        round(seconds / 60, 2),
        dict(sorted(actions.items())),
        dict(errors.most_common(_SHOWN)),
        round(len(cells) / seconds, 1),
        (round(median(first), 2), round(percentile(first, 99), 2)),
        (round(median(last), 2), round(percentile(last, 99), 2)),
        {name: _trend(samples, warm_up) for name, samples in memory.items()},
    )


def _trend(samples: Sequence[Memory], warm_up: float) -> Trend:
    warm = [sample for sample in samples if sample.at >= warm_up]
    per_second = slope([(sample.at, sample.mib) for sample in warm])
    if per_second is None:
        raise NotMeasured("there were too few samples of the memory; use more --minutes")
    middle = median(sample.mib for sample in warm)
    grown = per_second * (warm[-1].at - warm[0].at) / middle
    per_hour = round(per_second * 3600, 2)
    return Trend(round(middle, 1), per_hour, round(grown, 4), warm[0].fds, warm[-1].fds)


# -- the load --------------------------------------------------------------------------------------


class _Load:
    """The clients, and the result of what they do."""

    def __init__(self) -> None:
        self.cells = list[Cell]()
        self.actions = Counter[str]()
        self.errors = Counter[str]()
        self.began = 0.0

    def now(self) -> float:
        return time.monotonic() - self.began

    async def use(self, client: Client, boxes: list[RemoteSandbox], pause_s: float) -> None:
        """Act on these sandboxes until the task is cancelled."""
        counts = [await _started(box) for box in boxes]
        acts: dict[str, tuple[float, Callable[[RemoteSandbox], Awaitable[None]]]] = {
            "file": (6, self._file),
            "upload": (4, self._upload),
            "command": (4, self._command),
            "list": (3, lambda _: self._list(client)),
        }
        names, weights = (
            ["cell", "replace", *acts],
            [80, 3, *(weight for weight, _ in acts.values())],
        )
        while True:
            await asyncio.sleep(random.uniform(0, 2 * pause_s))
            number = random.randrange(len(boxes))
            name = random.choices(names, weights)[0]
            try:
                if name == "cell":
                    counts[number] += 1
                    await self._cell(boxes[number], counts[number])
                elif name == "replace":
                    await boxes[number].close()
                    boxes[number] = await client.create()
                    counts[number] = await _started(boxes[number])
                else:
                    await acts[name][1](boxes[number])
            except (SbxError, OSError) as error:
                self.errors[f"{name}: {getattr(error, 'code', '')} {error}"] += 1
            self.actions[name] += 1

    def _check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.errors[what] += 1

    async def _cell(self, box: RemoteSandbox, count: int) -> None:
        began = time.perf_counter()
        run = await box.run("n += 1; n")
        self.cells.append(Cell(self.now(), (time.perf_counter() - began) * 1000))
        self._check(run.result == str(count), f"a cell has a wrong result: {run.status}")

    async def _file(self, box: RemoteSandbox) -> None:
        text = f"{random.random()}\n" * 100
        await box.files.write("notes.txt", text)
        self._check(await box.files.read("notes.txt") == text, "a file has another content")

    async def _upload(self, box: RemoteSandbox) -> None:
        await box.uploads.put_bytes("data.bin", _UPLOAD)
        run = await box.run("import os; os.path.getsize('uploads/temparea/data.bin')")
        self._check(run.result == str(len(_UPLOAD)), "an upload has another size")

    async def _command(self, box: RemoteSandbox) -> None:
        run = await box.shell("echo $((6 * 7))")
        self._check(run.stdout == "42\n", "a command has another output")

    async def _list(self, client: Client) -> None:
        self._check(bool((await client.sandboxes()).items), "the list of sandboxes is empty")


async def _started(box: RemoteSandbox) -> int:
    await box.run("n = 0")
    return 0


async def soak(
    seconds: float,
    *,
    sandboxes: int,
    live: int,
    clients: int,
    pause_s: float,
    progress: Callable[[float], object],
) -> Report:
    """Raise NotMeasured, and the errors of the service before the load begins."""
    limits = {
        "SBX_SANDBOXES_MAX": str(sandboxes + clients),
        "SBX_SANDBOXES_PER_OWNER": str(sandboxes + clients),
        "SBX_KERNELS_MAX": str(live + clients),
        "SBX_KERNELS_PER_OWNER": str(live + clients),
    }
    load = _Load()
    async with AsyncExitStack() as stack:
        top = stack.enter_context(temporary_directory())
        client = await stack.enter_async_context(served(top=top, **limits))
        watched = _service_and_broker(top)
        boxes = await at_once(sandboxes, client.create, most=_AT_ONCE)
        for start in range(0, live, _AT_ONCE):
            await asyncio.gather(*map(_started, boxes[start : min(live, start + _AT_ONCE)]))
        load.began = time.monotonic()
        own = [boxes[number:live:clients] for number in range(clients)]
        others = [await stack.enter_async_context(Client(client.address)) for _ in own]
        tasks = [
            asyncio.create_task(load.use(other, mine, pause_s))
            for other, mine in zip(others, own, strict=True)
        ]
        try:
            memory = await _sampled(load, seconds, watched, tasks, progress)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return report(seconds, load.cells, memory, load.actions, load.errors)


async def _sampled(
    load: _Load,
    seconds: float,
    watched: dict[str, int],
    tasks: Sequence[asyncio.Task[None]],
    progress: Callable[[float], object],
) -> dict[str, list[Memory]]:
    """Measure the memory until the time is over. Raise the error of a client that ended."""
    memory: dict[str, list[Memory]] = {name: [] for name in watched}
    while (now := load.now()) < seconds:
        for task in tasks:
            if task.done():
                task.result()
        for name, pid in watched.items():
            mib = processes.pss_mib([pid])
            memory[name].append(Memory(now, mib, len(os.listdir(f"/proc/{pid}/fd"))))
        progress(now)
        await asyncio.sleep(min(_SAMPLE_S, seconds - now))
    return memory


def _service_and_broker(top: Path) -> dict[str, int]:
    service = service_pid(top)
    brokers = [pid for pid in procfs.children(service) if processes.is_broker(pid)]
    if len(brokers) != 1:
        raise NotMeasured(f"the service has {len(brokers)} brokers")
    return {"service": service, "broker": brokers[0]}


# -- the command -----------------------------------------------------------------------------------


def main(
    minutes: Annotated[float, typer.Option(help="The duration of the load.")] = 30.0,
    sandboxes: Annotated[int, typer.Option(help="The number of sandboxes.")] = 1000,
    live: Annotated[int, typer.Option(help="How many of them have a live kernel.")] = 200,
    clients: Annotated[int, typer.Option(help="The number of clients.")] = 100,
    pause: Annotated[float, typer.Option(help="The mean pause of a client, in seconds.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Load a service for many minutes. Exit code 1 if a limit is exceeded."""
    seconds = minutes * 60
    done = _done(seconds, sandboxes, live, clients, pause)
    if as_json:
        print(json.dumps(done.row()), flush=True)
    else:
        _show(done)
    if done.problems:
        raise typer.Exit(1)


def _done(seconds: float, sandboxes: int, live: int, clients: int, pause_s: float) -> Report:
    with Progress(console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task("soak", total=seconds)
        return asyncio.run(
            soak(
                seconds,
                sandboxes=sandboxes,
                live=live,
                clients=clients,
                pause_s=pause_s,
                progress=lambda now: bar.update(task, completed=now),
            )
        )


def _show(done: Report) -> None:
    output = Console()
    counted = ", ".join(f"{name} {count}" for name, count in done.actions.items())
    output.print(f"{done.minutes:g} minutes, {done.cells_per_s:g} cells/s; {counted}")
    for name, (p50, p99) in {"start": done.first_ms, "end": done.last_ms}.items():
        output.print(f"a cell at the {name}: p50 {figure(p50)} ms, p99 {figure(p99)} ms")
    table = Table("process", "MiB", "MiB/h", "growth", "descriptors")
    for name, trend in done.trends.items():
        row = (name, figure(trend.mib), f"{trend.mib_per_hour:g}", f"{trend.grown:.1%}")
        table.add_row(*row, f"{trend.fds_first} → {trend.fds_last}")
    output.print(table)
    for problem in done.problems:
        output.print(problem, style="red", markup=False)
    if not done.problems:
        output.print("no problems")
