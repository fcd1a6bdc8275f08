"""`sbx gc` and `sbx audit`: what the operator of a service does now and then."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import exits, reach, report
from sbx.cli.terminal import STDOUT, one_line, write

audit = typer.Typer(help="Check the log of who did what.", rich_markup_mode=None)


class Task(StrEnum):
    IDLE = "idle_session"
    EXPIRED = "expired_sandbox"
    CARGO = "orphan_cargo"
    CONTAINER = "orphan_container"


def gc(
    task: Annotated[
        list[Task] | None, typer.Option(help="Report only this; all of them run. Repeatable.")
    ] = None,
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Collect now what is idle, expired or left over; the service does so by itself, too."""
    asked = {"tasks": task} if task else {}
    told = reach.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/gc/run", json=asked)
    )
    if as_json:
        report.document(told)
    else:
        from sbx.cli.tables import print_table

        rows = [
            (one["task_name"], str(one["cleaned_count"]), str(one["skipped_count"]))
            for one in told["results"]
        ]
        print_table(("task", "collected", "left"), rows)
        for one in told["results"]:
            for error in one["errors"]:
                report.failure(f"{one['task_name']}: {error}")
    return exits.Exit.FAILED if told["total_errors"] else exits.Exit.OK


@audit.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(help="The log; else that of the service of this user.", metavar="[FILE]"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="SBX_DATA_DIR", help="The service's data directory.", metavar="DIR"),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--signed-by", help="The key; else audit_key beside the log.", metavar="FILE"),
    ] = None,
    as_json: reach.Json = False,
) -> int:
    """Whether nobody changed, added, moved or took out a line, and signatures where there is the
    key. Needs no running service.

    That its end was cut off shows only beside an earlier head, so keep those that this prints.
    """
    from sbx.telemetry.audit import verify as verified

    path = file or _log_of(data_dir)
    found = verified(path, key := _key_of(path, key_file))
    if as_json:
        report.document(
            {
                "file": str(path),
                "ok": found.ok,
                "count": found.count,
                "broken_at": found.broken_at,
                "head": found.head,
                "torn": found.torn,
                "signed": found.signed,
                "signatures_checked": key is not None,
            }
        )
    elif found.ok:
        checked = "signed" if key is not None else "with signatures that no key was there to check"
        signed = f"{found.signed} {checked}"
        write(
            STDOUT, f"{one_line(str(path))}: ok, {found.count} lines, {signed}, head {found.head}\n"
        )
    else:
        report.failure(
            f"{path}: the chain is broken at line {found.broken_at}",
            "that line, or one before it, was changed, moved or taken out since it was written; "
            "or it was signed with another key",
        )
    return exits.Exit.OK if found.ok else exits.Exit.FAILED


def _log_of(data_dir: Path | None) -> Path:
    if data_dir is None:
        from sbx.api.settings import read_settings

        data_dir = read_settings().settings.data
    return data_dir / "audit.jsonl"


def _key_of(log: Path, key_file: Path | None) -> bytes | None:
    """Raises Unavailable for a key that was named, or is there, and cannot be read."""
    from sbx.runtime.secret_files import read_secret

    path = key_file or log.with_name("audit_key")
    return read_secret(path) if key_file is not None or path.exists() else None
