"""`sbx key`: the keys of programs that use a running service."""

from typing import Annotated

import typer

from sbx.cli import connect, output

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
    return connect.print_secret(
        reply, reply["key"], "revoke it with sbx key revoke", as_json=as_json
    )


@app.command("list")
def list_keys(
    as_json: connect.Json = False, socket: connect.Address = None, key: connect.Key = None
) -> int:
    """List every key, without its secret."""
    columns: connect.Columns = {
        "key": lambda entry: entry["id"],
        "owner": lambda entry: entry["owner"],
        "name": lambda entry: entry["name"] or "",
        "operator": lambda entry: "yes" if entry["operator"] else "no",
        "made": lambda entry: output.since(entry["created_at"]),
        "used": lambda entry: output.since(entry["last_used_at"]) or "never",
    }
    return connect.print_list("keys", columns, as_json, socket, key)


@app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The id, from sbx key list.", metavar="ID")],
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Revoke a key."""
    return connect.revoke("keys", key_id, as_json, socket, key)
