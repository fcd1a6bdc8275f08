"""`sbx command`: what runs in the background of a sandbox."""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sbx.cli import exits, moments, reach, report
from sbx.cli.terminal import STDOUT, Channel, one_line, write
from sbx.errors import BadRequest
from sbx.protocol.commands import (
    LOG_PIECE_MAX,
    CommandState,
    CommandStatus,
    LogPiece,
    piece_to_json,
    status_to_json,
)

if TYPE_CHECKING:
    from sbx.client.commands import RemoteCommand, RemoteCommands

T = TypeVar("T")
_WRITTEN_MAX = 1 << 20  # bytes of one write
_SHOWN = 60

app = typer.Typer(
    help="List, follow, feed and stop what runs in the background.", rich_markup_mode=None
)
Name = Annotated[str, typer.Argument(help="As in sbx command list.", metavar="COMMAND")]


@app.command("list")
def list_commands(
    sandbox_id: reach.Id,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """What runs, and what ended a while ago; the newest first."""
    found = _of(socket, key, sandbox_id, conversation, lambda commands: commands.list())
    if as_json:
        report.document({"commands": [status_to_json(one) for one in found]})
    elif not found:
        report.note("nothing was started in the background: sbx exec --background")
    else:
        from sbx.cli.tables import print_table

        rows = [
            (one.id, _ended(one), moments.since(one.started_at), _cut(one.command)) for one in found
        ]
        print_table(("command", "state", "started", "what"), rows)
    return exits.Exit.OK


@app.command("show")
def show_command(
    sandbox_id: reach.Id,
    command_id: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """How a command is; with --wait, exits as it did."""

    async def look(command: "RemoteCommand") -> CommandStatus:
        return await (command.wait() if wait else command.status())

    told = _at(socket, key, sandbox_id, conversation, command_id, look)
    _show(told, as_json=as_json)
    return _exit(told) if wait else exits.Exit.OK


@app.command("logs")
def show_logs(
    sandbox_id: reach.Id,
    command_id: Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it has ended, or Ctrl-C.")
    ] = False,
    offset: Annotated[
        int, typer.Option(help="From this byte of its log on.", metavar="N", min=0)
    ] = 0,
    conversation: reach.Conversation = "default",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each piece as a line of JSON.")
    ] = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """What a command wrote: stdout and stderr, as they came. Only the latest part is kept."""
    channel = Channel(STDOUT)

    def show(piece: LogPiece, asked: int) -> None:
        if as_json:
            write(STDOUT, json.dumps(piece_to_json(piece)) + "\n")
            return
        if piece.offset > asked:
            report.note(f"{piece.offset - asked} bytes are kept no more")
        channel.write(piece.text)

    async def shown(command: "RemoteCommand") -> None:
        at = offset
        if follow:
            async for piece in command.follow(at):
                show(piece, at)
                at = piece.next_offset
            return
        while (piece := await command.logs(at, limit=LOG_PIECE_MAX)).next_offset > at:
            show(piece, at)
            at = piece.next_offset

    try:
        _at(socket, key, sandbox_id, conversation, command_id, shown)
    finally:
        channel.end()
    return exits.Exit.OK


@app.command("write")
def write_to_command(
    sandbox_id: reach.Id,
    command_id: Name,
    text: Annotated[
        str | None, typer.Argument(help="A line of text; without it, our stdin.", metavar="TEXT")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="And it ends with that.")] = False,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Feed the standard input of a command that was started with -i."""
    given = f"{text}\n" if text is not None else "" if end and sys.stdin.isatty() else _stdin()

    async def feed(command: "RemoteCommand") -> None:
        if given:
            await command.write(given)
        if end:
            await command.write(None)

    _at(socket, key, sandbox_id, conversation, command_id, feed)
    if as_json:
        report.document({"written": len(given.encode()), "ended": end})
    return exits.Exit.OK


@app.command("stop")
def stop_command(
    sandbox_id: reach.Id,
    command_id: Name,
    grace: Annotated[
        float, typer.Option(help="Seconds from SIGTERM to SIGKILL.", min=0, max=60)
    ] = 2.0,
    conversation: reach.Conversation = "default",
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """End a command: SIGTERM, then SIGKILL. What has ended stays as it is."""

    async def end(command: "RemoteCommand") -> CommandStatus:
        return await command.stop(grace_s=grace)

    _show(_at(socket, key, sandbox_id, conversation, command_id, end), as_json=as_json)
    return exits.Exit.OK


def start(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    command: str,
    *,
    cwd: str | None,
    env: dict[str, str],
    stdin_open: bool,
    as_json: bool,
) -> int:
    """`sbx exec --background`: prints the id of what it started."""

    async def begin(commands: "RemoteCommands") -> CommandStatus:
        started = await commands.start(command, cwd=cwd, env=env, stdin_open=stdin_open)
        return await started.status()

    told = _of(socket, key, sandbox_id, conversation, begin)
    report.outcome(status_to_json(told), one_line(told.id), as_json=as_json)
    return exits.Exit.OK


# -- the parts of it -------------------------------------------------------------------------------


def _of(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    act: "Callable[[RemoteCommands], Awaitable[T]]",
) -> T:
    return reach.ask(
        socket,
        key,
        lambda client: act(client.sandbox(sandbox_id).conversation(conversation).commands),
    )


def _at(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    command_id: str,
    act: "Callable[[RemoteCommand], Awaitable[T]]",
) -> T:
    async def there(commands: "RemoteCommands") -> T:
        return await act(await commands.get(command_id))

    return _of(socket, key, sandbox_id, conversation, there)


def _show(told: CommandStatus, *, as_json: bool) -> None:
    if as_json:
        report.document(status_to_json(told))
        return
    lines = [
        ("command", _cut(told.command)),
        ("state", _ended(told)),
        ("why", told.reason),
        ("started", moments.since(told.started_at)),
        ("ended", moments.since(told.ended_at)),
        ("log", f"bytes {told.log_begin} to {told.log_end}"),
    ]
    shown = "".join(f"{name:<9}{one_line(value)}\n" for name, value in lines if value)
    write(STDOUT, shown)


def _ended(told: CommandStatus) -> str:
    if told.cause is not None:
        return f"{told.state.value} ({told.cause.value})"
    if told.exit_code is not None:
        return f"{told.state.value} ({told.exit_code})"
    return told.state.value


def _exit(told: CommandStatus) -> int:
    match told.state:
        case CommandState.EXITED:
            return told.exit_code or exits.Exit.OK
        case CommandState.STOPPED:
            return exits.Exit.INTERRUPTED
        case CommandState.KILLED:
            return exits.Exit.KILLED
    return exits.Exit.FAILED


def _cut(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


def _stdin() -> str:
    data = sys.stdin.buffer.read(_WRITTEN_MAX + 1)
    try:
        if len(data) <= _WRITTEN_MAX:
            return data.decode()
    except UnicodeDecodeError:
        raise BadRequest("stdin is not UTF-8 text") from None
    raise BadRequest(
        f"stdin is longer than the {_WRITTEN_MAX >> 20} MiB that wait for a command at most",
        code="stdin_too_large",
        hint="copy it in with sbx cp, and let the command read the file",
    )
