"""`sbx shell`: a terminal of a sandbox, in the caller's own."""

import os
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import exits, reach, report
from sbx.cli.terminal import one_line
from sbx.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from sbx.cli.own_terminal import OwnTerminal
    from sbx.cli.seat import Outcome
    from sbx.client import Client
    from sbx.client.terminals import RemoteTerminal, RemoteTerminals

_TERM = re.compile(r"[A-Za-z0-9+._-]{1,64}")


def shell(
    sandbox_id: Annotated[
        str | None,
        typer.Argument(
            help="The sandbox, as in sbx ps. Without one: a new sandbox in this process, gone "
            "with the shell.",
            metavar="ID",
        ),
    ] = None,
    conversation: reach.Conversation = "default",
    terminal: Annotated[
        str | None,
        typer.Option(help="Attach to this one, as in --list.", metavar="TERMINAL"),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Open another one, also where a shell runs already.")
    ] = False,
    as_list: Annotated[bool, typer.Option("--list", help="List the terminals.")] = False,
    command: Annotated[
        str | None,
        typer.Option("--command", "-c", help="Run this in a new one, not a shell.", metavar="LINE"),
    ] = None,
    cwd: Annotated[str | None, typer.Option(help="Where a new one starts.", metavar="DIR")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="An environment variable of a new one. Repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    detach_key: Annotated[
        str, typer.Option(help="Leaves it running: ctrl-] to ctrl-z, or none.", metavar="KEY")
    ] = "ctrl-]",
    policy: Annotated[
        str | None, typer.Option(help="Without ID: the policy, a name or a file.", metavar="POLICY")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Without ID: a directory to work in.", metavar="DIR")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON document: with --list the terminals; else open one, and stay."
        ),
    ] = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Work at a terminal inside a sandbox.

    Attaches to the shell that runs there, with what is on its screen, or opens one. Ctrl-] leaves
    it running; exit ends it. Several may be attached to the same one. The exit code is that of
    what ran.
    """
    from sbx.cli.run import variables

    leaves = _key(detach_key)
    opening: dict[str, Any] = {"command": command, "cwd": cwd, "env": variables(env or [])}
    if sandbox_id is None:
        if terminal or new or as_list or as_json or conversation != "default":
            raise BadRequest(
                "without the ID of a sandbox there is a new one, with one terminal",
                hint="sbx ps lists those of the service",
            )
        return _embedded(policy or "default", workspace, opening, leaves)
    if policy is not None or workspace is not None:
        raise BadRequest("a sandbox that is there has its policy and its files already")
    if terminal is not None and (new or command):
        raise BadRequest("--terminal is one that runs already; --new and --command open another")
    where = (sandbox_id, conversation)
    if as_list:
        return _list(socket, key, where, as_json=as_json)
    if as_json:
        return _opened(socket, key, where, opening)
    return _attached(socket, key, where, terminal, new or command is not None, opening, leaves)


def _list(socket: str | None, key: str | None, where: tuple[str, str], *, as_json: bool) -> int:
    path = reach.of_sandbox(where[0], "conversations", where[1], "terminals")
    found = reach.ask(socket, key, lambda client: client.request("GET", path))["items"]
    if as_json:
        report.document({"terminals": found})
    elif not found:
        report.note("there are no terminals; open one with sbx shell")
    else:
        _print(found)
    return exits.Exit.OK


def _print(found: Sequence[dict[str, Any]]) -> None:
    from sbx.cli.tables import print_table

    rows = [
        (
            one["id"],
            "running" if one["running"] else f"ended {_code(one)}",
            f"{one['columns']}x{one['rows']}",
            str(one["attached"]),
            one_line(one["command"] or "(shell)")[:60],
        )
        for one in found
    ]
    print_table(("terminal", "state", "size", "attached", "command"), rows)


def _code(one: dict[str, Any]) -> str:
    return str(one["exit_code"]) if one["exit_code"] is not None else one_line(one["reason"])


def _opened(
    socket: str | None, key: str | None, where: tuple[str, str], opening: dict[str, Any]
) -> int:
    async def work(client: "Client") -> dict[str, Any]:
        made = await _terminals(client, where).open(**opening)
        path = reach.of_sandbox(where[0], "conversations", where[1], "terminals", made.id)
        told: dict[str, Any] = await client.request("GET", path)
        return told

    report.document(reach.ask(socket, key, work))
    return exits.Exit.OK


def _attached(
    socket: str | None,
    key: str | None,
    where: tuple[str, str],
    wanted: str | None,
    new: bool,
    opening: dict[str, Any],
    leaves: int | None,
) -> int:
    from sbx.cli.own_terminal import OwnTerminal
    from sbx.cli.seat import sit

    with OwnTerminal() as own:

        async def work(client: "Client") -> "tuple[str, Outcome]":
            terminals = _terminals(client, where)
            found = await _found(terminals, wanted, new)
            if found is None:
                found = await terminals.open(**_here(opening, own))
            return found.id, await sit(found, own, leaves)

        name, outcome = reach.ask(socket, key, work)
    if outcome.detached:
        report.note(f"{name} goes on; attach again with: sbx shell {where[0]}")
        return exits.Exit.OK
    return _ended(outcome)


def _embedded(
    policy: str, workspace: Path | None, opening: dict[str, Any], leaves: int | None
) -> int:
    import asyncio

    from sbx.cli.own_terminal import OwnTerminal
    from sbx.cli.seat import sit
    from sbx.policy import reference
    from sbx.runtime.runtime import Runtime
    from sbx.runtime.settings import Settings
    from sbx.workspace import quarantine

    settings = Settings(fast_path=False)  # it starts one kernel
    store = settings.protection.quarantines
    before = {item.id for item in quarantine.items(store)}
    asks: list[bool] = []
    with OwnTerminal() as own:

        async def work() -> "Outcome":
            async with Runtime(settings) as runtime:
                box = await runtime.create(reference(policy), workspace=workspace)
                asks.append(box.policy.host_executables == "ask")
                terminal = await box.terminals.open(**_here(opening, own))
                return await sit(terminal, own, leaves)

        outcome = asyncio.run(work())
    _report_quarantined(store, workspace, before, ask=any(asks))
    if outcome.detached:
        report.note("the sandbox was this process's own, and is gone")
        return exits.Exit.OK
    return _ended(outcome)


def _report_quarantined(
    store: Path, workspace: Path | None, before: Set[str], *, ask: bool
) -> None:
    """The items that came in the directory since `before`."""
    from sbx.cli.quarantine import offer
    from sbx.workspace import quarantine

    top = os.path.realpath(workspace) if workspace is not None else None
    new = [
        item for item in quarantine.items(store) if item.directory == top and item.id not in before
    ]
    report.quarantined([item.reported for item in new])
    if ask:
        offer(new, store)


async def _found(
    terminals: "RemoteTerminals", wanted: str | None, new: bool
) -> "RemoteTerminal | None":
    """What is asked for, else the latest shell that runs; None where one is to be opened."""
    if wanted is not None:
        return await terminals.get(wanted)
    if new:
        return None
    try:
        found = await terminals.list()
    except NotFound:  # nobody has used this conversation yet; opening says if it is the sandbox
        return None
    for one in reversed(found):
        status = await one.status()
        if status.running and status.command is None:
            return one
    return None


def _terminals(client: "Client", where: tuple[str, str]) -> "RemoteTerminals":
    return client.sandbox(where[0]).conversation(where[1]).terminals


def _here(opening: dict[str, Any], own: "OwnTerminal") -> dict[str, Any]:
    """With the size and the kind of the caller's terminal."""
    rows, columns = own.size
    kind = os.environ.get("TERM", "")
    named = {"TERM": kind} if _TERM.fullmatch(kind) and kind != "dumb" else {}
    return {**opening, "env": {**named, **opening["env"]}, "rows": rows, "columns": columns}


def _ended(outcome: "Outcome") -> int:
    if outcome.exit_code is None:
        report.failure(f"the terminal has ended: {outcome.reason or 'nobody knows why'}")
        return exits.Exit.KILLED
    return outcome.exit_code


def _key(text: str) -> int | None:
    """The byte of a key as people write it. Raises BadRequest."""
    if text == "none":
        return None
    found = re.fullmatch(r"(?:ctrl-|\^)([a-zA-Z\[\]\\^_@])", text)
    if found is None:
        raise BadRequest(
            f"--detach-key {one_line(text)[:40]} is no key", hint="write ctrl-], ctrl-q, or none"
        )
    return ord(found[1].upper()) & 0x1F
