"""scripts/bench: run the benchmarks and print a table, or a JSON line each."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import cold_start
from bench.samples import Samples

BENCHES = {module.NAME: module for module in (cold_start,)}
messages = Console(stderr=True)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which; all when none is named.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    quick: Annotated[bool, typer.Option(help="Fewer rounds.")] = False,
) -> None:
    """Measure sbx, each figure in turn with its baseline. Quote p50, minimum and ratio."""
    for name in names or BENCHES:
        if name not in BENCHES:
            raise typer.BadParameter(f"{name} is none of: {', '.join(BENCHES)}")
    samples = [_measure(name, quick=quick) for name in names or BENCHES]
    if as_json:
        for sample in samples:
            print(json.dumps(sample.row()), flush=True)
    else:
        Console().print(_table(samples))


def _measure(name: str, *, quick: bool) -> Samples:
    module = BENCHES[name]
    rounds = module.QUICK_ROUNDS if quick else module.ROUNDS
    with Progress(console=messages, transient=True) as bar:
        task = bar.add_task(name, total=rounds)
        samples: Samples = module.measure(rounds, lambda done, _: bar.update(task, completed=done))
        return samples


def _table(samples: list[Samples]) -> Table:
    table = Table("what", "p50", "min", "p99", "n", "baseline p50", "ratio", "must", "baseline")
    for sample in samples:
        row = sample.row()
        figures = (f"{row[key]:.1f} {sample.unit}" for key in ("p50", "min", "p99"))
        table.add_row(
            sample.name,
            *figures,
            str(row["n"]),
            f"{row['baseline_p50']:.1f} {sample.unit}",
            f"{row['ratio']:.2f}",
            f"≤ {sample.must:g} {sample.unit}",
            sample.baseline_name,
        )
    return table


if __name__ == "__main__":
    typer.run(main)
