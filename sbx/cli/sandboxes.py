"""`sbx ps`, `create`, `stop`, `rm`, `extend`, `inspect`: the sandboxes of a running service."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, moments, report
from sbx.cli.terminal import STDERR, STDIN, STDOUT, one_line, scrub, write
from sbx.errors import BadRequest, SbxError

if TYPE_CHECKING:
    from sbx.client import Client

_PAGE = 200
_MOST_SHOWN = 10_000

AllOwners = Annotated[
    bool, typer.Option("--all-owners", help="List the sandboxes of all owners; for the operator.")
]


def ps(
    status: Annotated[
        str | None,
        typer.Option(
            help="Only sandboxes in this state: idle, starting, ready, failed or expired.",
            metavar="STATE",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    all_owners: AllOwners = False,
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """List your sandboxes.

    idle: no kernel is running; the files are kept, and the next run starts a kernel. ready: a
    kernel is live.
    """
    boxes = connect.ask(socket, key, lambda client: _all(client, status, all_owners=all_owners))
    if as_json:
        report.document({"sandboxes": boxes})
    elif quiet:
        write(STDOUT, "".join(f"{scrub(box['id'])}\n" for box in boxes))
    elif not boxes:
        report.note("you have no sandboxes; create one with sbx create")
    else:
        _print(boxes, all_owners=all_owners)
    return exits.Exit.OK


def create(
    policy: Annotated[
        str, typer.Option(help="The name of a policy of the service.", metavar="POLICY")
    ] = "default",
    ttl: Annotated[
        str | None,
        typer.Option(help="The lifetime: 3600, 90s, 2h. Default: until sbx rm.", metavar="TIME"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="An environment variable. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    narrow: Annotated[
        list[str] | None,
        typer.Option(
            help="Narrow the policy, such as limits.memory_max=256MiB. Repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    workspace_id: Annotated[
        str | None, typer.Option(help="An existing workspace for its files.", metavar="ID")
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Create a sandbox, and print its id.

    It uses almost no resources until the first run, which starts a kernel.
    """
    from sbx.cli.run import variables

    request: dict[str, Any] = {"profile": policy}
    if ttl is not None:
        request["ttl"] = _whole_seconds(ttl, "--ttl")
    if env:
        request["env"] = variables(env)
    if narrow:
        request["narrower"] = _narrower(narrow)
    if workspace_id is not None:
        request["cargo_id"] = workspace_id

    box = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/sandboxes", json=request)
    )
    report.outcome(box, scrub(box["id"]), as_json=as_json)
    return exits.Exit.OK


def stop(
    ids: connect.Ids,
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Stop the kernels of sandboxes. Files stay, and variables are lost.

    The next run starts a new kernel.
    """

    async def stopped(client: "Client", sandbox_id: str) -> None:
        await client.request("POST", connect.of_sandbox(sandbox_id, "stop"))

    return _each("stopped", ids, stopped, as_json, socket, key)


def rm(
    ids: Annotated[
        list[str] | None, typer.Argument(help="The ids of sandboxes, from sbx ps.", metavar="[ID…]")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of your sandboxes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Delete sandboxes and their files. A sandbox that is already gone is not an error."""
    if everything == bool(ids):
        raise BadRequest(
            "--all and ids exclude each other"
            if everything
            else "the ids of the sandboxes are missing",
            hint="pass ids from sbx ps, or --all",
        )
    if everything:
        boxes = connect.ask(socket, key, lambda client: _all(client, None, all_owners=False))
        ids = [box["id"] for box in boxes]
        if ids and not yes:
            _confirm(len(ids), as_json=as_json)

    async def removed(client: "Client", sandbox_id: str) -> None:
        await client.request("DELETE", connect.of_sandbox(sandbox_id))

    return _each("removed", ids or [], removed, as_json, socket, key)


def extend(
    sandbox_id: connect.Id,
    by: Annotated[
        str, typer.Argument(help="The time to add: 3600, 90s, 10min, 2h.", metavar="TIME")
    ],
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Extend the lifetime of a sandbox."""
    request = {"extend_by": _whole_seconds(by, "TIME")}
    path = connect.of_sandbox(sandbox_id, "extend_ttl")
    box = connect.ask(socket, key, lambda client: client.request("POST", path, json=request))
    if as_json:
        report.document(box)
    else:
        until, remaining = moments.clock(box["expires_at"]), moments.since(box["expires_at"])
        write(STDOUT, f"{one_line(box['id'])} lives until {until}, {remaining}\n")
    return exits.Exit.OK


def inspect(
    sandbox_id: connect.Id,
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Show one sandbox in full: its conversations, host pids, and the receipt of its walls.

    The command reads the walls back from Linux now. --json has all details, such as the namespaces.
    """
    path = connect.of_sandbox(sandbox_id, "inspect")
    document = connect.ask(socket, key, lambda client: client.request("GET", path))
    if as_json:
        report.document(document)
    else:
        from sbx.cli.inspect_output import show

        show(document)
    return exits.Exit.OK


# -- shared parts ----------------------------------------------------------------------------------


async def _all(client: "Client", status: str | None, *, all_owners: bool) -> list[dict[str, Any]]:
    path = "/v1/admin/sandboxes" if all_owners else "/v1/sandboxes"
    boxes: list[dict[str, Any]] = []
    params: dict[str, Any] = {"limit": _PAGE}
    if status is not None:
        params["status"] = status
    while len(boxes) < _MOST_SHOWN:
        page = await client.request("GET", path, params=params)
        boxes += page["items"]
        if not page["next_cursor"]:
            break
        params["cursor"] = page["next_cursor"]
    return boxes


def _print(boxes: Sequence[Mapping[str, Any]], *, all_owners: bool) -> None:
    from sbx.cli.tables import print_table

    newest_first = sorted(boxes, key=lambda box: str(box["created_at"]), reverse=True)
    rows = [
        (
            box["id"],
            box["status"],
            box["profile"],
            moments.since(box["created_at"]),
            moments.since(box["expires_at"]) or "never",
            *((box.get("owner") or "",) if all_owners else ()),
        )
        for box in newest_first
    ]
    heads = ("sandbox", "state", "policy", "made", "expires")
    print_table((*heads, "owner") if all_owners else heads, rows)


def _each(
    word: str,
    ids: Sequence[str],
    action: "Callable[[Client, str], Awaitable[None]]",
    as_json: bool,
    socket: str | None,
    key: str | None,
) -> int:
    """Apply an action to each sandbox in turn. Report a failure, and continue with the others."""
    done: list[str] = []
    failed: list[tuple[str, SbxError]] = []

    async def act_on_all(client: "Client") -> None:
        for sandbox_id in dict.fromkeys(ids):
            try:
                await action(client, sandbox_id)
            except SbxError as error:
                if error.code == "service_unreachable":
                    raise
                failed.append((sandbox_id, error))
            else:
                done.append(sandbox_id)
                if not as_json:
                    write(STDOUT, f"{one_line(sandbox_id)}\n")

    if ids:
        connect.ask(socket, key, act_on_all)
    if as_json:
        failures = [{"id": sandbox_id, "error": error.to_dict()} for sandbox_id, error in failed]
        report.document({word: done, "failed": failures})
    else:
        for sandbox_id, error in failed:
            report.failure(f"{sandbox_id}: {error.message}", error.hint)
    return exits.for_error(failed[0][1]) if failed else exits.Exit.OK


def _confirm(count: int, *, as_json: bool) -> None:
    """Ask the user to confirm. Raise BadRequest without a terminal, and for a no."""
    if as_json or not (os.isatty(STDIN) and os.isatty(STDERR)):
        raise BadRequest(
            f"this would remove {count} sandboxes, which needs a confirmation at a terminal",
            code="not_confirmed",
            hint="add --yes",
        )
    target = "1 sandbox and its files" if count == 1 else f"{count} sandboxes and their files"
    write(STDERR, f"Remove {target}? [y/N] ")
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise BadRequest("nothing was removed", code="not_confirmed")


def _whole_seconds(text: str, option: str) -> int:
    """Parse a duration and round it to whole seconds: the service accepts no fractions."""
    return max(1, round(connect.seconds(text, option)))


def _narrower(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `a.b=value` pairs into nested tables. A value is parsed as TOML, or else it is text."""
    import tomllib

    tables: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *above, last = name.strip().split(".")
        if not equals or not last:
            raise BadRequest(
                f"--narrow {pair}: the value is missing",
                hint="write it as limits.memory_max=256MiB",
            )
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = tables
        for part in above:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadRequest(f"--narrow {pair}: {part} already has a value")
        table[last] = value
    return tables
