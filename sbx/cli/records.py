"""`sbx logs` and `sbx history`: the events of a sandbox and its runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sbx.cli import connect, exits, moments, report
from sbx.cli.terminal import STDOUT, one_line, scrub, write
from sbx.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from sbx.client import Client

_PAGE = 200
_POLL_S = 1.0  # the interval of the polls for ended runs
_CODE_WIDTH = 60

Record = tuple[str, Mapping[str, Any]]  # ("event" or "run", its body from the service)


def logs(
    sandbox_id: connect.Id,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Continue until the sandbox is deleted, or Ctrl-C."),
    ] = False,
    tail: Annotated[
        int, typer.Option(help="The number of last runs to show.", metavar="N", min=0, max=500)
    ] = 100,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event and each run as a line of JSON.")
    ] = False,
    socket: connect.Socket = None,
    key: connect.Key = None,
) -> int:
    """Show the events of a sandbox and its ended runs with their output, in order of time."""
    import asyncio

    def show(records: Sequence[Record]) -> None:
        for kind, body in sorted(records, key=_when):
            line = json.dumps({"kind": kind, **body}) if as_json else _plain(kind, body)
            write(STDOUT, line + "\n")

    async def shown(client: "Client") -> None:
        events = await _events(client, sandbox_id)
        runs = await _runs(client, sandbox_id, tail)
        show([*(("event", event) for event in events), *(("run", run) for run in runs)])
        if not follow:
            return
        last = max((event["id"] for event in events), default=0)
        seen = {run["id"] for run in runs}
        polling = asyncio.create_task(_poll_runs(client, sandbox_id, seen, show))
        try:
            with suppress(NotFound):  # it was deleted
                async for _, event in client.follow_events(sandbox_id, after=last):
                    show([("event", event)])
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    connect.ask(socket, key, shown)
    return exits.Exit.OK


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
    socket: connect.Socket = None,
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
    path = connect.of_sandbox(sandbox_id, "history")
    reply = connect.ask(socket, key, lambda client: client.request("GET", path, params=params))
    if as_json:
        report.document(reply)
    elif not reply["entries"]:
        report.note("nothing has run there yet" if not reply["total"] else "no more runs")
    else:
        _print(reply["entries"])
        if (remaining := reply["total"] - offset - len(reply["entries"])) > 0:
            report.note(f"{remaining} more: --offset {offset + len(reply['entries'])}")
    return exits.Exit.OK


# -- shared parts ----------------------------------------------------------------------------------


async def _events(client: "Client", sandbox_id: str) -> list[dict[str, Any]]:
    path = connect.of_sandbox(sandbox_id, "events")
    params: dict[str, Any] = {"limit": _PAGE}
    events: list[dict[str, Any]] = []
    while True:
        page = await client.request("GET", path, params=params)
        events += page["items"]
        if not page["next_cursor"]:
            return events
        params["cursor"] = page["next_cursor"]


async def _runs(client: "Client", sandbox_id: str, count: int) -> list[dict[str, Any]]:
    """Return at most `count` of the last runs. A page may be short if its runs have much output."""
    path = connect.of_sandbox(sandbox_id, "history")
    runs: list[dict[str, Any]] = []
    while len(runs) < count:
        params = {"limit": count - len(runs), "offset": len(runs)}
        page = await client.request("GET", path, params=params)
        runs += page["entries"]
        if not page["entries"] or len(runs) >= page["total"]:
            break
    return runs


async def _poll_runs(client: "Client", sandbox_id: str, seen: set[str], show: Any) -> None:
    """Poll for ended runs and show them. The service streams the events of a sandbox, but not its
    runs."""
    import asyncio

    while True:
        await asyncio.sleep(_POLL_S)
        fresh = await _unseen(client, sandbox_id, seen)
        show([("run", run) for run in fresh])


async def _unseen(client: "Client", sandbox_id: str, seen: set[str]) -> list[dict[str, Any]]:
    path = connect.of_sandbox(sandbox_id, "history")
    fresh: list[dict[str, Any]] = []
    while True:
        params = {"limit": _PAGE, "offset": len(fresh)}
        page = await client.request("GET", path, params=params)
        new = [run for run in page["entries"] if run["id"] not in seen]
        seen.update(run["id"] for run in new)
        fresh += new
        if len(new) < len(page["entries"]) or not new:
            return fresh


def _when(record: Record) -> float:
    _, body = record
    at = moments.moment(body.get("at") or body.get("created_at"))
    return at.timestamp() if at else 0.0


def _plain(kind: str, body: Mapping[str, Any]) -> str:
    if kind == "event":
        cause = f" ({one_line(str(body['cause']))})" if body.get("cause") else ""
        details = "".join(
            f"  {one_line(str(name))}={one_line(str(value))}"
            for name, value in (body.get("details") or {}).items()
            if value is not None
        )
        return f"{moments.clock(body['at'])}  {one_line(str(body['type']))}{cause}{details}"
    return f"{moments.clock(body['created_at'])}  {_headline(body)}{_run_output(body)}"


def _headline(run: Mapping[str, Any]) -> str:
    took = moments.milliseconds(run["execution_time_ms"])
    outcome = "ok" if run["success"] else "failed"
    return one_line(f"{run['exec_type']} {run['id']} {outcome}, {took}: {_first_line(run['code'])}")


def _run_output(run: Mapping[str, Any]) -> str:
    """Return the output and the error of a run. Each line is indented."""
    text = "\n".join(part.rstrip("\n") for part in (run["output"], run["error"]) if part)
    return "".join(f"\n    {line}" for line in scrub(text).replace("\r", "").splitlines())


def _first_line(code: str) -> str:
    first, _, more = code.strip().partition("\n")
    return first if len(first) <= _CODE_WIDTH and not more else f"{first[:_CODE_WIDTH]}…"


def _print(entries: Sequence[Mapping[str, Any]]) -> None:
    from sbx.cli.tables import print_table

    rows = [
        (
            run["id"],
            moments.since(run["created_at"]),
            run["exec_type"],
            "yes" if run["success"] else "no",
            moments.milliseconds(run["execution_time_ms"]),
            _first_line(run["code"]),
            run["tags"] or "",
        )
        for run in entries
    ]
    print_table(("run", "begun", "kind", "ok", "took", "code", "tags"), rows)


def _show_run(
    sandbox_id: str,
    run: str,
    changes: Mapping[str, str | None],
    as_json: bool,
    socket: str | None,
    key: str | None,
) -> int:
    async def request(client: "Client") -> Any:
        entry = await client.request("GET", connect.of_sandbox(sandbox_id, "history", run))
        if not any(value is not None for value in changes.values()):
            return entry
        path = connect.of_sandbox(sandbox_id, "history", entry["id"])
        return await client.request("PATCH", path, json=dict(changes))

    entry = connect.ask(socket, key, request)
    if as_json:
        report.document(entry)
    else:
        write(STDOUT, "".join(f"{line}\n" for line in _in_full(entry)))
    return exits.Exit.OK


def _in_full(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"{moments.clock(run['created_at'])}  {_headline(run)}"
    for name in ("description", "tags", "notes"):
        if run[name]:
            yield f"{name}: {one_line(run[name])}"
    for name in ("code", "output", "error"):
        if run[name]:
            yield f"{name}:"
            yield from (f"    {line}" for line in scrub(run[name]).splitlines())
