"""`sbx stop`: stop the kernels of sandboxes of a running service."""

from typing import TYPE_CHECKING

from sbx.cli import connect

if TYPE_CHECKING:
    from sbx.client import Client


def stop(
    ids: connect.Ids,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Stop the kernels of sandboxes. Files stay, and variables are lost.

    The next run starts a new kernel.
    """

    async def stopped(client: "Client", sandbox_id: str) -> None:
        await client.request("POST", connect.sandbox_path(sandbox_id, "stop"))

    return connect.for_each("stopped", ids, stopped, as_json, socket, key)
