"""`sbx serve`: run the service, or print the systemd units that run it."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import output
from sbx.cli.agent_options import EnvFile
from sbx.cli.exits import Exit
from sbx.cli.terminal import STDOUT, write
from sbx.errors import BadRequest

_UNITS = ("system", "user", "socket")


def serve(
    socket: Annotated[
        Path | None, typer.Option(help="The socket to listen on; its directory gets the mode 0700.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Listen on TCP, too; there, a key is needed.", metavar="HOST:PORT"),
    ] = None,
    console: Annotated[
        str | None,
        typer.Option(help="Listen on TCP for browsers, permanently.", metavar="HOST:PORT"),
    ] = None,
    no_console: Annotated[
        bool, typer.Option("--no-console", help="Have no socket for `sbx console`.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="The directory of the store and of all files.", metavar="DIR"),
    ] = None,
    policies: Annotated[
        list[Path] | None,
        typer.Option(help="A directory of policies. Repeatable.", metavar="DIR"),
    ] = None,
    mount_dirs: Annotated[
        list[Path] | None,
        typer.Option(
            help="The operator may mount this directory, or one below it, into live sandboxes."
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
            help="Projects may work in directories of this account, including root. Jails see these"
            " directories as their own. Repeatable.",
            metavar="USER",
        ),
    ] = None,
    socket_group: Annotated[
        str | None, typer.Option(help="A group that may connect, too.", metavar="GROUP")
    ] = None,
    socket_mode: Annotated[
        str | None, typer.Option(help="The mode of the socket, such as 0660.", metavar="MODE")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages of this origin may call the service. Repeatable.", metavar="ORIGIN"
        ),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(help="As root: the account of the process that parses HTTP.", metavar="USER"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The file with the settings.", metavar="FILE")
    ] = None,
    env_file: EnvFile = None,
    log_format: Annotated[
        str | None, typer.Option(help="auto, json or console.", metavar="FORMAT")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", metavar="LEVEL")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(help="How long runs may continue after SIGTERM.", metavar="SECONDS"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the log and all other output as lines of JSON.")
    ] = False,
    print_unit: Annotated[
        str | None,
        typer.Option(
            help="Print a unit for systemd (system, user, or socket) and exit.",
            metavar="KIND",
        ),
    ] = None,
) -> int:
    """Serve sandboxes over HTTP on a Unix socket, until SIGTERM or Ctrl-C.

    Every option is a setting. It may also come from the environment (SBX_SOCKET …) or from your own
    sbx.toml, in this order: see `sbx config`. A .env or sbx.toml of the working directory comes
    last, and may set limits and logging only. --config and --env-file name files that may set all.

    The service identifies a client of the socket by its user account. A key is needed on TCP only.
    As root, this process drops its privileges before it serves.
    """
    if print_unit is not None:
        write(STDOUT, unit(print_unit))
        return Exit.OK
    if user is not None and os.geteuid() != 0:
        raise BadRequest(
            "--user selects the account that a service of root changes to, and you are not root",
            hint="omit --user: the service runs as you",
        )
    from sbx.api.server.settings import read_settings

    result = read_settings(
        {
            "socket": socket,
            "listen": listen,
            "console": console,
            "console_socket": False if no_console else None,
            "data_dir": data_dir,
            "policy_dirs": policies or None,
            "mount_dirs": mount_dirs or None,
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
        env_file=env_file,
    )
    for name, source in result.unknown if not as_json else ():
        output.note(f"{name} in {source} is not a setting of sbx")
    from sbx.api.server.serve import serve

    serve(result.settings, partial(_print_key, as_json=as_json), config=config, env_file=env_file)
    return Exit.OK


def unit(kind: str) -> str:
    """Return the text of a unit that starts this installation of sbx. Raise BadRequest."""
    if kind not in _UNITS:
        raise BadRequest(f"unknown unit {kind!r}", code="usage", hint=f"{', '.join(_UNITS)}")
    directory = Path(__file__).parents[1] / "systemd"
    name = "sbx.socket" if kind == "socket" else f"sbx-{kind}.service"
    return (directory / name).read_text().replace("@SBX@", _command())


def _command() -> str:
    """Return the full command that starts this sbx. systemd does not use the user's PATH."""
    words = [sys.executable, "-I", "-m", "sbx"]
    return " ".join(f'"{word}"' if " " in word else word for word in words)


def _print_key(key: str, key_file: Path, *, as_json: bool) -> None:
    """Print the first key once. Do not print it to a journal, which other users can read."""
    if _for_a_journal():
        output.note(f"the first key is in {key_file}")
        return
    if as_json:
        output.document({"first_key": key, "kept": str(key_file)})
        return
    write(STDOUT, f"first key: {key}\n")
    output.note(f"it is shown only this once; it is stored in {key_file}")


def _for_a_journal() -> bool:
    return any(os.environ.get(name) for name in ("JOURNAL_STREAM", "INVOCATION_ID"))
