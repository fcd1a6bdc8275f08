"""`sbx mount` and `sbx unmount`: directories of the host in a live sandbox, for the operator."""

import os
from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import one_line


def mount(
    sandbox_id: connect.Id,
    source: Annotated[
        str | None,
        typer.Argument(help="A directory on the service's host.", metavar="SOURCE"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Argument(help="The path inside the sandbox; default: /mnt/NAME.", metavar="TARGET"),
    ] = None,
    writable: Annotated[
        bool,
        typer.Option("--write", help="Let code inside write to it, at /workspace/shared/NAME."),
    ] = False,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Mount a directory of the host into a live sandbox, and print its path inside.

    Without SOURCE, list the mounted directories. This command is for the operator of the service:
    the setting mount_dirs of the service lists the directories that may be mounted. The directory
    is read-only. It stays mounted until sbx unmount, the deletion of the sandbox, or the end of the
    service. --write needs a policy with shared = true and host_executables = "allow", and an
    existing directory in /workspace/shared of the sandbox.
    """
    path = connect.admin_path("sandboxes", connect.not_empty(sandbox_id), "mounts")
    if source is None:
        reply = connect.ask(socket, key, lambda client: client.request("GET", path))
        return _listed(reply["items"], as_json=as_json)
    request = {"source": os.path.abspath(source), "target": target, "read_only": not writable}
    reply = connect.ask(socket, key, lambda client: client.request("POST", path, json=request))
    output.outcome(reply, one_line(reply["target"]), as_json=as_json)
    return exits.Exit.OK


def unmount(
    sandbox_id: connect.Id,
    target: Annotated[
        str, typer.Argument(help="The path inside, from sbx mount.", metavar="TARGET")
    ],
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Unmount a directory. Files in it that are open stay open."""
    path = connect.admin_path("sandboxes", connect.not_empty(sandbox_id), "mounts")
    request = {"target": target}
    connect.ask(socket, key, lambda client: client.request("DELETE", path, params=request))
    output.outcome({"unmounted": target}, one_line(target), as_json=as_json)
    return exits.Exit.OK


def _listed(items: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        output.document({"mounts": items})
    else:
        rows = [
            (item["target"], item["source"], "read-only" if item["read_only"] else "writable")
            for item in items
        ]
        output.print_table(("seen at", "directory", "access"), rows, empty="nothing is mounted")
    return exits.Exit.OK
