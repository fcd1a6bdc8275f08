"""`sbx port`: a link to a server that code started in a sandbox."""

from typing import Annotated
from urllib.parse import quote

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write


def port(
    sandbox_id: connect.Id,
    port: Annotated[int, typer.Argument(help="The port inside.", metavar="PORT", min=1, max=65535)],
    ttl: Annotated[
        int, typer.Option("--ttl", help="The time until the link ends, in seconds.", min=1)
    ] = 3600,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Print a link to a server in a sandbox, for a browser on this host.

    Whoever has the link can use the server until the link ends. The service has to listen on TCP.
    """
    path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}/port-links"
    reply = connect.ask(
        socket, key, lambda client: client.request("POST", path, json={"port": port, "ttl": ttl})
    )
    if as_json:
        output.document(reply)
        return exits.Exit.OK
    write(STDOUT, f"{one_line(reply['url'] or reply['path'])}\n")
    if reply["url"] is None:
        output.note("the service has no TCP port for a browser: sbx serve --listen 127.0.0.1:8765")
    return exits.Exit.OK
