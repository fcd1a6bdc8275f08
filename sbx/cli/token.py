"""`sbx token`: the tokens of users of a running service."""

from enum import StrEnum
from typing import Annotated

import typer

from sbx.cli import connect, output

app = typer.Typer(
    help="Create, list and revoke tokens for one user, with a lifetime.", rich_markup_mode=None
)


class TokenScope(StrEnum):
    READ = "files:read"
    WRITE = "files:write"
    EXECUTE = "execute"
    ADMIN = "admin"


@app.command("create")
def create_token(
    user: Annotated[str, typer.Option(help="The user of the token.", metavar="USER")],
    agent: Annotated[
        str | None, typer.Option(help="Restrict the token to this agent.", metavar="AGENT")
    ] = None,
    conversation: Annotated[
        str | None,
        typer.Option(help="Restrict the token to this conversation.", metavar="CONVERSATION"),
    ] = None,
    scope: Annotated[
        list[TokenScope] | None, typer.Option(help="A permitted scope; default: all. Repeatable.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="The lifetime: 3600, 90s, 2h.", metavar="TIME")] = "1h",
    owner: Annotated[
        str | None,
        typer.Option(
            help="The owner of the sandboxes that the token reaches; default: you.", metavar="OWNER"
        ),
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Create a token that reaches the sessions of one user, and print it."""
    request = {
        "user_id": user,
        "agent_id": agent,
        "conversation_id": conversation,
        "scopes": scope or None,
        "ttl_s": connect.seconds(ttl, "--ttl"),
        "owner": owner,
    }
    request = {name: value for name, value in request.items() if value is not None}
    reply = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/tokens", json=request)
    )
    return connect.print_secret(
        reply, reply["token"], "revoke it with sbx token revoke", as_json=as_json
    )


@app.command("list")
def list_tokens(
    as_json: connect.Json = False, socket: connect.Address = None, key: connect.Key = None
) -> int:
    """List every token, without the token itself."""
    columns: connect.Columns = {
        "token": lambda entry: entry["id"],
        "owner": lambda entry: entry["owner"],
        "user": lambda entry: entry["user_id"],
        "agent": lambda entry: entry["agent_id"] or "any",
        "conversation": lambda entry: entry["conversation_id"] or "any",
        "scopes": lambda entry: "all" if entry["scopes"] is None else ", ".join(entry["scopes"]),
        "expires": lambda entry: output.since(entry["expires_at"]),
    }
    return connect.print_list("tokens", columns, as_json, socket, key)


@app.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="The id, from sbx token list.", metavar="ID")],
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Revoke a token."""
    return connect.revoke("tokens", token_id, as_json, socket, key)
