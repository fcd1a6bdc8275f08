"""python -m bench torture: one run and its report."""

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.torture import model
from bench.torture.clients import Client, Credentials, over_tcp
from bench.torture.faults import Injector
from bench.torture.growth import Growth, growth
from bench.torture.ledger import Ledger
from bench.torture.oracle import Finding, findings, summary
from bench.torture.plan import plan
from bench.torture.service_process import ServiceUnderTest, disk
from bench.torture.survey import Traces, descriptors_left, left_behind, survey, works_again
from sbx.linux.descriptors import raise_nofile_limit
from sbx.linux.prctl import set_child_subreaper

CLIENTS = 30
PAUSE_S = 0.1
_FILES = 8192
_HEALED_S = 120.0
_SHOWN = 40
_LEAST_S = 120.0  # of a life whose slopes are reported
_WIDTH = 160
messages = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run. `kept` is the directory of ledger and log after a run with findings."""

    seed: int
    seconds: float
    acts: dict[str, int]
    statuses: dict[str, int]
    faults: dict[str, int]
    not_made: dict[str, str]
    lives: int
    slowest_s: float
    growth: list[Growth]
    findings: list[Finding]
    kept: str | None

    def row(self) -> dict[str, Any]:
        """Return the JSON line of the report."""
        rules = summary(self.findings)
        return {"name": "torture", "met": not self.findings, "rules": rules, **asdict(self)}


def main(
    minutes: Annotated[float, typer.Option(help="How long faults strike.")] = 15.0,
    seed: Annotated[int, typer.Option(help="Of the faults and of the clients' work.")] = 1,
    clients: Annotated[int, typer.Option(help="How many work at once.")] = CLIENTS,
    pause: Annotated[float, typer.Option(help="Seconds a client pauses at most.")] = PAUSE_S,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Torture a service, and compare its end with its replies. Exit code 1 when they differ."""
    report = asyncio.run(torture(minutes * 60, seed, clients=clients, pause_s=pause))
    if as_json:
        print(json.dumps(report.row()), flush=True)
    else:
        show(report)
    if report.findings:
        raise typer.Exit(1)


async def torture(seconds: float, seed: int, *, clients: int, pause_s: float) -> Report:
    """One run. Processes that the service leaves become children of this one."""
    raise_nofile_limit(_FILES)
    set_child_subreaper(True)
    ledger = Ledger()
    try:
        with disk() as place:
            log = Path(tempfile.mkdtemp(prefix="sbx-torture-log-")) / "log"
            async with model.serving() as model_url:
                service = ServiceUnderTest(ledger, place, log, model_url)
                before = Traces.now(service)
                try:
                    await _run(service, seconds, seed, clients, pause_s)
                except TimeoutError:
                    ledger.left.append(f"a service that does not answer within {_HEALED_S:g} s")
                ledger.left += await left_behind(service, before)
    finally:
        set_child_subreaper(False)
    result = findings(ledger)
    if result:
        ledger.write(log.with_name("ledger.jsonl"))
    else:
        shutil.rmtree(log.parent)
    return _report(ledger, result, seed, seconds, str(log.parent) if result else None)


async def _run(
    service: ServiceUnderTest, seconds: float, seed: int, clients: int, pause_s: float
) -> None:
    """Work under faults, heal, survey, restart and survey again; then end."""
    serving = asyncio.create_task(service.run())
    try:
        await _ready(service)
        began = service.now()
        credentials = Credentials()
        async with asyncio.TaskGroup() as group:
            until = began + seconds
            injector = Injector(service, Random(seed))
            group.create_task(injector.carry_out(plan(seed, seconds), began, seconds))
            for number in range(clients):
                group.create_task(_client(service, number, seed, until, credentials, pause_s))
        await _ready(service)
        await survey(service, clients, credentials)
        await works_again(service)
        await service.restart()
        await _ready(service)
        await survey(service, clients, credentials)
        service.ledger.left += await descriptors_left(service)
    finally:
        await service.close()
        await serving


async def _ready(service: ServiceUnderTest) -> None:
    async with asyncio.timeout(_HEALED_S):
        await service.ready.wait()


async def _client(
    service: ServiceUnderTest,
    number: int,
    seed: int,
    until: float,
    credentials: Credentials,
    pause_s: float,
) -> None:
    async with service.client(tcp=over_tcp(number)) as http:
        random = Random(f"{seed}-{number}")
        await Client(service, http, number, random, credentials, pause_s=pause_s).work(until)


def _report(
    ledger: Ledger, result: list[Finding], seed: int, seconds: float, kept: str | None
) -> Report:
    replies = (str(act.status or act.code) for act in ledger.acts)
    return Report(
        seed=seed,
        seconds=seconds,
        acts=_counted(act.kind for act in ledger.acts),
        statuses=_counted(replies),
        faults=_counted(fault.kind for fault in ledger.faults if not fault.note),
        not_made={fault.kind: fault.note for fault in ledger.faults if fault.note},
        lives=len(ledger.lives),
        slowest_s=round(max(act.ended - act.began for act in ledger.acts), 2),
        growth=growth(ledger.samples, least_s=_LEAST_S),
        findings=result,
        kept=kept,
    )


def _counted(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def show(report: Report) -> None:
    """Print the report as tables."""
    output = Console()
    if not output.is_terminal:
        output = Console(width=_WIDTH)
    counts = {"acts": report.acts, "replies": report.statuses, "faults": report.faults}
    for name, counted in counts.items():
        words = ", ".join(f"{name} {count}" for name, count in counted.items())
        output.print(f"{name}: {words}", markup=False, highlight=False)
    for kind, note in report.not_made.items():
        output.print(f"fault not made: {kind}: {note}", markup=False, highlight=False)
    words = f"{report.lives} processes, slowest reply {report.slowest_s} s, seed {report.seed}"
    output.print(words, highlight=False)
    output.print(_growth_table(report.growth))
    output.print(_findings_table(report.findings) if report.findings else "no findings")
    if report.kept is not None:
        output.print(f"ledger and log: {report.kept}", markup=False, highlight=False)


def _growth_table(lives: Sequence[Growth]) -> Table:
    table = Table("process", "seconds", "MiB/h", "MiB max", "descriptors/h", "descriptors max")
    for life in lives:
        slopes = (life.rss_mib_per_hour, life.fds_per_hour)
        memory, fds = ("" if slope is None else f"{slope:g}" for slope in slopes)
        cells = (life.pid, life.seconds, memory, life.rss_mib_max, fds, life.fds_max)
        table.add_row(*map(str, cells))
    return table


def _findings_table(listed: Sequence[Finding]) -> Table:
    table = Table("finding", "at s", "of", "text")
    for rule, count in summary(listed).items():
        of_rule = [finding for finding in listed if finding.rule == rule]
        for finding in of_rule[: max(3, _SHOWN // len(summary(listed)))]:
            table.add_row(finding.rule, f"{finding.at:.1f}", finding.target, finding.text)
        table.add_row(f"{rule}: {count} in all", "", "", "", style="bold")
    return table
