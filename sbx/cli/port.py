"""`sbx port`: a link to a server that code started in a sandbox, or a local port for it."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write
from sbx.errors import SbxError

if TYPE_CHECKING:
    from sbx.client import Client


def port(
    sandbox_id: connect.Id,
    port: Annotated[int, typer.Argument(help="The port inside.", metavar="PORT", min=1, max=65535)],
    local: Annotated[
        int | None,
        typer.Option(
            "--local",
            "-L",
            help="Open this port of 127.0.0.1 (0: a free one) until Ctrl-C, for any protocol over "
            "TCP, in place of a link.",
            metavar="PORT",
            min=0,
            max=65535,
        ),
    ] = None,
    ttl: Annotated[
        int, typer.Option("--ttl", help="The time until the link ends, in seconds.", min=1)
    ] = 3600,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Print a link to a server in a sandbox, for a browser on this host, or open a local port.

    Everyone with the link can use the server until the link ends. The service has to listen on TCP.
    A port of --local needs no TCP of the service; every user of this host can connect to it.
    """
    path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}"
    if local is not None:
        with suppress(KeyboardInterrupt):  # the way to end it
            connect.ask(
                socket, key, lambda client: _forward(client, sandbox_id, port, local, as_json)
            )
        return exits.Exit.OK
    reply = connect.ask(
        socket,
        key,
        lambda client: client.request(
            "POST", f"{path}/port-links", json={"port": port, "ttl": ttl}
        ),
    )
    if as_json:
        output.document(reply)
        return exits.Exit.OK
    write(STDOUT, f"{one_line(reply['url'] or reply['path'])}\n")
    if reply["url"] is None:
        output.note("the service has no TCP port for a browser: sbx serve --listen 127.0.0.1:8765")
    return exits.Exit.OK


async def _forward(client: "Client", sandbox_id: str, port: int, local: int, as_json: bool) -> None:
    """Forward the connections to a local port, until Ctrl-C."""
    import asyncio  # help does not need it

    box = client.sandbox(sandbox_id)
    await box.info()  # an unknown sandbox is an error now

    def show(error: SbxError) -> None:
        output.note(f"a connection was refused: {one_line(error.message)}")

    async with box.forward_port(port, local_port=local, on_error=show) as opened:
        address = {"host": "127.0.0.1", "port": opened}
        if as_json:
            output.document(address)
        else:
            write(STDOUT, f"127.0.0.1:{opened}\n")
            output.note("press Ctrl-C to close the port")
        await asyncio.Event().wait()
