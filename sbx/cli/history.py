"""`sbx history`: the ended runs of a sandbox."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import STDOUT, one_line, scrub, write
from sbx.errors import BadRequest
from sbx.protocol.invisible import in_order

if TYPE_CHECKING:
    from sbx.client import Client

_CODE_WIDTH = 60


def history(
    sandbox_id: connect.Id,
    run: Annotated[
        str | None,
        typer.Argument(help="Show one run in full; `last` is the last one.", metavar="[RUN]"),
    ] = None,
    kind: Annotated[
        Literal["python", "shell", "bash", "javascript", "typescript", "java", "go"] | None,
        typer.Option(help="Only runs of this kind: cells, commands, or scripts of a language."),
    ] = None,
    succeeded: Annotated[bool, typer.Option("--ok", help="Only successful runs.")] = False,
    tags: Annotated[
        str | None,
        typer.Option(
            help="Only runs with one of these tags. With RUN: set its tags.", metavar="A,B"
        ),
    ] = None,
    notes: Annotated[
        str | None, typer.Option(help="With RUN: set its notes.", metavar="TEXT")
    ] = None,
    description: Annotated[
        str | None, typer.Option(help="With RUN: set its description.", metavar="TEXT")
    ] = None,
    limit: Annotated[
        int, typer.Option(help="The number of runs.", metavar="N", min=1, max=500)
    ] = 20,
    offset: Annotated[int, typer.Option(help="Skip this number of runs.", metavar="N", min=0)] = 0,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """List the ended runs of a sandbox, the last one first, or show one run in full."""
    if run is not None:
        changes = {"tags": tags, "notes": notes, "description": description}
        return _show_run(sandbox_id, run, changes, as_json, socket, key)
    if notes is not None or description is not None:
        raise BadRequest("--notes and --description need a RUN", hint="name the run, or use last")
    params: dict[str, Any] = {"limit": limit, "offset": offset}
    params |= {"exec_type": kind} if kind else {}
    params |= {"success_only": "true"} if succeeded else {}
    params |= {"tags": tags} if tags else {}
    path = connect.sandbox_path(sandbox_id, "history")
    reply = connect.ask(socket, key, lambda client: client.request("GET", path, params=params))
    if as_json:
        output.document(reply)
    elif not reply["entries"]:
        output.note("nothing has run there yet" if not reply["total"] else "no more runs")
    else:
        _print(reply["entries"])
        if (remaining := reply["total"] - offset - len(reply["entries"])) > 0:
            output.note(f"{remaining} more: --offset {offset + len(reply['entries'])}")
    return exits.Exit.OK


def _show_run(
    sandbox_id: str,
    run: str,
    changes: Mapping[str, str | None],
    as_json: bool,
    socket: str | None,
    key: str | None,
) -> int:
    async def request(client: "Client") -> Any:
        entry = await client.request("GET", connect.sandbox_path(sandbox_id, "history", run))
        if not any(value is not None for value in changes.values()):
            return entry
        path = connect.sandbox_path(sandbox_id, "history", entry["id"])
        return await client.request("PATCH", path, json=dict(changes))

    entry = connect.ask(socket, key, request)
    if as_json:
        output.document(entry)
    else:
        write(STDOUT, "".join(f"{line}\n" for line in _in_full(entry)))
    return exits.Exit.OK


def _print(entries: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            _run_id(run),
            output.since(run["created_at"]),
            run["exec_type"],
            "yes" if run["success"] else "no",
            output.milliseconds(run["execution_time_ms"]),
            _first_line(run["code"]),
            run["tags"] or "",
        )
        for run in entries
    ]
    output.print_table(("run", "begun", "kind", "ok", "took", "code", "tags"), rows)


def _in_full(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"{output.clock(run['created_at'])}  {headline(run)}"
    for name in ("description", "tags", "notes"):
        if run[name]:
            yield f"{name}: {one_line(run[name])}"
    for name in ("code", "output", "error"):
        if run[name]:
            yield f"{name}:"
            yield from (f"    {line}" for line in in_order(scrub(run[name])).splitlines())


def headline(run: Mapping[str, Any]) -> str:
    took = output.milliseconds(run["execution_time_ms"])
    outcome = "ok" if run["success"] else "failed"
    head = f"{run['exec_type']} {_run_id(run)} {outcome}, {took}"
    return one_line(f"{head}: {_first_line(run['code'])}")


def _run_id(run: Mapping[str, Any]) -> str:
    """Return the id as a result has it. The history is a route of Bay, whose ids differ."""
    return f"run-{run['id'].removeprefix('exec-')}"


def _first_line(code: str) -> str:
    first, _, more = code.strip().partition("\n")
    return first if len(first) <= _CODE_WIDTH and not more else f"{first[:_CODE_WIDTH]}…"
