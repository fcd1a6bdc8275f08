"""`sbx serve`: the service, and the units by which systemd runs it."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import report
from sbx.cli.exits import Exit
from sbx.cli.terminal import STDOUT, write
from sbx.errors import BadRequest

_UNITS = ("system", "user", "socket")


def serve(
    socket: Annotated[
        Path | None, typer.Option(help="Where to listen; its directory is made 0700.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Listen on TCP as well, where a key is needed.", metavar="HOST:PORT"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the store and all files lie.", metavar="DIR")
    ] = None,
    policies: Annotated[
        list[Path] | None,
        typer.Option(help="A directory of policies. Repeatable.", metavar="DIR"),
    ] = None,
    attach_dirs: Annotated[
        list[Path] | None,
        typer.Option(
            help="The operator may attach this directory, or one below it, to sandboxes that live."
            " Repeatable.",
            metavar="DIR",
        ),
    ] = None,
    project_dirs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Projects may work in this directory, or one below it. Repeatable.", metavar="DIR"
        ),
    ] = None,
    project_owners: Annotated[
        list[str] | None,
        typer.Option(
            help="Projects may work in directories of this account, root included, which jails"
            " are shown as their own. Repeatable.",
            metavar="USER",
        ),
    ] = None,
    socket_group: Annotated[
        str | None, typer.Option(help="The group that may connect too.", metavar="GROUP")
    ] = None,
    socket_mode: Annotated[
        str | None, typer.Option(help="The mode of the socket, as in 0660.", metavar="MODE")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Pages of this origin may call. Repeatable.", metavar="ORIGIN"),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(help="As root: whom the process that parses HTTP becomes.", metavar="USER"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The file with the settings.", metavar="FILE")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="auto, json or console.", metavar="FORMAT")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", metavar="LEVEL")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(help="How long runs may go on after SIGTERM.", metavar="SECONDS"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Log, and tell everything else, as lines of JSON.")
    ] = False,
    print_unit: Annotated[
        str | None,
        typer.Option(
            help="Print a unit for systemd: system, user, or socket. Nothing is served.",
            metavar="KIND",
        ),
    ] = None,
) -> int:
    """Serve sandboxes over HTTP on a Unix socket, until SIGTERM or Ctrl-C.

    Every option is a setting, which may also come from the environment (SBX_SOCKET …), then from
    your own sbx.toml: see `sbx config`. A .env or sbx.toml of the working directory comes last, and
    may set limits and logging only; --config FILE names a file that may set all.

    Who connects to the socket is known by its user; a key is needed on TCP only. As root, this
    process gives up its rights before it serves.
    """
    if print_unit is not None:
        write(STDOUT, unit(print_unit))
        return Exit.OK
    from sbx.api.settings import read_settings

    found = read_settings(
        {
            "socket": socket,
            "listen": listen,
            "data_dir": data_dir,
            "policy_dirs": policies or None,
            "attach_dirs": attach_dirs or None,
            "project_dirs": project_dirs or None,
            "project_owners": project_owners or None,
            "socket_group": socket_group,
            "socket_mode": socket_mode,
            "cors_origins": cors_origin or None,
            "user": user,
            "log_format": log_format or ("json" if as_json else None),
            "log_level": log_level,
            "drain_timeout": drain_timeout,
        },
        config=config,
    )
    for name, source in found.unknown if not as_json else ():
        report.note(f"{name} of {source} is no setting of sbx")
    from sbx.api.serve import serve

    serve(found.settings, partial(_say_key, as_json=as_json), config=config)
    return Exit.OK


def unit(kind: str) -> str:
    """The text of a unit, for the sbx that prints it. Raises BadRequest."""
    if kind not in _UNITS:
        raise BadRequest(f"there is no unit {kind!r}", code="usage", hint=f"{', '.join(_UNITS)}")
    directory = Path(__file__).parents[1] / "systemd"
    name = "sbx.socket" if kind == "socket" else f"sbx-{kind}.service"
    return (directory / name).read_text().replace("@SBX@", _command())


def _command() -> str:
    """How this sbx is started, whole: systemd looks nothing up on a PATH of ours."""
    words = [sys.executable, "-I", "-m", "sbx"]
    return " ".join(f'"{word}"' if " " in word else word for word in words)


def _say_key(key: str, kept: Path, *, as_json: bool) -> None:
    """Once, and to a person: what a journal keeps is read by others."""
    if _for_a_journal():
        report.note(f"the first key is in {kept}")
        return
    if as_json:
        report.document({"first_key": key, "kept": str(kept)})
        return
    write(STDOUT, f"first key: {key}\n")
    report.note(f"it is shown this once, and kept in {kept}")


def _for_a_journal() -> bool:
    return any(os.environ.get(name) for name in ("JOURNAL_STREAM", "INVOCATION_ID"))
