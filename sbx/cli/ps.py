"""`sbx ps`: list the sandboxes of a running service."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, scrub, write
from sbx.errors import BadRequest

_STATES = ("idle", "starting", "ready", "failed", "expired")
AllOwners = Annotated[
    bool, typer.Option("--all-owners", help="List the sandboxes of all owners; for the operator.")
]


def ps(
    status: Annotated[
        str | None,
        typer.Option(
            help="Only sandboxes in this state: idle, starting, ready, failed or expired.",
            metavar="STATE",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    all_owners: AllOwners = False,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """List your sandboxes.

    idle: no kernel is running; the files are kept, and the next run starts a kernel. ready: a
    kernel is live.
    """
    if status is not None and status not in _STATES:
        raise BadRequest(
            f"--status must be one of {', '.join(_STATES)}, not {status[:80]}", code="usage"
        )
    boxes = connect.ask(
        socket, key, lambda client: connect.list_sandboxes(client, status, all_owners=all_owners)
    )
    if as_json:
        output.document({"sandboxes": boxes})
    elif quiet:
        write(STDOUT, "".join(f"{scrub(box['id'])}\n" for box in boxes))
    elif not boxes:
        output.note("you have no sandboxes; create one with sbx create")
    else:
        _print(boxes, all_owners=all_owners)
    return exits.Exit.OK


def _print(boxes: Sequence[Mapping[str, Any]], *, all_owners: bool) -> None:
    newest_first = sorted(boxes, key=lambda box: str(box["created_at"]), reverse=True)
    rows = [
        (
            box["id"],
            box["status"],
            box["profile"],
            output.since(box["created_at"]),
            output.since(box["expires_at"]) or "never",
            *((box.get("owner") or "",) if all_owners else ()),
        )
        for box in newest_first
    ]
    heads = ("sandbox", "state", "policy", "made", "expires")
    output.print_table((*heads, "owner") if all_owners else heads, rows)
