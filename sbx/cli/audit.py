"""`sbx audit`: check the audit log of a service."""

from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write

app = typer.Typer(help="Check the audit log.", rich_markup_mode=None)


@app.command()
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

    This includes the rotated files, audit-*.jsonl. If the key is available, check the signatures,
    too. The service does not need to run. A
    truncated end is visible only by comparison with an earlier head, so keep the heads that this
    command prints.
    """
    from sbx.telemetry.audit_chain import verify as verified

    path = file or _log_of(data_dir)
    result = verified(path, key := _key_of(path, key_file))
    if as_json:
        output.document(
            {
                "file": str(path),
                "ok": result.ok,
                "count": result.count,
                "broken_at": result.broken_at,
                "broken_in": None if result.broken_in is None else str(result.broken_in),
                "files": result.files,
                "earlier": result.earlier,
                "head": result.head,
                "torn": result.torn,
                "signed": result.signed,
                "signatures_checked": key is not None,
            }
        )
    elif result.ok:
        checked = "signed" if key is not None else "with signatures that were not checked (no key)"
        signed = f"{result.signed} {checked}"
        if result.files > 1:
            signed += f", in {result.files} files"
        if result.earlier:
            signed += f", after {result.earlier} lines in older files that are not here"
        write(
            STDOUT,
            f"{one_line(str(path))}: ok, {result.count} lines, {signed}, head {result.head}\n",
        )
    else:
        output.failure(
            f"{result.broken_in}: the chain is broken at line {result.broken_at}",
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
