"""`sbx key` and `sbx token`: who may call a running service."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from sbx.cli import exits, moments, reach, report
from sbx.cli.terminal import STDOUT, one_line, write

keys = typer.Typer(help="Make, list and revoke keys: for programs.", rich_markup_mode=None)
tokens = typer.Typer(
    help="Make, list and revoke tokens: for one user, for a time.", rich_markup_mode=None
)


class Scope(StrEnum):
    READ = "files:read"
    WRITE = "files:write"
    EXECUTE = "execute"
    ADMIN = "admin"


@keys.command("create")
def create_key(
    owner: Annotated[
        str, typer.Option(help="Whose sandboxes it reaches; made with it.", metavar="OWNER")
    ] = "default",
    name: Annotated[
        str | None, typer.Option(help="What it is for, to know it again.", metavar="TEXT")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may also do what only the operator may.")
    ] = False,
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Make a key, and print it: this once, and never again."""
    asked = {"owner": owner, "name": name, "operator": operator}
    made = reach.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/keys", json=asked)
    )
    return _shown_once(made, made["key"], "revoke it with sbx key revoke", as_json=as_json)


@keys.command("list")
def list_keys(
    as_json: reach.Json = False, socket: reach.Socket = None, key: reach.Key = None
) -> int:
    """Every key that was made, without its secret."""
    told = reach.ask(socket, key, lambda client: client.request("GET", "/v1/admin/keys"))
    if as_json:
        report.document({"keys": told["items"]})
        return exits.Exit.OK
    rows = [
        (
            one["id"],
            one["owner"],
            one["name"] or "",
            "yes" if one["operator"] else "no",
            moments.since(one["created_at"]),
            moments.since(one["last_used_at"]) or "never",
            _state(one),
        )
        for one in told["items"]
    ]
    return _table(("key", "owner", "name", "operator", "made", "used", "state"), rows, "keys")


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="As in sbx key list.", metavar="ID")],
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """From now on it opens nothing."""
    return _revoke("keys", key_id, as_json, socket, key)


@tokens.command("create")
def create_token(
    user: Annotated[str, typer.Option(help="The user it is for.", metavar="USER")],
    agent: Annotated[
        str | None, typer.Option(help="Only with this agent.", metavar="AGENT")
    ] = None,
    conversation: Annotated[
        str | None, typer.Option(help="Only this conversation.", metavar="CONVERSATION")
    ] = None,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it may do; else all. Repeatable.")
    ] = None,
    ttl: Annotated[
        str, typer.Option(help="How long it is good: 3600, 90s, 2h.", metavar="TIME")
    ] = "1h",
    owner: Annotated[
        str | None,
        typer.Option(help="Whose sandboxes it reaches; else yours.", metavar="OWNER"),
    ] = None,
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Make a token that reaches the sessions of one user, and print it."""
    asked = {
        "user_id": user,
        "agent_id": agent,
        "conversation_id": conversation,
        "scopes": scope or None,
        "ttl_s": reach.seconds(ttl, "--ttl"),
        "owner": owner,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    made = reach.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/tokens", json=asked)
    )
    return _shown_once(made, made["token"], "revoke it with sbx token revoke", as_json=as_json)


@tokens.command("list")
def list_tokens(
    as_json: reach.Json = False, socket: reach.Socket = None, key: reach.Key = None
) -> int:
    """Every token that was made, without the token itself."""
    told = reach.ask(socket, key, lambda client: client.request("GET", "/v1/admin/tokens"))
    if as_json:
        report.document({"tokens": told["items"]})
        return exits.Exit.OK
    rows = [
        (
            one["id"],
            one["owner"],
            one["user_id"],
            one["agent_id"] or "any",
            one["conversation_id"] or "any",
            ", ".join(one["scopes"]) if one["scopes"] is not None else "all",
            moments.since(one["expires_at"]),
            _state(one),
        )
        for one in told["items"]
    ]
    heads = ("token", "owner", "user", "agent", "conversation", "scopes", "expires", "state")
    return _table(heads, rows, "tokens")


@tokens.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="As in sbx token list.", metavar="ID")],
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """From now on it opens nothing."""
    return _revoke("tokens", token_id, as_json, socket, key)


def _shown_once(made: Mapping[str, Any], secret: str, hint: str, *, as_json: bool) -> int:
    if as_json:
        report.document(made)
    else:
        write(STDOUT, f"{one_line(secret)}\n")
        report.note(f"its id is {made['id']}; {hint} {made['id']}")
    return exits.Exit.OK


def _state(one: Mapping[str, Any]) -> str:
    return "revoked" if one["revoked_at"] is not None else "good"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], what: str) -> int:
    from sbx.cli.tables import print_table

    if rows:
        print_table(heads, rows)
    else:
        report.note(f"there are no {what}")
    return exits.Exit.OK


def _revoke(what: str, revoked: str, as_json: bool, socket: str | None, key: str | None) -> int:
    path = reach.of_admin(what, revoked)
    reply = reach.ask(socket, key, lambda client: client.request("DELETE", path))
    body = {"revoked": revoked, **(reply or {})}  # the reply has a body if it is not recorded yet
    line = one_line(revoked) + ("" if reply is None else " (not recorded yet)")
    report.outcome(body, line, as_json=as_json)
    return exits.Exit.OK
