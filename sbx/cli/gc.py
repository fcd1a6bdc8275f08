"""`sbx gc` and `sbx audit`: maintenance commands for the operator of a service."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import connect, exits, report
from sbx.cli.terminal import STDOUT, one_line, write

audit = typer.Typer(help="Check the audit log.", rich_markup_mode=None)


class GcTask(StrEnum):
    IDLE = "idle_session"
    EXPIRED = "expired_sandbox"
    WORKSPACE = "orphan_cargo"
    CONTAINER = "orphan_container"


def gc(
    task: Annotated[
        list[GcTask] | None, typer.Option(help="Report only this task; all tasks run. Repeatable.")
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Collect idle, expired and orphaned resources now. The service also does so periodically."""
    request = {"tasks": task} if task else {}
    summary = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/gc/run", json=request)
    )
    if as_json:
        report.document(summary)
    else:
        from sbx.cli.tables import print_table

        rows = [
            (result["task_name"], str(result["cleaned_count"]), str(result["skipped_count"]))
            for result in summary["results"]
        ]
        print_table(("task", "collected", "left"), rows)
        for result in summary["results"]:
            for error in result["errors"]:
                report.failure(f"{result['task_name']}: {error}")
    return exits.Exit.FAILED if summary["total_errors"] else exits.Exit.OK


@audit.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(help="The log; default: the log of this user's service.", metavar="[FILE]"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="SBX_DATA_DIR", help="The service's data directory.", metavar="DIR"),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--signed-by", help="The key; default: audit_key next to the log.", metavar="FILE"
        ),
    ] = None,
    as_json: connect.Json = False,
) -> int:
    """Check that no line of the audit log was changed, added, moved or removed.

    If the key is available, check the signatures, too. The service does not need to run. A
    truncated end is visible only by comparison with an earlier head, so keep the heads that this
    command prints.
    """
    from sbx.telemetry.audit import verify as verified

    path = file or _log_of(data_dir)
    result = verified(path, key := _key_of(path, key_file))
    if as_json:
        report.document(
            {
                "file": str(path),
                "ok": result.ok,
                "count": result.count,
                "broken_at": result.broken_at,
                "head": result.head,
                "torn": result.torn,
                "signed": result.signed,
                "signatures_checked": key is not None,
            }
        )
    elif result.ok:
        checked = "signed" if key is not None else "with signatures that were not checked (no key)"
        signed = f"{result.signed} {checked}"
        write(
            STDOUT,
            f"{one_line(str(path))}: ok, {result.count} lines, {signed}, head {result.head}\n",
        )
    else:
        report.failure(
            f"{path}: the chain is broken at line {result.broken_at}",
            "that line, or one before it, was changed, moved or removed after it was written; "
            "or it was signed with another key",
        )
    return exits.Exit.OK if result.ok else exits.Exit.FAILED


def _log_of(data_dir: Path | None) -> Path:
    if data_dir is None:
        from sbx.api.server.settings import read_settings

        data_dir = read_settings().settings.data
    return data_dir / "audit.jsonl"


def _key_of(log: Path, key_file: Path | None) -> bytes | None:
    """Return the key, or None without one. Raise Unavailable if it cannot be read."""
    from sbx.workspace.secret_files import read_secret

    path = key_file or log.with_name("audit_key")
    return read_secret(path) if key_file is not None or path.exists() else None
