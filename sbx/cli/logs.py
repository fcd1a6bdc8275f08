"""`sbx logs`: the events of a sandbox and its ended runs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.history import headline
from sbx.cli.terminal import STDOUT, one_line, scrub, write
from sbx.errors import NotFound
from sbx.protocol.invisible import in_order

if TYPE_CHECKING:
    from sbx.client import Client

_PAGE = 200
_POLL_S = 1.0  # the interval of the polls for ended runs

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
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Show the events of a sandbox and its ended runs with their output, in order of time."""

    import asyncio  # a lazy import keeps `sbx --help` fast

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

    with suppress(KeyboardInterrupt) if follow else nullcontext():  # the way to end it
        connect.ask(socket, key, shown)
    return exits.Exit.OK


async def _events(client: "Client", sandbox_id: str) -> list[dict[str, Any]]:
    path = connect.sandbox_path(sandbox_id, "events")
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
    path = connect.sandbox_path(sandbox_id, "history")
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
    path = connect.sandbox_path(sandbox_id, "history")
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
    """Return the time of an event, or of the end of a run: its kernel may start for it."""
    _, body = record
    at = output.moment(body.get("at") or body.get("created_at"))
    return (at.timestamp() if at else 0.0) + (body.get("execution_time_ms") or 0) / 1000


def _plain(kind: str, body: Mapping[str, Any]) -> str:
    if kind == "event":
        cause = f" ({one_line(str(body['cause']))})" if body.get("cause") else ""
        details = "".join(
            f"  {one_line(str(name))}={one_line(str(value))}"
            for name, value in (body.get("details") or {}).items()
            if value is not None
        )
        return f"{output.clock(body['at'])}  {one_line(str(body['type']))}{cause}{details}"
    return f"{output.clock(body['created_at'])}  {headline(body)}{_run_output(body)}"


def _run_output(run: Mapping[str, Any]) -> str:
    """Return the output and the error of a run. Each line is indented."""
    text = "\n".join(part.rstrip("\n") for part in (run["output"], run["error"]) if part)
    return "".join(f"\n    {line}" for line in in_order(scrub(text)).replace("\r", "").splitlines())
