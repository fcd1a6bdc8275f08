"""python -m bench stalls: how long the largest legal inputs stop the event loop of a service.

    each case, five times ──► sbx serve ──► its monitor: the delay of a timer that is due every 5 ms

`WORK` names for each route what may be large there. Each route that takes a JSON body also gets the
five largest bodies of `GENERIC`, valid or not: their values are counted, parsed and validated
before the route refuses them. A route without either needs a reason in `REASONS`; a test compares
both with the routes of the service.

The worst of all rounds is the figure. On a machine that is in use, `--busy` counts of each delay no
more than the CPU time of the service: the machine delays a timer as well.
"""

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import httpx2
import typer
from fastapi import FastAPI
from rich.console import Console
from rich.table import Table

from bench.samples import NotMeasured
from bench.serving import served, temporary_directory
from bench.stall_cases import CASES, GENERIC, Case, Place
from bench.stall_service import FILE, SIZE, Record
from sbx.api import app
from sbx.api.middleware import largest_body

BOUND_MS = 50.0
_REST_S = 0.15  # for timers that are late, and for clean-up
_CASE_S = 120.0
_PROBE_S = 0.02

# Routes without a case and without a JSON body. The first match counts.
REASONS: Sequence[tuple[str, str]] = (
    (
        r"(GET|HEAD) (/openapi.json|/docs.*|/redoc|/|/console.*|/health)",
        "made once, or a small file",
    ),
    (r"GET /metrics", "for the operator; its size does not depend on a tenant"),
    (r"GET .*/(events|follow|wait)", "the same stream as that of the case of its POST"),
    (r"WS .*", "the same relay as that of a case"),
    (
        r"(GET|HEAD) .*(download|files|uploads|archive|partials)(/\{.*)?",
        "pieces of bounded size, read in threads",
    ),
    (
        r"(POST|PUT|PATCH) .*(upload|uploads|files|archive|partials)(/\{.*)?",
        "pieces of bounded size, written in threads",
    ),
    (r"[A-Z]+ .*/(ports|proxy)/\{port\}/.*", "the same relay as that of a case"),
    (r"PATCH .*/18080/policy|[A-Z]+ .*\{rest:path\}|[A-Z]+ .*/browser/.*", "refuses each request"),
    (r"DELETE .*", "one object by its name; its body is not read, or is a list of names"),
    (r"GET .*", "a page of bounded records, or one of them"),
)


def routes() -> Iterator[str]:
    """Yield each method and template of the service; "WS" for a WebSocket."""
    whole = FastAPI()
    app.mount(whole)
    for route in whole.router.routes:
        methods = getattr(route, "methods", None) or {"WS"}
        yield from (f"{method} {getattr(route, 'path', '')}" for method in sorted(methods))


def takes_json(route: str) -> bool:
    method, _, path = route.partition(" ")
    filled = re.sub(r"\{[^}]*\}", "1", path)
    return method in ("POST", "PUT", "PATCH") and largest_body(f"{method} {filled}") is not None


def reason(route: str) -> str | None:
    """Return why a route has no case of its own; None if it needs one."""
    return next((why for pattern, why in REASONS if re.fullmatch(pattern, route)), None)


def uncovered() -> list[str]:
    named = {route for each in CASES for route in each.routes}
    return [
        route
        for route in routes()
        if route not in named and not takes_json(route) and reason(route) is None
    ]


def unknown() -> list[str]:
    """Return the routes of cases that the service does not have."""
    existing = {*routes()}
    return sorted({route for each in CASES for route in each.routes} - existing)


def generic_cases() -> list[Case]:
    return [_generic(route) for route in routes() if takes_json(route)]


def _generic(route: str) -> Case:
    method, _, template = route.partition(" ")

    async def act(place: Place) -> None:
        path = place.filled(template)
        size = largest_body(f"{method} {path}") or 0
        for _, content in GENERIC:
            headers = {"content-type": "application/json", **place.headers(template)}
            with suppress(httpx2.HTTPError):
                await place.http.request(method, path, content=content(size), headers=headers)

    return Case("the largest bodies", (route,), act)


class Row:
    """The lags of one case, of the loop and of a second client, and the longest garbage collections
    in the service, in ms."""

    def __init__(self, name: str, route: str) -> None:
        self.name, self.route = name, route
        self.lags: list[float] = []
        self.busy: list[float] = []
        self.probes: list[float] = []
        self.collections: list[float] = []
        self.stack = ""


async def measured(cases: Sequence[Case], rounds: int) -> list[Row]:
    rows = [Row(each.name, each.routes[0]) for each in cases]
    with temporary_directory() as top, tempfile.NamedTemporaryFile() as file:
        file.truncate(SIZE)
        record = Record(file.fileno())
        os.chmod(file.name, 0o666)
        model = await asyncio.start_server(_refuse, "127.0.0.1", 0)
        variables = {
            FILE: file.name,
            "PYTHONPATH": os.getcwd(),
            "API_KEY": "key",
            "MODEL_NAME": "model",
            "MODEL_PROVIDER": "openai",
            "SBX_TEMPLATES": "*=default",
            "BASE_URL": f"http://127.0.0.1:{model.sockets[0].getsockname()[1]}/v1",
        }
        async with served(top=top, module="bench.stall_service", **variables):
            socket = top / "run" / "sbx.sock"
            transport = httpx2.AsyncHTTPTransport(uds=str(socket))
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=_CASE_S
            ) as http:
                place = await _place(http, socket)
                for number in range(rounds):
                    for row, each in zip(rows, cases, strict=True):
                        await _round(row, each, place, record)
                        print(
                            f"{number + 1} {row.lags[-1]:7.1f} {row.busy[-1]:7.1f}",
                            f"{row.collections[-1]:7.1f}",
                            f"{each.name}: {row.route}",
                            file=sys.stderr,
                        )
        model.close()
    return rows


async def _round(row: Row, case: Case, place: Place, record: Record) -> None:
    await asyncio.sleep(_REST_S)
    record.reset()
    waits: list[float] = []
    probing = asyncio.create_task(_probe(place, waits))
    try:
        with suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(_CASE_S):
                await case.act(place)
        await asyncio.sleep(_REST_S)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    for figures, seconds in zip((row.lags, row.busy, row.collections), record.worst_s, strict=True):
        figures.append(seconds * 1000)
    row.probes.append(max(waits, default=0.0))
    if row.lags[-1] == max(row.lags):
        row.stack = record.stack


async def _probe(place: Place, waits: list[float]) -> None:
    """Ask for /health again and again, as a second client does."""
    while True:
        began = time.perf_counter()
        with suppress(httpx2.HTTPError):
            await place.http.get("/health")
        waits.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(_PROBE_S)


async def _place(http: httpx2.AsyncClient, socket: Path) -> Place:
    box = await _created(http, "/v1/sandboxes", {"profile": "default"})
    opensandbox = await _created(
        http, "/opensandbox/v1/sandboxes", {"image": {"uri": "opensandbox/code-interpreter"}}
    )
    e2b = await _created(http, "/e2b/sandboxes", {"timeout": 3600})
    session = await _created(http, "/api/v1/sessions", {"user_id": "u", "agent_id": "a"})
    place = Place(http, socket, box, opensandbox, e2b, session)
    await place.run("1")
    return place


async def _created(http: httpx2.AsyncClient, path: str, body: dict[str, object]) -> str:
    reply = await http.post(path, json=body)
    data = reply.json()
    for name in ("id", "sandbox_id", "sandboxID", "session_id"):
        if name in data:
            return str(data[name])
    raise NotMeasured(f"{path}: {reply.status_code} {reply.text[:300]}")


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a model server that refuses each request."""
    with suppress(OSError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(b"HTTP/1.1 400 B\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
    writer.close()


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Words of the rows to measure.")] = None,
    rounds: Annotated[int, typer.Option(help="How often each row is measured.")] = 5,
    busy: Annotated[bool, typer.Option(help="Judge the CPU time in each delay.")] = False,
    stacks: Annotated[bool, typer.Option(help="Print the stacks of rows above the bound.")] = False,
) -> None:
    """Measure how long the largest inputs of each route stop the event loop of a service. The exit
    code is 1 if one stops it for more than 50 ms."""
    cases = [*CASES, *generic_cases()]
    if names:
        cases = [
            each for each in cases if any(name in f"{each.name} {each.routes}" for name in names)
        ]
    rows = asyncio.run(measured(cases, rounds))
    table = Table("input", "first route", "worst", "busy", "second client", "collection", "met")
    judged = {row: max(row.busy if busy else row.lags) for row in rows}
    rows.sort(key=lambda row: -judged[row])
    for row in rows:
        met = "yes" if judged[row] <= BOUND_MS else "no"
        figures = (max(each) for each in (row.lags, row.busy, row.probes, row.collections))
        table.add_row(row.name, row.route, *(f"{each:.0f} ms" for each in figures), met)
    Console(width=180).print(table)
    late = [row for row in rows if judged[row] > BOUND_MS]
    for row in late if stacks else ():
        print(f"\n{row.name}: {row.route}\n{row.stack}")
    if late:
        raise typer.Exit(1)
