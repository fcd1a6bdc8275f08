"""`sbx grant`: access of a conversation in a service beyond its policy."""

from time import localtime, strftime
from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import one_line
from sbx.protocol.grants import AccessKind, GrantDuration

app = typer.Typer(
    help="Grant, list and revoke access that a policy permits to grant ([[grant]]).",
    rich_markup_mode=None,
)


@app.command("add")
def add_grant(
    sandbox_id: connect.Id,
    kind: Annotated[AccessKind, typer.Argument(help="The kind of access.")],
    target: Annotated[
        str,
        typer.Argument(
            help="HOST:PORT, a secret, a directory, the seconds of a run, MiB, or a package.",
            metavar="TARGET",
        ),
    ],
    duration: Annotated[
        GrantDuration,
        typer.Option("--for", help="For the next run, an hour, or the conversation."),
    ] = "once",
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Grant access to one conversation, and print the id of the grant.

    The policy lists the access that it permits. The grant is in the receipt and the audit log.
    """
    path = connect.sandbox_path(sandbox_id, "conversations", conversation, "grants")
    request = {"kind": kind, "target": target, "duration": duration}
    reply = connect.ask(socket, key, lambda client: client.request("POST", path, json=request))
    output.outcome(reply, one_line(reply["id"]), as_json=as_json)
    return exits.Exit.OK


@app.command("list")
def list_grants(
    sandbox_id: connect.Id,
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """List the grants of a conversation that are valid now, the oldest first."""
    path = connect.sandbox_path(sandbox_id, "conversations", conversation, "grants")
    items = connect.ask(socket, key, lambda client: client.request("GET", path))["items"]
    if as_json:
        output.document({"grants": items})
    else:
        rows = [
            (each["id"], each["kind"], each["target"], each["by"], _end(each)) for each in items
        ]
        heads = ("grant", "kind", "target", "by", "until")
        output.print_table(heads, rows, empty="nothing is granted")
    return exits.Exit.OK


@app.command("revoke")
def revoke_grant(
    sandbox_id: connect.Id,
    grant_id: Annotated[str, typer.Argument(help="The id, from sbx grant list.", metavar="GRANT")],
    conversation: connect.Conversation = "default",
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """End a grant now, and close the connections that only this grant allowed."""
    path = connect.sandbox_path(sandbox_id, "conversations", conversation, "grants", grant_id)
    connect.ask(socket, key, lambda client: client.request("DELETE", path))
    output.outcome({"revoked": grant_id}, one_line(grant_id), as_json=as_json)
    return exits.Exit.OK


def _end(grant: dict[str, Any]) -> str:
    match grant["duration"]:
        case "once":
            return "the end of a run"
        case "conversation":
            return "the end of the conversation"
    return strftime("%H:%M:%S", localtime(grant["expires_at"]))
