"""Connect a command to the service: the options that commands share, the call, and paths."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

import typer

from sbx.cli import exits, output
from sbx.cli.terminal import STDERR, STDIN, STDOUT, confirmed, one_line, write
from sbx.errors import BadRequest, SbxError

if TYPE_CHECKING:
    from sbx.client import Client

T = TypeVar("T")
_PAGE = 200
_SANDBOXES_MAX = 10_000

Address = Annotated[
    str | None,
    typer.Option(
        "--connect",
        envvar="SBX_SOCKET",
        help="The service's socket, or http://HOST:PORT for a service on TCP.",
        metavar="ADDR",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="SBX_KEY",
        help="A key or a token. Prefer SBX_KEY: other users can see the options of a command. "
        "Without a key, the socket identifies you by your user account.",
        metavar="KEY",
    ),
]
Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Update the table until Ctrl-C.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print each update as one line of JSON.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Conversation = Annotated[
    str,
    typer.Option("--conversation", help="The conversation of the sandbox.", metavar="NAME"),
]
Id = Annotated[str, typer.Argument(help="The id of a sandbox, from sbx ps.", metavar="ID")]
Ids = Annotated[list[str], typer.Argument(help="The ids of sandboxes, from sbx ps.", metavar="ID…")]


def ask(socket: str | None, key: str | None, work: "Callable[[Client], Awaitable[T]]") -> T:
    """Connect, run `work`, disconnect. Raise Unavailable `service_unreachable`."""
    import asyncio

    from sbx.client import Client

    async def connected() -> T:
        async with Client(socket, key=key) as client:
            return await work(client)

    return asyncio.run(connected())


def repeat(
    socket: str | None,
    key: str | None,
    look: "Callable[[Client], Awaitable[None]]",
    every_s: float | None,
) -> None:
    """Connect and call `look` once, or again after each pause of `every_s` until Ctrl-C."""
    import asyncio

    async def looks(client: "Client") -> None:
        await look(client)
        while every_s is not None:
            await asyncio.sleep(every_s)
            await look(client)

    with suppress(KeyboardInterrupt) if every_s is not None else nullcontext():  # the way to end it
        ask(socket, key, looks)


async def list_sandboxes(
    client: "Client", status: str | None = None, *, all_owners: bool = False
) -> list[dict[str, Any]]:
    path = "/v1/admin/sandboxes" if all_owners else "/v1/sandboxes"
    boxes: list[dict[str, Any]] = []
    params: dict[str, Any] = {"limit": _PAGE}
    if status is not None:
        params["status"] = status
    while len(boxes) < _SANDBOXES_MAX:
        page = await client.request("GET", path, params=params)
        boxes += page["items"]
        if not page["next_cursor"]:
            break
        params["cursor"] = page["next_cursor"]
    return boxes


def for_each(
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
        ask(socket, key, act_on_all)
    if as_json:
        failures = [{"id": sandbox_id, "error": error.to_dict()} for sandbox_id, error in failed]
        output.document({word: done, "failed": failures})
    else:
        for sandbox_id, error in failed:
            named = sandbox_id in error.message
            output.failure(error.message if named else f"{sandbox_id}: {error.message}", error.hint)
    return exits.for_error(failed[0][1]) if failed else exits.Exit.OK


def confirm(removal: str, *, as_json: bool) -> None:
    """Ask the user to confirm, as in `remove 2 sandboxes`. Raise BadRequest without a terminal, and
    for a no."""
    if as_json or not (os.isatty(STDIN) and os.isatty(STDERR)):
        raise BadRequest(
            f"this would {removal}, which needs a confirmation at a terminal",
            code="not_confirmed",
            hint="add --yes",
        )
    if not confirmed(f"{removal[0].upper()}{removal[1:]}?"):
        raise BadRequest("nothing was removed", code="not_confirmed")


def sandbox_path(sandbox_id: str, *rest: str) -> str:
    """Return the URL path of a sandbox, or of a part of it. Ids and names may hold any text."""
    return "/v1/sandboxes/" + "/".join(_part(part) for part in (not_empty(sandbox_id), *rest))


def not_empty(sandbox_id: str) -> str:
    """Return the id. Raise BadRequest for an empty id, which would make a different path."""
    if not sandbox_id:
        raise BadRequest("the id of a sandbox is empty", hint="sbx ps lists them")
    return sandbox_id


def admin_path(*parts: str) -> str:
    """Return a URL path that only the operator may use."""
    return "/v1/admin/" + "/".join(_part(part) for part in parts)


def _part(name: str) -> str:
    """Return a name as one part of a path. A server would resolve `..`, even if it is escaped."""
    if name in (".", ".."):
        raise BadRequest(f"{name} is not a valid name", hint="sbx ps lists the sandboxes")
    return quote(name, safe="", errors="surrogateescape")


def seconds(text: str, option: str) -> float:
    """Parse a duration: 90, 90s, 10min, 2h, 1d. Raise BadRequest."""
    try:
        value = float(text)
    except ValueError:
        from sbx.policy.units import parse_duration

        try:
            value = parse_duration(text)
        except ValueError as error:
            raise BadRequest(
                f"{option}: {error}", hint="write it as 90, 90s, 10min, 2h or 1d"
            ) from None
    if not 0 < value < float("inf"):
        raise BadRequest(f"{option} must be a positive, finite duration, not {text}")
    return value


def whole_seconds(text: str, option: str) -> int:
    """Parse a duration and round it to whole seconds: the service accepts no fractions."""
    return max(1, round(seconds(text, option)))


# -- keys and tokens -------------------------------------------------------------------------------


def print_secret(reply: Mapping[str, Any], secret: str, hint: str, *, as_json: bool) -> int:
    if as_json:
        output.document(reply)
    else:
        write(STDOUT, f"{one_line(secret)}\n")
        output.note(f"its id is {reply['id']}; {hint} {reply['id']}")
    return exits.Exit.OK


def print_list(
    collection: str, columns: Columns, as_json: bool, socket: str | None, key: str | None
) -> int:
    """Print all keys or all tokens, with a column for their state."""
    path = admin_path(collection)
    entries = ask(socket, key, lambda client: client.request("GET", path))["items"]
    if as_json:
        output.document({collection: entries})
    else:
        shown = {**columns, "state": _state}
        rows = [tuple(column(entry) for column in shown.values()) for entry in entries]
        output.print_table(tuple(shown), rows, empty=f"no {collection} exist")
    return exits.Exit.OK


def _state(entry: Mapping[str, Any]) -> str:
    return "revoked" if entry["revoked_at"] is not None else "good"


def revoke(
    collection: str, revoked_id: str, as_json: bool, socket: str | None, key: str | None
) -> int:
    path = admin_path(collection, revoked_id)
    reply = ask(socket, key, lambda client: client.request("DELETE", path))
    # The reply has a body if the revocation is not recorded yet.
    body = {"revoked": revoked_id, **(reply or {})}
    line = one_line(revoked_id) + ("" if reply is None else " (not recorded yet)")
    output.outcome(body, line, as_json=as_json)
    return exits.Exit.OK
