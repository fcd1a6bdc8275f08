"""`sbx shell`: a terminal of a sandbox in the user's terminal."""

import os
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.local_runtime import local_runtime
from sbx.cli.terminal import one_line
from sbx.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from sbx.cli.raw_tty import RawTty
    from sbx.cli.shell_session import ShellOutcome
    from sbx.client import Client
    from sbx.client.terminals import RemoteTerminal, RemoteTerminals

_TERM = re.compile(r"[A-Za-z0-9+._-]{1,64}")


def shell(
    sandbox_id: Annotated[
        str | None,
        typer.Argument(
            help="The id of a sandbox, from sbx ps. Without it: a new sandbox in this process, "
            "deleted with the shell.",
            metavar="ID",
        ),
    ] = None,
    conversation: connect.Conversation = "default",
    terminal: Annotated[
        str | None,
        typer.Option(help="Attach to this terminal, from --list.", metavar="TERMINAL"),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Open a new terminal, even if a shell is running.")
    ] = False,
    as_list: Annotated[bool, typer.Option("--list", help="List the terminals.")] = False,
    command: Annotated[
        str | None,
        typer.Option(
            "--command", "-c", help="Run this in a new terminal instead of a shell.", metavar="LINE"
        ),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(help="The working directory of a new terminal.", metavar="DIR")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="An environment variable of a new terminal. Repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    detach_key: Annotated[
        str,
        typer.Option(
            help="The key that detaches: ctrl-a to ctrl-z, ctrl-], or none.", metavar="KEY"
        ),
    ] = "ctrl-]",
    policy: Annotated[
        str | None,
        typer.Option(help="Without ID: the name or the file of a policy.", metavar="POLICY"),
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Without ID: a directory to work in.", metavar="DIR")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON document: with --list the terminals; else a new terminal, without "
            "attaching.",
        ),
    ] = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Work at a terminal inside a sandbox.

    Attach to the running shell and show its screen, or open a new shell. Ctrl-] detaches and leaves
    the shell running; exit ends it. Several clients may attach to the same terminal. The exit code
    is that of the shell or command.
    """
    from sbx.cli.narrowing import variables

    leaves = _key(detach_key)
    opening: dict[str, Any] = {"command": command, "cwd": cwd, "env": variables(env or [])}
    if sandbox_id is None:
        if terminal or new or as_list or as_json or conversation != "default":
            raise BadRequest(
                "--terminal, --new, --list, --json and --conversation need the ID of a sandbox",
                hint="sbx ps lists the sandboxes of the service",
            )
        return _embedded(policy or "default", workspace, opening, leaves)
    if policy is not None or workspace is not None:
        raise BadRequest("--policy and --workspace are for a new sandbox, without ID")
    if terminal is not None and (new or command):
        raise BadRequest("--terminal excludes --new and --command, which open another terminal")
    where = (sandbox_id, conversation)
    if as_list:
        return _list(socket, key, where, as_json=as_json)
    if as_json:
        return _opened(socket, key, where, opening)
    return _attached(socket, key, where, terminal, new or command is not None, opening, leaves)


def _list(socket: str | None, key: str | None, where: tuple[str, str], *, as_json: bool) -> int:
    path = connect.sandbox_path(where[0], "conversations", where[1], "terminals")
    terminals = connect.ask(socket, key, lambda client: client.request("GET", path))["items"]
    if as_json:
        output.document({"terminals": terminals})
    elif not terminals:
        output.note("the conversation has no terminals; open one with sbx shell")
    else:
        _print(terminals)
    return exits.Exit.OK


def _print(terminals: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            terminal["id"],
            "running" if terminal["running"] else f"ended {_code(terminal)}",
            f"{terminal['columns']}x{terminal['rows']}",
            str(terminal["attached"]),
            one_line(terminal["command"] or "(shell)")[:60],
        )
        for terminal in terminals
    ]
    output.print_table(("terminal", "state", "size", "attached", "command"), rows)


def _code(terminal: dict[str, Any]) -> str:
    return (
        str(terminal["exit_code"])
        if terminal["exit_code"] is not None
        else one_line(terminal["reason"])
    )


def _opened(
    socket: str | None, key: str | None, where: tuple[str, str], opening: dict[str, Any]
) -> int:
    async def work(client: "Client") -> dict[str, Any]:
        terminal = await _terminals(client, where).open(**opening)
        path = connect.sandbox_path(where[0], "conversations", where[1], "terminals", terminal.id)
        body: dict[str, Any] = await client.request("GET", path)
        return body

    output.document(connect.ask(socket, key, work))
    return exits.Exit.OK


def _attached(
    socket: str | None,
    key: str | None,
    where: tuple[str, str],
    terminal_id: str | None,
    new: bool,
    opening: dict[str, Any],
    leaves: int | None,
) -> int:
    from sbx.cli.raw_tty import RawTty
    from sbx.cli.shell_session import sit

    with RawTty() as own:

        async def work(client: "Client") -> "tuple[str, ShellOutcome]":
            terminals = _terminals(client, where)
            terminal = await _find(terminals, terminal_id, new)
            if terminal is None:
                terminal = await terminals.open(**_here(opening, own))
            return terminal.id, await sit(terminal, own, leaves)

        name, outcome = connect.ask(socket, key, work)
    if outcome.detached:
        output.note(f"{name} is still running; attach again with: sbx shell {where[0]}")
        return exits.Exit.OK
    return _ended(outcome)


def _embedded(
    policy: str, workspace: Path | None, opening: dict[str, Any], leaves: int | None
) -> int:
    import asyncio

    from sbx.cli.raw_tty import RawTty
    from sbx.cli.shell_session import sit

    with RawTty() as own:

        async def work() -> tuple["ShellOutcome", Path, Set[str], bool]:
            async with local_runtime(policy, workspace) as runtime:
                from sbx.policy import reference
                from sbx.workspace import quarantine

                store = runtime.settings.protection.quarantines
                before = {item.id for item in quarantine.items(store)}
                box = await runtime.create(reference(policy), workspace=workspace)
                for note in box.notes:
                    output.note(f"{note}\r")
                terminal = await box.terminals.open(**_here(opening, own))
                outcome = await sit(terminal, own, leaves)
                return outcome, store, before, box.policy.host_executables == "ask"

        outcome, store, before, asks = asyncio.run(work())
    _report_quarantined(store, workspace, before, ask=asks)
    if outcome.detached:
        output.note("the sandbox belonged to this process and is deleted")
        return exits.Exit.OK
    return _ended(outcome)


def _report_quarantined(
    store: Path, workspace: Path | None, before: Set[str], *, ask: bool
) -> None:
    """Report the new items of the directory, which are not in `before`.

    With `ask`, offer to restore them.
    """
    from sbx.cli.quarantine import offer
    from sbx.workspace import quarantine

    top = os.path.realpath(workspace) if workspace is not None else None
    new = [
        item for item in quarantine.items(store) if item.directory == top and item.id not in before
    ]
    output.quarantined([item.reported for item in new])
    if ask:
        offer(new, store)


async def _find(
    terminals: "RemoteTerminals", terminal_id: str | None, new: bool
) -> "RemoteTerminal | None":
    """Return the requested terminal, or the latest running shell, or None to open a new one."""
    if terminal_id is not None:
        return await terminals.get(terminal_id)
    if new:
        return None
    try:
        running = await terminals.list()
    except NotFound:  # the conversation was never used; opening fails if the sandbox is missing
        return None
    for terminal in reversed(running):
        status = await terminal.status()
        if status.running and status.command is None:
            return terminal
    return None


def _terminals(client: "Client", where: tuple[str, str]) -> "RemoteTerminals":
    return client.sandbox(where[0]).conversation(where[1]).terminals


def _here(opening: dict[str, Any], own: "RawTty") -> dict[str, Any]:
    """Return the options for opening, with the size and the type of the user's terminal."""
    rows, columns = own.size
    term = os.environ.get("TERM", "")
    variables = {"TERM": term} if _TERM.fullmatch(term) and term != "dumb" else {}
    return {**opening, "env": {**variables, **opening["env"]}, "rows": rows, "columns": columns}


def _ended(outcome: "ShellOutcome") -> int:
    if outcome.exit_code is None:
        output.failure(f"the terminal has ended: {outcome.reason or 'the reason is unknown'}")
        return exits.Exit.KILLED
    return outcome.exit_code


def _key(text: str) -> int | None:
    """Return the byte of a key such as `ctrl-]`. Raise BadRequest."""
    if text == "none":
        return None
    match = re.fullmatch(r"(?:ctrl-|\^)([a-zA-Z\[\]\\^_@])", text)
    if match is None:
        raise BadRequest(
            f"--detach-key {one_line(text)[:40]} is not a valid key",
            hint="write ctrl-], ctrl-q, or none",
        )
    return ord(match[1].upper()) & 0x1F
