"""`sbx attach`, `detach` and `lift`: what the operator does to a sandbox that lives."""

import os
from typing import Annotated, Any

import typer

from sbx.cli import exits, reach, report
from sbx.cli.terminal import STDOUT, one_line, write


def attach(
    sandbox_id: reach.Id,
    source: Annotated[
        str | None,
        typer.Argument(help="A directory of the service's host.", metavar="SOURCE"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Argument(
            help="Where it is seen; else /mnt and the name that it has.", metavar="TARGET"
        ),
    ] = None,
    writable: Annotated[
        bool,
        typer.Option("--write", help="Code inside may write to it, at /workspace/shared/NAME."),
    ] = False,
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Show a directory of the host in a sandbox that lives, and print the path inside.

    Without SOURCE, list what is attached. For the operator of the service, who named in its setting
    attach_dirs what may be attached. It is read-only, and seen until sbx detach, the sandbox's
    deletion, or the end of the service. --write takes a policy with shared = true and
    host_executables = "allow", and a directory in the sandbox's /workspace/shared that is there.
    """
    path = reach.of_admin("sandboxes", reach.not_empty(sandbox_id), "attachments")
    if source is None:
        told = reach.ask(socket, key, lambda client: client.request("GET", path))
        return _listed(told["items"], as_json=as_json)
    asked = {"source": os.path.abspath(source), "target": target, "read_only": not writable}
    made = reach.ask(socket, key, lambda client: client.request("POST", path, json=asked))
    report.outcome(made, one_line(made["target"]), as_json=as_json)
    return exits.Exit.OK


def detach(
    sandbox_id: reach.Id,
    target: Annotated[str, typer.Argument(help="As sbx attach printed it.", metavar="TARGET")],
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Show an attached directory no more. What is open of it stays open."""
    path = reach.of_admin("sandboxes", reach.not_empty(sandbox_id), "attachments")
    asked = {"target": target}
    reach.ask(socket, key, lambda client: client.request("DELETE", path, params=asked))
    report.outcome({"detached": target}, one_line(target), as_json=as_json)
    return exits.Exit.OK


def lift(
    sandbox_id: reach.Id,
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Let a sandbox run again that was frozen, because a planted credential was used in it.

    For the operator of the service; sbx logs tells which credential, and where.
    """
    path = reach.of_admin("sandboxes", reach.not_empty(sandbox_id), "lift")
    told = reach.ask(socket, key, lambda client: client.request("POST", path))
    if as_json:
        report.document(told)
    elif told["lifted"]:
        write(STDOUT, f"{one_line(sandbox_id)}\n")
    else:
        report.note(f"{sandbox_id} was not frozen")
    return exits.Exit.OK


def _listed(items: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        report.document({"attachments": items})
    elif items:
        from sbx.cli.tables import print_table

        rows = [
            (one["target"], one["source"], "read-only" if one["read_only"] else "writable")
            for one in items
        ]
        print_table(("seen at", "directory", "access"), rows)
    else:
        report.note("nothing is attached")
    return exits.Exit.OK
