"""`sbx key` and `sbx token`: the credentials of callers of a running service."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, moments, report
from sbx.cli.terminal import STDOUT, one_line, write

keys = typer.Typer(help="Create, list and revoke keys for programs.", rich_markup_mode=None)
tokens = typer.Typer(
    help="Create, list and revoke tokens for one user, with a lifetime.", rich_markup_mode=None
)


class TokenScope(StrEnum):
    READ = "files:read"
    WRITE = "files:write"
    EXECUTE = "execute"
    ADMIN = "admin"


@keys.command("create")
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
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Create a key and print it. It is shown only this once."""
    request = {"owner": owner, "name": name, "operator": operator}
    reply = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/keys", json=request)
    )
    return _shown_once(reply, reply["key"], "revoke it with sbx key revoke", as_json=as_json)


@keys.command("list")
def list_keys(
    as_json: connect.Json = False, socket: connect.Socket = None, key: connect.Key = None
) -> int:
    """List every key, without its secret."""
    reply = connect.ask(socket, key, lambda client: client.request("GET", "/v1/admin/keys"))
    if as_json:
        report.document({"keys": reply["items"]})
        return exits.Exit.OK
    rows = [
        (
            entry["id"],
            entry["owner"],
            entry["name"] or "",
            "yes" if entry["operator"] else "no",
            moments.since(entry["created_at"]),
            moments.since(entry["last_used_at"]) or "never",
            _state(entry),
        )
        for entry in reply["items"]
    ]
    return _table(("key", "owner", "name", "operator", "made", "used", "state"), rows, "keys")


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The id, from sbx key list.", metavar="ID")],
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Revoke a key."""
    return _revoke("keys", key_id, as_json, socket, key)


@tokens.command("create")
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
    socket: connect.Socket = None,
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
    return _shown_once(reply, reply["token"], "revoke it with sbx token revoke", as_json=as_json)


@tokens.command("list")
def list_tokens(
    as_json: connect.Json = False, socket: connect.Socket = None, key: connect.Key = None
) -> int:
    """List every token, without the token itself."""
    reply = connect.ask(socket, key, lambda client: client.request("GET", "/v1/admin/tokens"))
    if as_json:
        report.document({"tokens": reply["items"]})
        return exits.Exit.OK
    rows = [
        (
            entry["id"],
            entry["owner"],
            entry["user_id"],
            entry["agent_id"] or "any",
            entry["conversation_id"] or "any",
            ", ".join(entry["scopes"]) if entry["scopes"] is not None else "all",
            moments.since(entry["expires_at"]),
            _state(entry),
        )
        for entry in reply["items"]
    ]
    heads = ("token", "owner", "user", "agent", "conversation", "scopes", "expires", "state")
    return _table(heads, rows, "tokens")


@tokens.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="The id, from sbx token list.", metavar="ID")],
    as_json: connect.Json = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Revoke a token."""
    return _revoke("tokens", token_id, as_json, socket, key)


def _shown_once(reply: Mapping[str, Any], secret: str, hint: str, *, as_json: bool) -> int:
    if as_json:
        report.document(reply)
    else:
        write(STDOUT, f"{one_line(secret)}\n")
        report.note(f"its id is {reply['id']}; {hint} {reply['id']}")
    return exits.Exit.OK


def _state(entry: Mapping[str, Any]) -> str:
    return "revoked" if entry["revoked_at"] is not None else "good"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], plural: str) -> int:
    from sbx.cli.tables import print_table

    if rows:
        print_table(heads, rows)
    else:
        report.note(f"no {plural} exist")
    return exits.Exit.OK


def _revoke(
    collection: str, revoked_id: str, as_json: bool, socket: str | None, key: str | None
) -> int:
    path = connect.of_admin(collection, revoked_id)
    reply = connect.ask(socket, key, lambda client: client.request("DELETE", path))
    # The reply has a body if the revocation is not recorded yet.
    body = {
        "revoked": revoked_id,
        **(reply or {}),
    }
    line = one_line(revoked_id) + ("" if reply is None else " (not recorded yet)")
    report.outcome(body, line, as_json=as_json)
    return exits.Exit.OK
