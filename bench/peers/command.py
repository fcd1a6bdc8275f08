"""./scripts/bench peers: the alternatives in turn with sbx, on the same work, as one table."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.peers.install import cache_directory, install
from bench.peers.subjects import Run, Subject, subjects
from bench.samples import NotMeasured, figure, percentile

_PRINT = ("print(6 * 7)", "42")
_PANDAS = ("import pandas\nprint(int(pandas.DataFrame({'a': [1, 2, 3]}).a.sum()))", "6")
_WIDTH = 200
messages = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds."""

    p50: float
    min: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        figures = (median(samples), min(samples), percentile(samples, 99))
        return cls(*(round(value, 2) for value in figures))

    def text(self, of_sbx: "Times") -> str:
        range_ = f"{figure(self.min)} to {figure(self.p99)}"
        return f"{figure(self.p50)} ms ({range_}), {figure(self.p50 / of_sbx.p50)} times"


@dataclass(frozen=True, slots=True)
class Row:
    """`first`: from nothing to the output of a print; `next`: another one in the same sandbox;
    `pandas`: from nothing to a result of pandas. `problem`: why nothing was measured."""

    name: str
    walls: str
    keeps_state: bool
    rounds: int
    first: Times | None = None
    next: Times | None = None
    pandas: Times | None = None
    problem: str = ""


async def measure(rounds: int, progress: Callable[[int], object]) -> list[Row]:
    """Measure all, in turn. Raise SbxError if sbx itself does not start."""
    installed = await install(cache_directory(), lambda text: messages.print(text, style="dim"))
    for package, problem in installed.problems.items():
        messages.print(f"{package} is not installed: {problem}", style="yellow", markup=False)
    times = dict[str, list[tuple[float, float, float]]]()
    problems = dict[str, str]()
    async with AsyncExitStack() as stack:
        listed = await subjects(installed, stack)
        for number in range(rounds + 1):
            for subject in listed:
                if subject.name in problems:
                    continue
                try:
                    sample = await _sample(subject)
                except NotMeasured as error:
                    problems[subject.name] = str(error)
                    continue
                if number:  # the first round fills caches
                    times.setdefault(subject.name, []).append(sample)
            progress(number)
    return [_row(subject, times.get(subject.name, []), problems) for subject in listed]


def _row(
    subject: Subject, samples: Sequence[tuple[float, float, float]], problems: dict[str, str]
) -> Row:
    about = (subject.name, subject.walls, subject.keeps_state, len(samples))
    if problem := problems.get(subject.name):
        return Row(*about, problem=problem)
    first, again, pandas = (Times.of(values) for values in zip(*samples, strict=True))
    return Row(*about, first, again, pandas)


async def _sample(subject: Subject) -> tuple[float, float, float]:
    first, again = await _in_new(subject, _PRINT, _PRINT)
    (pandas,) = await _in_new(subject, _PANDAS)
    return first, again, pandas


async def _in_new(subject: Subject, *works: tuple[str, str]) -> list[float]:
    """Do the work in a new sandbox. The first time includes its start."""
    if subject.prepare is not None:
        await subject.prepare()
    times = list[float]()
    began = time.perf_counter()
    async with subject.opened() as run:
        for work in works:
            times.append(await _checked(run, work, began))
            began = time.perf_counter()
    return times


async def _checked(run: Run, work: tuple[str, str], began: float) -> float:
    code, expected = work
    output = await run(code)
    ended = time.perf_counter()
    if output.strip() != expected:
        raise NotMeasured(f"{code!r} printed {output!r}")
    return (ended - began) * 1000


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each alternative.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    markdown: Annotated[bool, typer.Option(help="A table in Markdown.")] = False,
) -> None:
    """Install the alternatives to sbx, and measure them in turn with it. As root it also installs
    the Debian packages. Exit code 1 if one of them could not be measured."""
    with Progress(
        console=messages, transient=True, auto_refresh=False, disable=not messages.is_terminal
    ) as bar:
        task = bar.add_task("peers", total=rounds)

        def progress(number: int) -> None:
            bar.update(task, completed=number)
            bar.refresh()

        rows = asyncio.run(measure(rounds, progress))
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
    else:
        _show(rows, markdown=markdown)
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _show(rows: Sequence[Row], *, markdown: bool) -> None:
    output = Console(width=2 * _WIDTH if markdown else _WIDTH)  # a row of Markdown is one line
    columns = ("alternative", "walls", "state", "first result", "next call", "first pandas")
    table = Table(*columns, box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    sbx = rows[0]
    for row in rows:
        table.add_row(row.name, row.walls, "kept" if row.keeps_state else "", *_cells(row, sbx))
    output.print(table)


def _cells(row: Row, sbx: Row) -> Sequence[Any]:
    if row.problem or sbx.problem:
        return (row.problem or "sbx was not measured", "", "")
    pairs = ((row.first, sbx.first), (row.next, sbx.next), (row.pandas, sbx.pandas))
    return [times.text(of_sbx) for times, of_sbx in pairs if times and of_sbx]
