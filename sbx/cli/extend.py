"""`sbx extend`: extend the lifetime of a sandbox of a running service."""

from typing import Annotated

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write


def extend(
    sandbox_id: connect.Id,
    by: Annotated[
        str, typer.Argument(help="The time to add: 3600, 90s, 10min, 2h.", metavar="TIME")
    ],
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Extend the lifetime of a sandbox."""
    request = {"extend_by": connect.whole_seconds(by, "TIME")}
    path = connect.sandbox_path(sandbox_id, "extend_ttl")
    box = connect.ask(socket, key, lambda client: client.request("POST", path, json=request))
    if as_json:
        output.document(box)
    else:
        until, remaining = output.clock(box["expires_at"]), output.since(box["expires_at"])
        write(STDOUT, f"{one_line(box['id'])} lives until {until}, {remaining}\n")
    return exits.Exit.OK
