"""How the memory of a service grows with each kind of call, in MiB for a thousand of them.

    ./scripts/bench growth --seconds 20

Each kind is called again and again, by a few clients, and removes its objects. After a warm-up of
caches and the heap, the slope of the memory of the service counts. The warm-up of a kind that fills
a bounded buffer lasts until the buffer is full: see `Bound`. A kind that grows is measured a second
time. The run fails if a kind still grows, by more than FLAT for a thousand calls.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import unix_connect

from bench import processes
from bench.samples import NotMeasured, figure
from bench.serving import KEY, served, service_pid, temporary_directory
from bench.torture import model
from bench.torture.growth import slope
from sbx.event_log import RETENTION_S
from sbx.runtime.processes.command_log import RECORDS_MAX

FLAT = 4.0  # MiB for a thousand calls: 4 KiB for each
_CALLS = 250  # at least: at FLAT they add 1 MiB, and the heap moves by as much with an even load
_LONGER = 5  # times --seconds, for these calls
_SAMPLE_S = 0.25
_CLIENTS = 3
_FILES = "/filesystem.Filesystem"
_TEXT = "x" * 65_536
_IMAGE = {"image": {"uri": "ubuntu:22.04"}}
_USER = {"user_id": "ann", "agent_id": "helper"}
messages = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Bound:
    """A documented limit of a buffer, and how long it takes to reach it: then as much goes as
    comes. With a limit in seconds, `pause_s` keeps the rate of each client, and so the content of
    the buffer, constant."""

    limit: str
    seconds: float = 0.0
    calls: int = 0
    pause_s: float = 0.0


_REPLAY = Bound("runs of the last 60 s, 64 MiB", seconds=RETENTION_S + 5, pause_s=0.25)
_COMMANDS = Bound(f"{RECORDS_MAX} ended commands", calls=RECORDS_MAX)
BOUNDS = {
    **dict.fromkeys(
        (
            *("approval", "chat", "create_and_run", "e2b_execute", "run", "run_large_output"),
            *("run_shell", "run_stream", "session_run"),
        ),
        _REPLAY,
    ),
    **dict.fromkeys(("command", "opensandbox_command"), _COMMANDS),
    "e2b_process": Bound("64 ended processes", calls=64),
}
_UNBOUNDED = Bound("")


@dataclass(frozen=True, slots=True)
class Growth:
    """`mib_per_1000` is the slope over the measured calls, after the buffer of `bound` is full."""

    kind: str
    calls: int
    mib_per_1000: float
    mib: float
    bound: str

    @property
    def flat(self) -> bool:
        return self.mib_per_1000 <= FLAT


class World:
    """A service with one sandbox of each surface, and the calls of each kind."""

    def __init__(self, http: httpx.AsyncClient, socket: Path, key: str) -> None:
        self.http = http
        self._key = key
        self._socket = str(socket)
        self._numbers = itertools.count()
        self._box = self._e2b = self._open = self._session = ""

    async def prepare(self) -> None:
        self._box = (await self._json("POST", "/v1/sandboxes", json={"ttl": 86_400}))["id"]
        await self._json("POST", f"{self._talk}/start")
        server = (
            "import http.server, threading\n"
            "s = http.server.ThreadingHTTPServer(('127.0.0.1', 8000), http.server.SimpleHTTPRequestHandler)\n"  # noqa: E501
            "threading.Thread(target=s.serve_forever, daemon=True).start()"
        )
        await self._json("POST", f"{self._talk}/runs", json={"kind": "python", "code": server})
        self._e2b = (await self._json("POST", "/v2/sandboxes", json={"timeout": 86_400}))[
            "sandboxID"
        ]
        self._open = (await self._json("POST", "/opensandbox/v1/sandboxes", json=_IMAGE))["id"]
        self._session = (await self._json("POST", "/api/v1/sessions", json=_USER))["session_id"]
        asking = {"agent_id": "asking", "profile": {"approvals": {"run_code": "ask"}}}
        await self._json("POST", "/api/v1/agents", json=asking)
        await self._json("POST", "/api/v1/agents", json={"agent_id": "changing", "profile": {}})
        await self._json("PUT", f"{self._talk}/uploads/kept", content=_TEXT)

    @property
    def kinds(self) -> dict[str, Callable[[int], Awaitable[object]]]:
        """Return the calls by their kind; each gets a number of its own."""
        return {
            name.removeprefix("call_"): getattr(self, name)
            for name in dir(type(self))
            if name.startswith("call_")
        }

    async def call(self, act: Callable[[int], Awaitable[object]]) -> None:
        await act(next(self._numbers))

    @property
    def _talk(self) -> str:
        return f"/v1/sandboxes/{self._box}/conversations/default"

    def _inside(self, sandbox: str, port: int = 49983) -> dict[str, str]:
        place = {"e2b-sandbox-id": sandbox, "e2b-sandbox-port": str(port)}
        return {**place, "authorization": ""}

    async def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        reply = await self.http.request(method, path, **how)
        if reply.status_code >= 400:
            raise NotMeasured(f"{method} {path}: {reply.status_code} {reply.text[:300]}")
        return reply

    async def _json(self, method: str, path: str, **how: Any) -> Any:
        return (await self._send(method, path, **how)).json()

    # -- sandboxes of each surface -----------------------------------------------------------------

    async def call_create(self, _number: int) -> None:
        box = await self._json("POST", "/v1/sandboxes", json={"ttl": 600})
        await self._send("DELETE", f"/v1/sandboxes/{box['id']}")

    async def call_create_and_run(self, _number: int) -> None:
        box = await self._json("POST", "/v1/sandboxes", json={"ttl": 600})
        await self._json("POST", f"/v1/sandboxes/{box['id']}/python/exec", json={"code": "1"})
        await self._send("DELETE", f"/v1/sandboxes/{box['id']}")

    async def call_e2b_create(self, _number: int) -> None:
        box = await self._json("POST", "/v2/sandboxes", json={"metadata": {"a": "b"}})
        await self._send("DELETE", f"/sandboxes/{box['sandboxID']}")

    async def call_e2b_watched_and_deleted(self, _number: int) -> None:
        """Delete a sandbox while a watcher has events that no client fetched."""
        box = await self._json("POST", "/v2/sandboxes", json={})
        at = self._inside(box["sandboxID"])
        watch = {"path": "/home/user", "recursive": True}
        await self._json("POST", f"{_FILES}/CreateWatcher", json=watch, headers=at)
        many = "import os, time\nfor i in range(500): os.mkdir(f'{i}' + 'n' * 200)\ntime.sleep(0.4)"
        at = self._inside(box["sandboxID"], 49999)
        await self._send("POST", "/execute", json={"code": many}, headers=at)
        await self._send("DELETE", f"/sandboxes/{box['sandboxID']}")

    async def call_opensandbox_create(self, _number: int) -> None:
        box = await self._json("POST", "/opensandbox/v1/sandboxes", json=_IMAGE)
        await self._send("DELETE", f"/opensandbox/v1/sandboxes/{box['id']}")

    async def call_opensandbox_interpreter(self, _number: int) -> None:
        new = {**_IMAGE, "entrypoint": ["code-interpreter.sh"]}
        box = await self._json("POST", "/opensandbox/v1/sandboxes", json=new)
        place = f"/opensandbox/v1/sandboxes/{box['id']}"
        await self._send("GET", f"{place}/proxy/44772/ping")
        await self._send("DELETE", place)

    async def call_session(self, number: int) -> None:
        new = {"user_id": f"user{number}", "agent_id": "helper"}
        session = (await self._json("POST", "/api/v1/sessions", json=new))["session_id"]
        await self._send("DELETE", f"/api/v1/sessions/{session}")

    # -- runs --------------------------------------------------------------------------------------

    async def call_run(self, number: int) -> None:
        code = {"kind": "python", "code": f"x = {number}; x"}
        await self._json("POST", f"{self._talk}/runs", json=code)

    async def call_run_stream(self, number: int) -> None:
        code = {"kind": "python", "code": f"print({number})", "stream": True}
        await self._send("POST", f"{self._talk}/runs", json=code)

    async def call_run_shell(self, _number: int) -> None:
        await self._json("POST", f"{self._talk}/runs", json={"kind": "shell", "code": "true"})

    async def call_run_large_output(self, _number: int) -> None:
        code = {"kind": "python", "code": "print('x' * 4_000_000)"}
        await self._json("POST", f"{self._talk}/runs", json=code)

    async def call_session_run(self, number: int) -> None:
        new = {"conversation_id": f"c{number % 3}", "code": "1"}
        await self._json("POST", f"/api/v1/sessions/{self._session}/execute", json=new)

    async def call_e2b_execute(self, _number: int) -> None:
        at = self._inside(self._e2b, 49999)
        await self._send("POST", "/execute", json={"code": "1"}, headers=at)

    async def call_e2b_process(self, _number: int) -> None:
        message = json.dumps({"process": {"cmd": "true"}}).encode()
        content = b"\0" + len(message).to_bytes(4, "big") + message
        headers = {**self._inside(self._e2b), "content-type": "application/connect+json"}
        await self._send("POST", "/process.Process/Start", content=content, headers=headers)

    async def call_e2b_watcher(self, _number: int) -> None:
        at, watch = self._inside(self._e2b), {"path": "/home/user"}
        watcher = await self._json("POST", f"{_FILES}/CreateWatcher", json=watch, headers=at)
        await self._json("POST", f"{_FILES}/GetWatcherEvents", json=watcher, headers=at)
        await self._json("POST", f"{_FILES}/RemoveWatcher", json=watcher, headers=at)

    async def call_opensandbox_command(self, _number: int) -> None:
        path = f"/opensandbox/v1/sandboxes/{self._open}/proxy/44772/command"
        await self._send("POST", path, json={"command": "true"})

    async def call_opensandbox_metadata(self, number: int) -> None:
        path = f"/opensandbox/v1/sandboxes/{self._open}/metadata"
        await self._json("PATCH", path, json={"number": str(number)})

    async def call_command(self, _number: int) -> None:
        new = await self._json("POST", f"{self._talk}/commands", json={"command": "echo done"})
        await self._json("GET", f"{self._talk}/commands/{new['id']}/wait")

    async def call_terminal(self, _number: int) -> None:
        terminal = (await self._json("POST", f"{self._talk}/terminals", json={}))["id"]
        uri = f"ws://sbx{self._talk}/terminals/{terminal}/attach"
        headers = {"authorization": f"Bearer {self._key}"}
        async with unix_connect(self._socket, uri, additional_headers=headers) as socket:
            await socket.recv()
        await self._send("DELETE", f"{self._talk}/terminals/{terminal}")

    # -- files -------------------------------------------------------------------------------------

    async def call_upload(self, number: int) -> None:
        await self._json("PUT", f"{self._talk}/uploads/f{number % 10}", content=_TEXT)

    async def call_download(self, _number: int) -> None:
        await self._send("GET", f"{self._talk}/uploads/kept")

    async def call_write_and_replace(self, number: int) -> None:
        path = f"w{number % 10}"
        await self._json("PUT", f"{self._talk}/files", params={"path": path}, content="a" * 1000)
        change = {"path": path, "old": "a", "new": "bb", "count": None}
        await self._json("POST", f"{self._talk}/replace", json=change)

    async def call_watch(self, _number: int) -> None:
        async with self.http.stream("GET", f"{self._talk}/watch") as reply:
            await anext(reply.aiter_bytes())

    async def call_port(self, _number: int) -> None:
        await self._send("GET", f"/v1/sandboxes/{self._box}/ports/8000/")

    async def call_port_link(self, _number: int) -> None:
        path = f"/v1/sandboxes/{self._box}/port-links"
        link = await self._json("POST", path, json={"port": 8000})
        await self._send("GET", link["path"], headers={"authorization": ""})

    async def call_tunnel(self, _number: int) -> None:
        uri = f"ws://sbx/v1/sandboxes/{self._box}/port-tunnels/8000"
        headers = {"authorization": f"Bearer {self._key}"}
        async with unix_connect(self._socket, uri, additional_headers=headers) as socket:
            await socket.send(b"GET / HTTP/1.0\r\n\r\n")
            await socket.recv()

    # -- agents ------------------------------------------------------------------------------------

    async def _chat(self, number: int, agent: str) -> AsyncIterator[dict[str, Any]]:
        new = {"user_id": "ann", "agent_id": agent, "conversation_id": f"chat{number}"}
        body = {**new, "message": model.message("1", f"answer{number}")}
        async with self.http.stream("POST", "/api/v1/chat", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
        await self._send("DELETE", f"/api/v1/conversations/chat{number}", params=new)

    async def call_chat(self, number: int) -> None:
        async for event in self._chat(number, "helper"):
            if event["type"] == "run_end" and event["reason"] != "done":
                raise NotMeasured(f"a chat ended: {event}")

    async def call_approval(self, number: int) -> None:
        async for event in self._chat(number, "asking"):
            if event["type"] == "tool_pending" or event.get("approval_required"):
                path = f"/api/v1/approvals/{event['tool_call_id']}"
                await self._json("POST", path, json={"approved": False})

    async def call_import(self, number: int) -> None:
        place = f"/api/v1/conversations/import{number}"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 20
        history = {"format": 1, "messages": messages}
        await self._json("POST", f"{place}/import", json=history, params=_USER)
        await self._send("DELETE", place, params=_USER)

    async def call_profile(self, number: int) -> None:
        profile = {"instructions": f"{number}" * 1000}
        await self._json("PUT", "/api/v1/agents/changing", json=profile)

    # -- access ------------------------------------------------------------------------------------

    async def call_token(self, _number: int) -> None:
        token = await self._json("POST", "/v1/admin/tokens", json={"user_id": "ann"})
        headers = {"authorization": f"Bearer {token['token']}"}
        await self._json("GET", "/v1/sandboxes", headers=headers)
        await self._send("DELETE", f"/v1/admin/tokens/{token['id']}")

    async def call_key(self, number: int) -> None:
        key = await self._json("POST", "/v1/admin/keys", json={"owner": f"owner{number}"})
        await self._json("GET", "/v1/sandboxes", headers={"authorization": f"Bearer {key['key']}"})
        await self._send("DELETE", f"/v1/admin/keys/{key['id']}")

    async def call_login(self, _number: int) -> None:
        token = await self._json("POST", "/v1/admin/tokens", json={"user_id": "ann", "ttl_s": 1})
        await self._send("POST", "/api/v1/login", json={"token": token["token"]})
        self.http.cookies.clear()

    async def call_events(self, _number: int) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        uri = "ws://sbx/api/v1/events"
        async with unix_connect(self._socket, uri, additional_headers=headers) as socket:
            await socket.recv()

    async def call_refused(self, number: int) -> None:
        """Requests without a key, for a missing sandbox, and with a body of which the end is
        missing."""
        await self.http.get(f"/v1/sandboxes/missing{number}")
        await self.http.get("/v1/sandboxes", headers={"authorization": f"Bearer wrong{number}"})
        reader, writer = await asyncio.open_unix_connection(self._socket)
        writer.write(
            b"POST /v1/sandboxes HTTP/1.1\r\nhost: sbx\r\nauthorization: Bearer %b\r\n"
            b"content-length: 100000\r\n\r\n{%b" % (self._key.encode(), b" " * 50_000)
        )
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        del reader


async def measured(
    world: World, kind: str, pid: int, seconds: float, bound: Bound = _UNBOUNDED
) -> Growth:
    """Call one kind for so long. Raise NotMeasured for a call that fails."""
    act = world.kinds[kind]
    calls = 0
    points: list[tuple[float, float]] = []
    began = time.monotonic()
    warm_up_s = max(seconds / 2, bound.seconds)
    latest = began + warm_up_s + _LONGER * seconds

    def enough() -> bool:
        now = time.monotonic()
        some = bool(points) and calls - points[0][0] >= _CALLS
        return now >= latest or (some and now >= began + warm_up_s + seconds)

    async def client() -> None:
        nonlocal calls
        while not enough():
            due = time.monotonic() + bound.pause_s
            await world.call(act)
            calls += 1
            await asyncio.sleep(due - time.monotonic())

    tasks = [asyncio.create_task(client()) for _ in range(_CLIENTS)]
    try:
        while not all(task.done() for task in tasks):
            for task in tasks:
                if task.done():
                    task.result()
            if time.monotonic() - began >= warm_up_s and calls >= bound.calls:
                points.append((float(calls), processes.pss_mib([pid])))
            await asyncio.sleep(_SAMPLE_S)
        for task in tasks:
            task.result()
        points.append((float(calls), processes.pss_mib([pid])))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    per_call = slope(points)
    if per_call is None or points[-1][0] - points[0][0] < _CALLS:
        raise NotMeasured("there were too few calls; use more --seconds")
    measured_calls = int(points[-1][0] - points[0][0])
    return Growth(
        kind, measured_calls, round(per_call * 1000, 2), round(points[-1][1], 1), bound.limit
    )


@asynccontextmanager
async def world() -> AsyncIterator[tuple[World, int]]:
    """Yield the calls of a new service, and its process."""
    async with AsyncExitStack() as stack:
        top = stack.enter_context(temporary_directory())
        url = await stack.enter_async_context(model.serving())
        settings = {
            "SBX_AGENT_BASE_URL": url,
            "SBX_AGENT_API_KEY": model.KEY,
            "SBX_AGENT_MODEL_NAME": "scripted",
        }
        await stack.enter_async_context(served(top=top, **settings))
        socket = top / "run" / "sbx.sock"
        key = KEY.removeprefix("sk-sbx-")
        headers = {"authorization": f"Bearer {KEY}", "x-api-key": f"e2b_{key}"}
        http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket)),
            base_url="http://sbx",
            headers={**headers, "open-sandbox-api-key": KEY},
            timeout=60,
        )
        made = World(await stack.enter_async_context(http), socket, KEY)
        await made.prepare()
        yield made, service_pid(top)


async def _all(kinds: list[str], seconds: float, show: Callable[[str, Growth | str], None]) -> int:
    """Measure each kind. Return how many grow, or could not be measured."""
    problems = 0
    async with world() as (made, pid):
        for kind in kinds or made.kinds:
            bound = BOUNDS.get(kind, _UNBOUNDED)
            try:
                growth = await measured(made, kind, pid, seconds, bound)
                if not growth.flat:
                    growth = await measured(made, kind, pid, seconds, bound)
            except (NotMeasured, httpx.HTTPError, OSError) as error:
                show(kind, f"not measured: {error}")
                problems += 1
                continue
            show(kind, growth)
            problems += not growth.flat
    return problems


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="Which kinds; all by default.")] = None,
    seconds: Annotated[float, typer.Option(help="For each kind.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Measure how the memory of a service grows with each kind of call. Exit code 1 if one grows by
    more than 4 MiB for a thousand calls."""
    table = Table("kind", "calls", "MiB per 1,000", "MiB", "", "full before it is measured")

    def show(kind: str, growth: Growth | str) -> None:
        messages.print(f"{kind}: {growth}", markup=False)
        if isinstance(growth, str):
            table.add_row(kind, "", "", "", growth, "")
            return
        if as_json:
            print(json.dumps({"name": "growth", "met": growth.flat, **asdict(growth)}), flush=True)
        row = (kind, f"{growth.calls}", figure(growth.mib_per_1000), figure(growth.mib))
        table.add_row(*row, "flat" if growth.flat else "GROWS", growth.bound)

    problems = asyncio.run(_all(list(kinds or ()), seconds, show))
    if not as_json:
        Console().print(table)
    if problems:
        raise typer.Exit(1)
