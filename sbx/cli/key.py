"""`sbx key`: the keys of programs that use a running service."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write

Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]

app = typer.Typer(help="Create, list and revoke keys for programs.", rich_markup_mode=None)


@app.command("create")
def create_key(
    owner: Annotated[
        str, typer.Option(help="The owner of the sandboxes that the key reaches.", metavar="OWNER")
    ] = "default",
    name: Annotated[
        str | None, typer.Option(help="A name for the key, shown in the list.", metavar="TEXT")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Allow the actions of the operator, too.")
    ] = False,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Create a key and print it. It is shown only this once."""
    request = {"owner": owner, "name": name, "operator": operator}
    reply = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/keys", json=request)
    )
    return print_secret(reply, reply["key"], "revoke it with sbx key revoke", as_json=as_json)


@app.command("list")
def list_keys(
    as_json: connect.Json = False, socket: connect.Address = None, key: connect.Key = None
) -> int:
    """List every key, without its secret."""
    columns: Columns = {
        "key": lambda entry: entry["id"],
        "owner": lambda entry: entry["owner"],
        "name": lambda entry: entry["name"] or "",
        "operator": lambda entry: "yes" if entry["operator"] else "no",
        "made": lambda entry: output.since(entry["created_at"]),
        "used": lambda entry: output.since(entry["last_used_at"]) or "never",
    }
    return print_list("keys", columns, as_json, socket, key)


@app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The id, from sbx key list.", metavar="ID")],
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Revoke a key."""
    return revoke("keys", key_id, as_json, socket, key)


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
    path = connect.admin_path(collection)
    entries = connect.ask(socket, key, lambda client: client.request("GET", path))["items"]
    if as_json:
        output.document({collection: entries})
    elif entries:
        shown = {**columns, "state": _state}
        rows = [tuple(column(entry) for column in shown.values()) for entry in entries]
        output.print_table(tuple(shown), rows)
    else:
        output.note(f"no {collection} exist")
    return exits.Exit.OK


def _state(entry: Mapping[str, Any]) -> str:
    return "revoked" if entry["revoked_at"] is not None else "good"


def revoke(
    collection: str, revoked_id: str, as_json: bool, socket: str | None, key: str | None
) -> int:
    path = connect.admin_path(collection, revoked_id)
    reply = connect.ask(socket, key, lambda client: client.request("DELETE", path))
    # The reply has a body if the revocation is not recorded yet.
    body = {"revoked": revoked_id, **(reply or {})}
    line = one_line(revoked_id) + ("" if reply is None else " (not recorded yet)")
    output.outcome(body, line, as_json=as_json)
    return exits.Exit.OK
