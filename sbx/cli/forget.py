"""`sbx forget`: delete all data of one user of a running service."""

from typing import Annotated

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import one_line


def forget(
    user: Annotated[str, typer.Argument(help="The user.", metavar="USER")],
    owner: Annotated[
        str | None, typer.Option(help="The owner of the user; default: you.", metavar="OWNER")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Delete all data of a user, and print the number of each kind.

    Sessions with their files and histories, chats with their messages, approvals and rules, tasks
    and tokens go at once. The audit log keeps the events and names. A backup that was made before
    still has the data.
    """
    if not yes:
        connect.confirm(f"remove all data of the user {one_line(user)}", as_json=as_json)
    path = connect.admin_path("users", user)
    params = {} if owner is None else {"owner": owner}
    reply = connect.ask(socket, key, lambda client: client.request("DELETE", path, params=params))
    if as_json:
        output.document(reply)
    else:
        rows = [(kind, str(count)) for kind, count in reply["removed"].items() if count]
        output.print_table(("removed", "count"), rows, empty=f"no data of {one_line(user)} exist")
    return exits.Exit.OK
