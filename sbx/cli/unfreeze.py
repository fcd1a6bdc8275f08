"""`sbx unfreeze`: unfreeze a sandbox of a running service, for the operator."""

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, write


def unfreeze(
    sandbox_id: connect.Id,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Unfreeze a sandbox that was frozen because code in it used a honeytoken.

    This command is for the operator of the service. sbx logs shows which credential was used, and
    where.
    """
    path = connect.admin_path("sandboxes", connect.not_empty(sandbox_id), "unfreeze")
    reply = connect.ask(socket, key, lambda client: client.request("POST", path))
    if as_json:
        output.document(reply)
    elif reply["unfrozen"]:
        write(STDOUT, f"{one_line(sandbox_id)}\n")
    else:
        output.note(f"{sandbox_id} was not frozen")
    return exits.Exit.OK
