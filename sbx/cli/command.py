"""`sbx command`: the commands that run in the background of a sandbox."""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, OutputStream, one_line, write
from sbx.errors import BadRequest
from sbx.protocol.commands import (
    LOG_PIECE_MAX,
    CommandState,
    CommandStatus,
    LogPiece,
    to_json,
)

if TYPE_CHECKING:
    from sbx.client.commands import RemoteCommand, RemoteCommands

T = TypeVar("T")
_WRITTEN_MAX = 1 << 20  # bytes of one write
_SHOWN = 60

app = typer.Typer(
    help="List, follow, feed and stop commands in the background.", rich_markup_mode=None
)
Name = Annotated[str, typer.Argument(help="The id, from sbx command list.", metavar="COMMAND")]


@app.command("list")
def list_commands(
    sandbox_id: connect.Id,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """List the running commands and the recently ended ones, the newest first."""
    entries = _of(socket, key, sandbox_id, conversation, lambda commands: commands.list())
    if as_json:
        output.document({"commands": [to_json(entry) for entry in entries]})
    else:
        rows = [
            (entry.id, _state(entry), output.since(entry.started_at), _cut(entry.command))
            for entry in entries
        ]
        empty = "no background commands; start one with sbx exec --background"
        output.print_table(("command", "state", "started", "what"), rows, empty=empty)
    return exits.Exit.OK


@app.command("show")
def show_command(
    sandbox_id: connect.Id,
    command_id: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the command has ended.")] = False,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Show the state of a command. With --wait, exit with its exit code."""

    async def look(command: "RemoteCommand") -> CommandStatus:
        return await (command.wait() if wait else command.status())

    status = _at(socket, key, sandbox_id, conversation, command_id, look)
    _show(status, as_json=as_json)
    return _exit(status) if wait else exits.Exit.OK


@app.command("logs")
def show_logs(
    sandbox_id: connect.Id,
    command_id: Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the command ends, or Ctrl-C.")
    ] = False,
    offset: Annotated[
        int, typer.Option(help="Start at this byte of the log.", metavar="N", min=0)
    ] = 0,
    conversation: connect.Conversation = "default",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each piece as a line of JSON.")
    ] = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Print the output of a command: stdout and stderr, in their order.

    Only the latest part is kept.
    """
    channel = OutputStream(STDOUT)

    def show(piece: LogPiece, requested: int) -> None:
        if as_json:
            write(STDOUT, json.dumps(to_json(piece)) + "\n")
            return
        if piece.offset > requested:
            output.note(f"{piece.offset - requested} older bytes of the log were discarded")
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
    sandbox_id: connect.Id,
    command_id: Name,
    text: Annotated[
        str | None, typer.Argument(help="A line of text; default: stdin of sbx.", metavar="TEXT")
    ] = None,
    end: Annotated[
        bool, typer.Option("--end", help="Close the standard input afterwards.")
    ] = False,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Feed the standard input of a command that was started with -i."""
    content = f"{text}\n" if text is not None else "" if end and sys.stdin.isatty() else _stdin()

    async def feed(command: "RemoteCommand") -> None:
        if content:
            await command.write(content)
        if end:
            await command.write(None)

    _at(socket, key, sandbox_id, conversation, command_id, feed)
    if as_json:
        output.document({"written": len(content.encode()), "ended": end})
    return exits.Exit.OK


@app.command("stop")
def stop_command(
    sandbox_id: connect.Id,
    command_id: Name,
    grace: Annotated[
        float, typer.Option(help="Seconds from SIGTERM to SIGKILL.", min=0, max=60)
    ] = 2.0,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Stop a command with SIGTERM, then SIGKILL. A command that has ended does not change."""

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
    """Start a command for `sbx exec --background`, and print its id."""

    async def begin(commands: "RemoteCommands") -> CommandStatus:
        started = await commands.start(command, cwd=cwd, env=env, stdin_open=stdin_open)
        return await started.status()

    status = _of(socket, key, sandbox_id, conversation, begin)
    output.outcome(to_json(status), one_line(status.id), as_json=as_json)
    return exits.Exit.OK


# -- shared parts ----------------------------------------------------------------------------------


def _of(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    action: "Callable[[RemoteCommands], Awaitable[T]]",
) -> T:
    return connect.ask(
        socket,
        key,
        lambda client: action(client.sandbox(sandbox_id).conversation(conversation).commands),
    )


def _at(
    socket: str | None,
    key: str | None,
    sandbox_id: str,
    conversation: str,
    command_id: str,
    action: "Callable[[RemoteCommand], Awaitable[T]]",
) -> T:
    async def there(commands: "RemoteCommands") -> T:
        return await action(await commands.get(command_id))

    return _of(socket, key, sandbox_id, conversation, there)


def _show(status: CommandStatus, *, as_json: bool) -> None:
    if as_json:
        output.document(to_json(status))
        return
    lines = [
        ("command", _cut(status.command)),
        ("state", _state(status)),
        ("why", status.reason),
        ("started", output.since(status.started_at)),
        ("ended", output.since(status.ended_at)),
        ("log", f"bytes {status.log_begin} to {status.log_end}"),
    ]
    text = "".join(f"{name:<9}{one_line(value)}\n" for name, value in lines if value)
    write(STDOUT, text)


def _state(status: CommandStatus) -> str:
    if status.cause is not None:
        return f"{status.state.value} ({status.cause.value})"
    if status.exit_code is not None:
        return f"{status.state.value} ({status.exit_code})"
    return status.state.value


def _exit(status: CommandStatus) -> int:
    match status.state:
        case CommandState.EXITED:
            return status.exit_code or exits.Exit.OK
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
        f"stdin is longer than {_WRITTEN_MAX >> 20} MiB, the most that can wait for a command",
        code="stdin_too_large",
        hint="copy it in with sbx cp, and let the command read the file",
    )
