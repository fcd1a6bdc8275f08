"""`sbx doctor`: report the walls and the start paths that this host supports, with remedies for
the missing ones. With --attack, test whether the walls stop attacks."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import output
from sbx.cli.exits import Exit
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import BadRequest, SbxError


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    attack: Annotated[
        bool,
        typer.Option(
            "--attack", help="Run attacks in temporary sandboxes, and report the results."
        ),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --attack: try the attacks on a directory of the host in a private"
            " subdirectory of DIR, so on the file system of your projects.",
        ),
    ] = None,
) -> int:
    """Test every layer of this host, and start a sandbox by each path.

    The report names the cause and the remedy of each missing layer. A path is a way to start a
    kernel: cold works on every host; fork and pool are faster, with the same walls. The exit code
    is 0 if the policy `default` runs here, else 3.

    With --attack, run many attacks in sandboxes of the shipped policies instead. This takes about
    a minute. No attack harms this host, even if its wall is missing. An attack counts as tried
    only if the same act succeeds where it is allowed. The exit code is 0 if all attacks were
    stopped, 1 if one escaped, and 3 if not all could be tried, also because this host cannot
    enforce a policy.
    """
    import asyncio  # lazy imports keep `sbx --help` fast

    if attack:
        return _attack(directory, as_json=as_json)
    if directory is not None:
        raise BadRequest(
            "--directory belongs to --attack", hint="sbx doctor --attack --directory DIR"
        )
    from sbx.doctor.host_check import examine

    check = asyncio.run(examine())
    console = asyncio.run(_console_state())
    if as_json:
        output.document({**check.to_dict(), "console": console})
    else:
        user = "root" if check.root else "an unprivileged user"
        write(STDOUT, f"Linux {check.linux} on {check.machine}, as {user}\n")
        if check.resources is not None:
            write(STDOUT, f"{check.resources.sentence()}\n")
        write(STDOUT, "\n")
        _print_tables(check.tables())
        # Outside of the tables, a remedy is one line, which can be copied.
        hints = [f"{label:>7}: {one_line(text)}\n" for label, text in check.hints()]
        write(STDOUT, "".join([*hints, "\n"] if hints else []))
        write(STDOUT, f"{one_line(check.live.sentence())}\n")
        if (other := _other_sbx()) is not None:
            output.note(
                f"the first sbx on PATH is {other}, another program (Docker has one of this name):"
                " run ours as sbx-runtime, or put its directory first"
            )
        if console == "missing":
            output.note(
                "the service that runs here has no listener for browsers:"
                " start it without --no-console, so that sbx console can open its page"
            )
    return Exit.OK if check.ok else Exit.REFUSED


async def _console_state() -> str:
    """Return whether the service at the default address has a listener for browsers: `found`,
    `missing`, or `no_service`."""
    from sbx.api.console.settings import ConsoleSettings
    from sbx.client import Client

    async with Client(timeout=5, retries=0) as client:
        try:
            await client.health()
        except SbxError:
            return "no_service"
        path = ConsoleSettings(socket=Path(client.address)).console_path
        # A service at a URL may have it on another host.
        here = client.address.startswith("/")
        return "found" if not here or (path is not None and path.is_socket()) else "missing"


def _other_sbx() -> Path | None:
    """Return the program that a shell runs as `sbx`, if it is not of this installation."""
    first = shutil.which("sbx")
    if first is None or Path(first).parent == Path(sys.executable).parent:
        return None
    try:
        with open(first, "rb") as program:
            is_ours = b"sbx.cli" in program.read(4096)  # the script of another environment
    except OSError:
        return None
    return None if is_ours else Path(first)


def _attack(directory: Path | None, *, as_json: bool) -> int:
    import asyncio

    from sbx.doctor.attacks.host_executables import subdirectory
    from sbx.doctor.attacks.runner import AttackRunner
    from sbx.doctor.report import run_attacks

    def on_trial(trial: AttackRunner) -> None:
        output.note(f"{trial.tried} attacks on {trial.policy} by {trial.path} were tried")

    directory = directory and directory.absolute()
    with subdirectory(directory):
        pass  # an unusable directory ends the command before any attack
    report = asyncio.run(run_attacks(directory, on_trial))
    totals = report.to_dict()
    if as_json:
        output.document(totals)
    else:
        _print_tables(report.tables())
        write(STDOUT, "".join(f"{one_line(line)}\n" for line in report.sentences()))
        exempt = sum(report.exempt().values())
        write(
            STDOUT,
            f"{totals['tried']} attacks tried in {report.duration_s:.0f} s: {totals['held']} held,"
            f" {len(report.escaped)} escaped, {len(report.unclear)} unclear;"
            f" {len(report.not_tried)} not tried, {exempt} do not apply\n",
        )
    if report.escaped:
        return Exit.FAILED
    return Exit.OK if report.complete else Exit.REFUSED


def _print_tables(tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]) -> None:
    for heads, rows in tables:
        output.print_table(heads, rows)
        write(STDOUT, "\n")
