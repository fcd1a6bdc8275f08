"""`sbx rerun`: one run of a history again, in a fresh sandbox."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, scrub, write
from sbx.protocol.invisible import in_order

if TYPE_CHECKING:
    from sbx.client import Client

_WALL_TIME_S = 3600.0  # the longest run of a policy
_COPY_S = 300.0


def rerun(
    sandbox_id: connect.Id,
    run: Annotated[
        str, typer.Argument(help="A run of its history; `last` is the last one.", metavar="RUN")
    ],
    timeout: Annotated[
        float | None,
        typer.Option(help="The seconds of the run; default: those of the policy.", min=0.001),
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Run the code of an ended run again, in a fresh sandbox, and compare the results.

    The fresh sandbox has the same policy, copies of the files as they are now, and a new kernel:
    variables of earlier runs are not there. It is deleted at the end, and the original does not
    change.

    \b
    exit codes:
      0  the results are equal
      1  they differ
    """

    async def request(client: "Client") -> Any:
        entry = await client.request("GET", connect.sandbox_path(sandbox_id, "history", run))
        run_id = f"run-{entry['id'].removeprefix('exec-')}"
        path = connect.sandbox_path(sandbox_id, "runs", run_id, "rerun")
        limit = (timeout or _WALL_TIME_S) + _COPY_S
        return await client.request("POST", path, json={"timeout": timeout}, timeout_s=limit)

    reply = connect.ask(socket, key, request)
    if as_json:
        output.document(reply)
    else:
        for name in ("before", "after"):
            write(STDOUT, f"{name}: {reply[name]['status']}\n{_shown(reply[name])}")
        differences = ", ".join(reply["differences"])
        output.note(
            f"the results differ: {differences}" if differences else "the results are equal"
        )
    return exits.Exit.FAILED if reply["differences"] else exits.Exit.OK


def _shown(result: dict[str, Any]) -> str:
    error = result["error"]
    parts = [result["text"], f"{error['name']}: {error['value']}" if error else ""]
    lines = in_order(scrub("\n".join(filter(None, parts)))).splitlines()
    return "".join(f"    {line}\n" for line in lines)
