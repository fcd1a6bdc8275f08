"""scripts/bench: run the benchmarks and print a table, or a JSON line each."""

import asyncio
import json
import os
import sys
import time
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import (
    acquire,
    agent_step,
    cells,
    churn,
    cold_start,
    console,
    density,
    disk,
    host_directory,
    jupyter,
    neighbour,
    node,
    parallel_create,
    pty,
    sdks,
    service,
    shell,
    teardown,
)
from bench.samples import Bench, NotMeasured, Samples, compared, figure
from sbx import SbxError

_MODULES = (
    acquire,
    cold_start,
    cells,
    shell,
    pty,
    node,
    teardown,
    churn,
    parallel_create,
    density,
    disk,
    host_directory,
    service,
    sdks,
    agent_step,
    jupyter,
    neighbour,
    console,
)
# Runs with a report instead of a row.
_COMMANDS = {
    "torture": "bench.torture.command",
    "soak": "bench.soak",
    "growth": "bench.growth",
    "peers": "bench.peers.command",
    "stalls": "bench.stalls",
    "timeline": "bench.timeline",
}
BENCHES = {bench.name: bench for module in _MODULES for bench in module.BENCHES}
_REDRAW_S = 0.2
_WIDTH = 160
messages = Console(stderr=True)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Which of: {', '.join(BENCHES)}; all by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    quick: Annotated[bool, typer.Option(help="Fewer rounds, less than a minute in all.")] = False,
    check: Annotated[bool, typer.Option(help="Exit code 1 when a must is missed.")] = False,
) -> None:
    """Measure sbx, each figure in turn with its baseline. Quote p50, minimum and ratio.

    Exit code 0 when everything could be measured, 1 when something could not.

    Other commands, each with its own --help, as the first word: `torture` lets clients work on a
    service under faults, `soak` loads a service for many minutes, `peers` measures the alternatives
    to sbx, `timeline` shows the steps of a cell and of the start of a kernel, `stalls` measures how
    long the largest inputs stop the event loop, and `growth` how memory grows with each call.
    """
    if unknown := [name for name in names or () if name not in BENCHES]:
        raise typer.BadParameter(f"{unknown[0]} is none of: {', '.join(BENCHES)}")
    load = os.getloadavg()[0]
    chosen = [BENCHES[name] for name in names or BENCHES]
    if quick and not names:
        chosen = [bench for bench in chosen if bench.quick_rounds is not None]
    rows = []
    for bench in chosen:
        if (row := _row(bench, quick=quick)) is not None:
            rows.append(row)
            if as_json:
                print(json.dumps(row), flush=True)
    if rows and not as_json:
        _show(rows, load)
    if len(rows) < len(chosen) or (check and not all(row["met"] for row in rows)):
        raise typer.Exit(1)


def _row(bench: Bench, *, quick: bool) -> dict[str, Any] | None:
    """Measure one; None, having said why, when it could not be measured."""
    try:
        return bench.row(asyncio.run(_measured(bench, quick=quick)))
    except (NotMeasured, SbxError) as error:
        _complain(bench.name, error)
    return None


def _complain(name: str, error: NotMeasured | SbxError) -> None:
    text = error.message if isinstance(error, SbxError) else error
    messages.print(f"error: {name}: {text}", style="red", markup=False)
    if isinstance(error, SbxError) and error.hint:
        messages.print(f"hint: {error.hint}", markup=False)


async def _measured(bench: Bench, *, quick: bool) -> Samples:
    """With a bar that is drawn between two samples only: a thread that draws would be measured."""
    rounds = bench.quick_rounds if quick and bench.quick_rounds is not None else bench.rounds
    drawn = 0.0
    if not messages.is_terminal:
        messages.print(f"{bench.name} …")
    with Progress(
        console=messages,
        transient=True,
        auto_refresh=False,
        disable=not messages.is_terminal,
    ) as bar:
        task = bar.add_task(bench.name, total=rounds)
        bar.refresh()

        def progress(done: int, total: int) -> None:
            nonlocal drawn
            bar.update(task, completed=done, total=total)
            if time.monotonic() - drawn > _REDRAW_S:
                bar.refresh()
                drawn = time.monotonic()

        return await bench.measure(rounds, progress)


def _show(rows: list[dict[str, Any]], load: float) -> None:
    output = Console()
    if not output.is_terminal:
        output = Console(width=_WIDTH)
    output.print(_table(rows))
    for row in rows:
        if row["also"]:
            figures = (
                f"{name} {figure(value)} {row['also_unit']}" for name, value in row["also"].items()
            )
            output.print(f"{row['name']}: {'; '.join(figures)}", markup=False, highlight=False)
    output.print(
        "scaled: the p50 at the speed of the machine that the bounds were set on, by the baseline",
        style="dim",
    )
    output.print(f"{os.cpu_count()} cores, load average {load:.1f} at the start", style="dim")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "what", "p50", "min", "p99", "n", "must", "met", "scaled", "baseline p50", "", "baseline"
    )
    for row in rows:
        bound = "≤" if row["better"] == "lower" else "≥"
        scaled = row["scaled_p50"]
        figures = (f"{figure(row[key])} {row['unit']}" for key in ("p50", "min", "p99"))
        table.add_row(
            row["name"],
            *figures,
            str(row["n"]),
            _must(row, bound),
            _told(row["met"]),
            "" if scaled is None else f"{figure(scaled)}, {_told(row['scaled_met'])}",
            f"{figure(row['baseline_p50'])} {row['unit']}",
            compared(row),
            row["baseline"],
        )
    return table


def _must(row: dict[str, Any], bound: str) -> str:
    if row["ratio_max"] is not None:
        return f"{bound} {row['ratio_max']:g} times"
    return f"{bound} {row['must']:g} {row['unit']}" if row["must"] is not None else ""


def _told(met: bool) -> str:
    return "yes" if met else "[red]no[/]"


if __name__ == "__main__":
    if (command := " ".join(sys.argv[1:2])) in _COMMANDS:
        del sys.argv[1]
        try:
            typer.run(import_module(_COMMANDS[command]).main)
        except (NotMeasured, SbxError) as error:
            _complain(command, error)
            sys.exit(1)
    else:
        typer.run(main)
