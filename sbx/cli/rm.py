"""`sbx rm`: delete sandboxes of a running service, with their files."""

from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import connect
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.client import Client


def rm(
    ids: Annotated[
        list[str] | None, typer.Argument(help="The ids of sandboxes, from sbx ps.", metavar="[ID…]")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of your sandboxes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Delete sandboxes and their files. A sandbox that was deleted before is not an error."""
    if everything == bool(ids):
        raise BadRequest(
            "--all and ids exclude each other"
            if everything
            else "the ids of the sandboxes are missing",
            hint="pass ids from sbx ps, or --all",
        )
    if everything:
        boxes = connect.ask(socket, key, connect.list_sandboxes)
        ids = [box["id"] for box in boxes]
        if ids and not yes:
            count = "1 sandbox and its files"
            if len(ids) > 1:
                count = f"{len(ids)} sandboxes and their files"
            connect.confirm(f"remove {count}", as_json=as_json)

    async def removed(client: "Client", sandbox_id: str) -> None:
        await client.request("DELETE", connect.sandbox_path(sandbox_id))

    return connect.for_each("removed", ids or [], removed, as_json, socket, key)
