"""`sbx logs` and `sbx history`: what became of a sandbox, and what ran in it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sbx.cli import exits, moments, reach, report
from sbx.cli.terminal import STDOUT, one_line, scrub, write
from sbx.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from sbx.client import Client

_PAGE = 200
_LOOK_S = 1.0  # between two looks for runs that ended
_CODE_WIDTH = 60

Record = tuple[str, Mapping[str, Any]]  # ("event" or "run", what the service told)


def logs(
    sandbox_id: reach.Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it is deleted, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int, typer.Option(help="How many of its last runs.", metavar="N", min=0, max=500)
    ] = 100,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event and each run as a line of JSON.")
    ] = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """What became of a sandbox, and the runs that ended, with their output, in order of time."""
    import asyncio

    def show(records: Sequence[Record]) -> None:
        for kind, told in sorted(records, key=_when):
            line = json.dumps({"kind": kind, **told}) if as_json else _plain(kind, told)
            write(STDOUT, line + "\n")

    async def shown(client: "Client") -> None:
        events = await _events(client, sandbox_id)
        runs = await _runs(client, sandbox_id, tail)
        show([*(("event", event) for event in events), *(("run", run) for run in runs)])
        if not follow:
            return
        last = max((event["id"] for event in events), default=0)
        seen = {run["id"] for run in runs}
        looking = asyncio.create_task(_look(client, sandbox_id, seen, show))
        try:
            with suppress(NotFound):  # it was deleted
                async for _, event in client.follow_events(sandbox_id, after=last):
                    show([("event", event)])
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    reach.ask(socket, key, shown)
    return exits.Exit.OK


def history(
    sandbox_id: reach.Id,
    run: Annotated[
        str | None,
        typer.Argument(help="One run, in full; `last` is the last one.", metavar="[RUN]"),
    ] = None,
    kind: Annotated[
        Literal["python", "shell", "bash", "javascript", "typescript", "java", "go"] | None,
        typer.Option(help="Only cells, only commands, or only scripts of a language."),
    ] = None,
    succeeded: Annotated[bool, typer.Option("--ok", help="Only those that went well.")] = False,
    tags: Annotated[
        str | None,
        typer.Option(help="Only those with one of these tags. With RUN: set them.", metavar="A,B"),
    ] = None,
    notes: Annotated[
        str | None, typer.Option(help="With RUN: write it down.", metavar="TEXT")
    ] = None,
    description: Annotated[
        str | None, typer.Option(help="With RUN: say what it was for.", metavar="TEXT")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many.", metavar="N", min=1, max=500)] = 20,
    offset: Annotated[int, typer.Option(help="After so many.", metavar="N", min=0)] = 0,
    as_json: reach.Json = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """The runs of a sandbox that ended, the last one first; or one of them in full."""
    if run is not None:
        noted = {"tags": tags, "notes": notes, "description": description}
        return _one(sandbox_id, run, noted, as_json, socket, key)
    if notes is not None or description is not None:
        raise BadRequest("--notes and --description are of one run", hint="name it, or say last")
    params: dict[str, Any] = {"limit": limit, "offset": offset}
    params |= {"exec_type": kind} if kind else {}
    params |= {"success_only": "true"} if succeeded else {}
    params |= {"tags": tags} if tags else {}
    path = reach.of_sandbox(sandbox_id, "history")
    told = reach.ask(socket, key, lambda client: client.request("GET", path, params=params))
    if as_json:
        report.document(told)
    elif not told["entries"]:
        report.note("nothing has run there yet" if not told["total"] else "there are no more")
    else:
        _print(told["entries"])
        if (left := told["total"] - offset - len(told["entries"])) > 0:
            report.note(f"{left} more: --offset {offset + len(told['entries'])}")
    return exits.Exit.OK


# -- the parts of it -------------------------------------------------------------------------------


async def _events(client: "Client", sandbox_id: str) -> list[dict[str, Any]]:
    path = reach.of_sandbox(sandbox_id, "events")
    params: dict[str, Any] = {"limit": _PAGE}
    found: list[dict[str, Any]] = []
    while True:
        page = await client.request("GET", path, params=params)
        found += page["items"]
        if not page["next_cursor"]:
            return found
        params["cursor"] = page["next_cursor"]


async def _runs(client: "Client", sandbox_id: str, count: int) -> list[dict[str, Any]]:
    """The last ones, at most so many; a page may end early where runs said much."""
    path = reach.of_sandbox(sandbox_id, "history")
    found: list[dict[str, Any]] = []
    while len(found) < count:
        params = {"limit": count - len(found), "offset": len(found)}
        page = await client.request("GET", path, params=params)
        found += page["entries"]
        if not page["entries"] or len(found) >= page["total"]:
            break
    return found


async def _look(client: "Client", sandbox_id: str, seen: set[str], show: Any) -> None:
    """Show runs as they end. The service tells the life of a sandbox as it goes on, and its runs
    when it is asked."""
    import asyncio

    while True:
        await asyncio.sleep(_LOOK_S)
        fresh = await _unseen(client, sandbox_id, seen)
        show([("run", run) for run in fresh])


async def _unseen(client: "Client", sandbox_id: str, seen: set[str]) -> list[dict[str, Any]]:
    path = reach.of_sandbox(sandbox_id, "history")
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
    _, told = record
    at = moments.moment(told.get("at") or told.get("created_at"))
    return at.timestamp() if at else 0.0


def _plain(kind: str, told: Mapping[str, Any]) -> str:
    if kind == "event":
        because = f" ({one_line(str(told['cause']))})" if told.get("cause") else ""
        details = "".join(
            f"  {one_line(str(name))}={one_line(str(value))}"
            for name, value in (told.get("details") or {}).items()
            if value is not None
        )
        return f"{moments.clock(told['at'])}  {one_line(str(told['type']))}{because}{details}"
    return f"{moments.clock(told['created_at'])}  {_headline(told)}{_said(told)}"


def _headline(run: Mapping[str, Any]) -> str:
    took = moments.milliseconds(run["execution_time_ms"])
    ended = "ok" if run["success"] else "failed"
    return one_line(f"{run['exec_type']} {run['id']} {ended}, {took}: {_first_line(run['code'])}")


def _said(run: Mapping[str, Any]) -> str:
    """What it printed, and why it failed, each line set off from ours."""
    said = "\n".join(part.rstrip("\n") for part in (run["output"], run["error"]) if part)
    return "".join(f"\n    {line}" for line in scrub(said).replace("\r", "").splitlines())


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


def _one(
    sandbox_id: str,
    run: str,
    noted: Mapping[str, str | None],
    as_json: bool,
    socket: str | None,
    key: str | None,
) -> int:
    async def told(client: "Client") -> Any:
        entry = await client.request("GET", reach.of_sandbox(sandbox_id, "history", run))
        if not any(value is not None for value in noted.values()):
            return entry
        path = reach.of_sandbox(sandbox_id, "history", entry["id"])
        return await client.request("PATCH", path, json=dict(noted))

    entry = reach.ask(socket, key, told)
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
