"""The largest legal inputs of the service, and the output of hostile code: see bench/stalls.py."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import websockets

from bench.samples import NotMeasured

_MIB = 1 << 20
BOX = "/v1/sandboxes/{sandbox_id}"
TALK = f"{BOX}/conversations/{{conversation}}"
EXECD = "/opensandbox/v1/sandboxes/{sandbox_id}/proxy/44772"
FLOOD_S = 1.5

# A server inside, on a port: it reads a request, and then sends one text again and again.
_SERVER = """
import socket, threading
def serve(port, first, again):
    server = socket.create_server(("127.0.0.1", port))
    def talk(c):
        data = b""
        while b"\\r\\n\\r\\n" not in data:
            data += c.recv(65536)
        try:
            if callable(first):
                c.sendall(first(data))
            else:
                c.sendall(first)
            while True:
                c.sendall(again)
        except OSError:
            pass
    def run():
        while True:
            threading.Thread(target=talk, args=(server.accept()[0],), daemon=True).start()
    threading.Thread(target=run, daemon=True).start()
def upgraded(data):
    import base64, hashlib
    lines = data.split(b"\\r\\n")
    key = [l for l in lines if l.lower().startswith(b"sec-websocket-key")][0].split(b": ")[1]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return (b"HTTP/1.1 101 S\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
            b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
serve(8001, b"", b"HTTP/1.1 100 C\\r\\n\\r\\n" * 4000)
serve(8002, b"HTTP/1.1 200 O\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n", b"1\\r\\na\\r\\n" * 8000)
serve(8003, upgraded, b"\\x82\\x00" * 30000)
serve(8004, b"", b"x" * 65536)
serve(8005, upgraded, (b"\\x01\\x01a" + b"\\x00\\x01a" * 1000 + b"\\x80\\x01a") * 10)
"""


class Place(NamedTuple):
    """What the cases use. `http` is a client of the service; `socket` is its path."""

    http: httpx2.AsyncClient
    socket: Path
    box: str
    opensandbox: str
    e2b: str
    session: str

    async def run(self, code: str, *, conversation: str = "default", **more: Any) -> Any:
        path = f"/v1/sandboxes/{self.box}/conversations/{conversation}/runs"
        reply = await self.http.post(path, json={"code": code, **more})
        return reply.json()

    def filled(self, template: str) -> str:
        """Return the path of a route, with the sandbox of its surface and names for the rest."""
        surface = {"/opensandbox": self.opensandbox, "/e2b": self.e2b}
        box = next(
            (id_ for prefix, id_ in surface.items() if template.startswith(prefix)), self.box
        )
        path = template.replace("{sandbox_id}", box).replace("{conversation}", "default")
        path = path.replace("tools/{name}", "tools/run_code")
        return re.sub(r"\{[^}]*\}", "x", path)

    def headers(self, template: str) -> dict[str, str]:
        return {"e2b-sandbox-id": self.e2b} if template.startswith("/e2b/") else {}


class Case(NamedTuple):
    name: str
    routes: Sequence[str]
    act: Callable[[Place], Awaitable[None]]


CASES: list[Case] = []


def case(name: str, *routes: str) -> Callable[[Callable[[Place], Awaitable[None]]], None]:
    """Add a case. `routes`: "METHOD template", or "WS template"."""
    return lambda act: CASES.append(Case(name, routes, act))


def _post(name: str, template: str, body: Callable[[], Any], method: str = "POST") -> None:
    """Add the case of one request with a JSON body."""

    async def act(place: Place) -> None:
        content = json.dumps(body()).encode()
        headers = {"content-type": "application/json", **place.headers(template)}
        await place.http.request(
            method, place.filled(template), content=content, headers=headers, params={"path": "a"}
        )

    CASES.append(Case(name, (f"{method} {template}",), act))


# -- bodies ---------------------------------------------------------------------------------------

_LINES = "x\n" * (5 * _MIB)  # 15 MiB of JSON, and the slowest text to decode
_post("code of 15 MiB", f"POST {TALK}/runs"[5:], lambda: {"code": "#" + _LINES.replace("\n", "\t")})
_post("1,000 arguments that are lists", f"{TALK}/runs", lambda: {"code": "", "args": [[]] * 4000})
_post(
    "a file of 15 MiB", f"{BOX}/filesystem/files", lambda: {"path": "a", "content": _LINES}, "PUT"
)
_post("replace 2 MiB", f"{TALK}/replace", lambda: {"path": "a", "old": "x", "new": "y" * 2_000_000})
_post("python/exec of 2 MiB", f"{BOX}/python/exec", lambda: {"code": "#" + "x" * 2_000_000})
_post("stdin of 15 MiB", f"{TALK}/runs", lambda: {"kind": "shell", "code": "cat", "stdin": _LINES})
_post("code of 15 MiB for E2B", "/e2b/49999/execute", lambda: {"code": "#" + "x\t" * (5 * _MIB)})
_post(
    "9,900 variables",
    f"{TALK}/runs",
    lambda: {"code": "", "env": {f"A{i}": "b" for i in range(4900)}},
)
_post("a message of 2 MiB", "/api/v1/chat", lambda: {
    "user_id": "u", "agent_id": "a", "conversation_id": "long", "message": "x" * 2_000_000
})  # fmt: skip


@case("49,000 values for a tool, and 15 MiB", "POST /api/v1/tools/{name}/invoke")
async def _invoke(place: Place) -> None:
    values, text = [[1, 2, "a"]] * 9_800, "#" + "x\t" * (5 * _MIB)
    for arguments in ({"code": "1", "x": values}, {"code": text}):
        body = {
            "sandbox_session_id": place.session,
            "conversation_id": "tools",
            "arguments": arguments,
        }
        await place.http.post("/api/v1/tools/run_code/invoke", json=body)


@case("input of 2 MiB", "POST /e2b/49983/process.Process/Start")
async def _start(place: Place) -> None:
    content = json.dumps({"process": {"cmd": "/bin/true", "args": ["x" * 100_000] * 10}}).encode()
    head = b"\0" + len(content).to_bytes(4, "big")
    await place.http.post(
        "/e2b/49983/process.Process/Start",
        content=head + content,
        headers={"content-type": "application/connect+json", **place.headers("/e2b/")},
    )


_post(
    "15 MiB of base64",
    "/e2b/49983/process.Process/SendInput",
    lambda: {"process": {"pid": 1}, "input": {"stdin": "AAAA" * (4 * _MIB - 1000)}},
)


@case("messages of 4 MiB", "POST /e2b/49983/process.Process/StreamInput")
async def _stream_input(place: Place) -> None:
    content = b'{"x":[' + b"[]," * 1_300_000 + b"[]]}"
    head = b"\0" + len(content).to_bytes(4, "big")
    for body in ((head + content) * 3, b"\0\0\0\0\0" * 400_000):
        await place.http.post(
            "/e2b/49983/process.Process/StreamInput",
            content=body,
            headers={"content-type": "application/connect+json", **place.headers("/e2b/")},
        )


async def _pieces(data: bytes, times: int) -> AsyncIterator[bytes]:
    for _ in range(times):
        yield data


@case("a form of tiny parts", "POST /e2b/49983/files", f"POST {BOX}/filesystem/upload")
async def _form(place: Place) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b", **place.headers("/e2b/")}
    for path in ("/e2b/49983/files", f"/v1/sandboxes/{place.box}/filesystem/upload"):
        await place.http.post(path, content=_pieces(part * 1000, 4), headers=kind)
        text = b"\r\n--a" * 16_000  # almost boundaries
        await place.http.post(path, content=_pieces(part[:-3] + text, 64), headers=kind)


@case("16 MiB that look like boundaries", f"PUT {TALK}/files", f"PUT {TALK}/archive")
async def _upload(place: Place) -> None:
    for name in ("files", "archive"):
        path = f"/v1/sandboxes/{place.box}/conversations/default/{name}?path=big"
        await place.http.put(path, content=_pieces(b"x\n" * 32_768, 256))


@case(
    "a conversation of 5,000 messages",
    "POST /api/v1/conversations/{conversation_id}/import",
    "POST /api/v1/chat",
    "GET /api/v1/conversations/{conversation_id}/export",
    "GET /api/v1/conversations/{conversation_id}/messages",
)
async def _import(place: Place) -> None:
    who = {"user_id": "u", "agent_id": "a"}
    messages = [{"role": "user", "content": "a" * 300 + str(i)} for i in range(5000)]
    content = json.dumps({"format": 1, "messages": messages})
    path = "/api/v1/conversations/many"
    await place.http.post(f"{path}/import", params=who, content=content)
    await place.http.post("/api/v1/chat", json={**who, "conversation_id": "many", "message": "b"})
    for name in ("export", "messages"):
        await place.http.get(f"{path}/{name}", params={**who, "limit": 200})


@case(
    "a history of 240,000 messages",
    "POST /api/v1/conversations/{conversation_id}/import",
    "POST /api/v1/chat",
)
async def _import_many(place: Place) -> None:
    who = {"user_id": "u", "agent_id": "a"}
    messages = [{"role": "user", "content": "a"}] * 240_000
    content = json.dumps({"format": 1, "messages": messages})
    await place.http.post("/api/v1/conversations/huge/import", params=who, content=content)
    await place.http.post("/api/v1/chat", json={**who, "conversation_id": "huge", "message": "b"})


@case(
    "metadata of 60 KiB, again and again",
    "PATCH /opensandbox/v1/sandboxes/{sandbox_id}/metadata",
    "GET /opensandbox/v1/sandboxes",
    "GET /e2b/v2/sandboxes",
    "GET /v1/sandboxes",
)
async def _metadata(place: Place) -> None:
    path = f"/opensandbox/v1/sandboxes/{place.opensandbox}/metadata"
    for turn in range(4):
        await place.http.patch(path, json={f"{turn}-{i}": "x" for i in range(4900)})
    for path in ("/opensandbox/v1/sandboxes", "/e2b/v2/sandboxes", "/v1/sandboxes"):
        await place.http.get(path)


@case("1 MiB of variables in a file", f"POST {EXECD}/command", f"POST {EXECD}/session")
async def _env_file(place: Place) -> None:
    code = "open('/workspace/.opensandbox_env','w').write('A=1\\n'*%d)"
    for lines in (262_144, 16_384):
        base = f"/opensandbox/v1/sandboxes/{place.opensandbox}/proxy/44772"
        await place.http.post(f"{base}/code", json={"code": code % lines})
        await place.http.post(f"{base}/command", json={"command": "true"})


@case("a wrong signature", "GET /e2b/49983/files", "POST /e2b/49983/files")
async def _signature(place: Place) -> None:
    for _ in range(50):
        await place.http.get("/e2b/49983/files", params={"path": "x" * 8000, "signature": "v1_x"})


# -- output of code --------------------------------------------------------------------------------


def _code(name: str, code: str, *routes: str, **more: Any) -> None:
    """Add the case of one run, whose output a native client, Bay and an SDK receive."""

    async def act(place: Place) -> None:
        await place.run(code, **more)
        if more:
            return
        bay = {"code": code, "include_code": False}
        await place.http.post(f"/v1/sandboxes/{place.box}/python/exec", json=bay)
        await place.http.post(
            "/e2b/49999/execute", json={"code": code}, headers=place.headers("/e2b/")
        )

    CASES.append(Case(name, (f"POST {TALK}/runs", *routes), act))


_BAY = (f"POST {BOX}/python/exec", "POST /e2b/49999/execute")
_code(
    "6 MiB and 3,000 images",
    "print('z'*(6<<20))\n"
    "for i in range(3000):\n"
    "    display({'image/png': 'aa', 'text/plain': 'z'*30+'q%d' % i}, raw=True)",
    *_BAY,
)
_code("15 MiB of one line", "print('z'*(15<<20))", *_BAY)
_code("15 MiB of short lines", "import sys; sys.stdout.write('x\\n'*(7<<20))", *_BAY)
_code("15 MiB of carriage returns", "import sys; sys.stdout.write('\\r\\n'*(7<<20))", *_BAY)
_code("15 MiB of overwritten lines", "import sys; sys.stdout.write('a\\rb\\n'*(7<<19))", *_BAY)
_code("15 MiB that JSON escapes", "import sys; sys.stdout.write('\\x01'*(15<<20))", *_BAY)
_code("15 MiB in UTF-8", "import sys; sys.stdout.write('中'*(5<<20))", *_BAY)
_code("40,000 outputs", "for i in range(40000): print(i, flush=True)", *_BAY)
_code(
    "5,000 displays",
    "for i in range(5000): display({'text/plain': str(i), 'application/json': [i]*9}, raw=True)",
    *_BAY,
)
_code(
    "a bundle of 300,000 values",
    "display({'application/json': [[]]*300000, 'text/plain': ''}, raw=True)",
    *_BAY,
)
_code("15 MiB by a command", "yes | head -c 15000000", f"POST {BOX}/shell/exec", kind="shell")
_code(
    "15 MiB of escapes by a command", "yes $'\\r\\x1b[1m\\u4e2d' | head -c 15000000", kind="shell"
)
_code("an error of 4 MiB", "raise ValueError('x\\n'*(2<<20))", *_BAY)


@case("15 MiB as events", f"POST {TALK}/runs", f"GET {BOX}/runs/{{run_id}}/events")
async def _streamed(place: Place) -> None:
    for code in ("print('x\\n'*(7<<20))", "for i in range(20000): print(i, flush=True)"):
        path = f"/v1/sandboxes/{place.box}/conversations/default/runs"
        async with place.http.stream("POST", path, json={"code": code, "stream": True}) as reply:
            async for _ in reply.aiter_bytes():
                pass


@case(
    "a background command of 16 MiB",
    f"POST {TALK}/commands",
    f"GET {TALK}/commands/{{command_id}}/logs",
    f"GET {TALK}/commands/{{command_id}}/follow",
    f"GET {EXECD}/command/{{command_id}}/logs",
)
async def _command_log(place: Place) -> None:
    path = f"/v1/sandboxes/{place.box}/conversations/default/commands"
    reply = await place.http.post(
        path, json={"command": "yes $'\\u4e2d\\x01' | head -c 16000000; sleep 1"}
    )
    if reply.status_code >= 300:
        raise NotMeasured(reply.text)
    name = reply.json().get("id") or reply.json()["command_id"]
    await asyncio.sleep(1)
    await place.http.get(f"{path}/{name}/logs", params={"limit": 1 << 20})
    with suppress(httpx2.HTTPError):
        async with place.http.stream("GET", f"{path}/{name}/follow") as follower:
            async for _ in follower.aiter_bytes():
                pass


@case(
    "a terminal that floods",
    f"POST {TALK}/terminals",
    f"GET {TALK}/terminals/{{terminal}}/screen",
    f"WS {TALK}/terminals/{{terminal}}/attach",
)
async def _terminal(place: Place) -> None:
    path = f"/v1/sandboxes/{place.box}/conversations/default/terminals"
    reply = await place.http.post(path, json={"rows": 200, "columns": 500})
    if reply.status_code >= 300:
        raise NotMeasured(reply.text)
    name = reply.json().get("id") or reply.json()["terminal_id"]
    async with _websocket(place, f"{path}/{name}/attach") as socket:
        await socket.send(b"yes $'\\x1b[31m\\x1b[H\\u4e2d\\t'\n")
        await _read_for(socket, FLOOD_S)
        await place.http.get(f"{path}/{name}/screen")
        for _ in range(3000):
            await socket.send(b"a")
    await place.http.delete(f"{path}/{name}")


@case(
    "10,000 files",
    f"GET {TALK}/list",
    f"GET {TALK}/find",
    f"GET {TALK}/grep",
    f"GET {BOX}/filesystem/directories",
    f"GET {TALK}/archive",
    "POST /e2b/49983/filesystem.Filesystem/ListDir",
    f"GET {EXECD}/directories/list",
    f"GET {EXECD}/files/search",
    f"GET {TALK}/files",
)
async def _files(place: Place) -> None:
    code = (
        "import os\nos.makedirs('d', exist_ok=True)\n"
        "for i in range(10000): open(f'd/{i}'+'x'*200, 'w').write('aa\\n'*10)"
    )
    await place.run(code)
    talk = f"/v1/sandboxes/{place.box}/conversations/default"
    for path in ("list", "find", "archive"):
        await place.http.get(f"{talk}/{path}", params={"path": "d", "pattern": "*"})
    await place.http.get(f"{talk}/grep", params={"path": "d", "pattern": "a", "regex": "a"})
    await place.http.get(f"/v1/sandboxes/{place.box}/filesystem/directories", params={"path": "d"})
    inner = f"/opensandbox/v1/sandboxes/{place.opensandbox}/proxy/44772"
    await place.http.post(f"{inner}/code", json={"code": code})
    for path in ("directories/list", "files/search"):
        await place.http.get(f"{inner}/{path}", params={"path": "/workspace/d"})
    body = {"code": code}
    await place.http.post("/e2b/49999/execute", json=body, headers=place.headers("/e2b/"))
    await place.http.post(
        "/e2b/49983/filesystem.Filesystem/ListDir",
        json={"path": "/workspace/d", "depth": 2},
        headers=place.headers("/e2b/"),
    )


@case(
    "a text of 15 MiB, and 60 MiB of empty lines",
    f"GET {BOX}/filesystem/files",
    f"GET {EXECD}/files/download",
)
async def _read_texts(place: Place) -> None:
    await place.run("open('text', 'w').write('x\\n' * (15 << 19))")
    await place.http.get(f"/v1/sandboxes/{place.box}/filesystem/files", params={"path": "text"})
    inner = f"/opensandbox/v1/sandboxes/{place.opensandbox}/proxy/44772"
    code = "open('lines', 'w').write('\\n' * (60 << 20))"
    await place.http.post(f"{inner}/code", json={"code": code})
    for limit in ("1", "100000000"):
        params = {"path": "/workspace/lines", "offset": "2", "limit": limit}
        await place.http.get(f"{inner}/files/download", params=params)


@case(
    "files that come and go", f"GET {TALK}/watch", "POST /e2b/49983/filesystem.Filesystem/WatchDir"
)
async def _watch(place: Place) -> None:
    code = (
        "import os, time\nend = time.time() + 2\n"
        "while time.time() < end:\n    open('w', 'w').close(); os.unlink('w')"
    )
    running = asyncio.create_task(place.run(code, conversation="watched"))
    path = f"/v1/sandboxes/{place.box}/conversations/watched/watch"
    with suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(FLOOD_S), place.http.stream("GET", path) as reply:
            async for _ in reply.aiter_bytes():
                pass
    await running


# -- servers inside, and WebSockets ----------------------------------------------------------------


async def _relayed(place: Place, port: int) -> None:
    path = f"/v1/sandboxes/{place.box}/ports/{port}/"
    with suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(FLOOD_S), place.http.stream("GET", path) as reply:
            async for _ in reply.aiter_bytes():
                pass


_PORT = f"GET {BOX}/ports/{{port}}/{{path:path}}"


@case("endless interim replies", _PORT)
async def _interim(place: Place) -> None:
    await place.run(_SERVER)
    await asyncio.gather(*(_relayed(place, 8001) for _ in range(8)))


@case("chunks of one byte", _PORT)
async def _chunks(place: Place) -> None:
    await place.run(_SERVER)
    await asyncio.gather(*(_relayed(place, 8002) for _ in range(4)))


@case("empty messages from inside", f"WS {BOX}/ports/{{port}}/{{path:path}}")
async def _empty_messages(place: Place) -> None:
    await place.run(_SERVER)
    for port in (8003, 8005):
        with suppress(TimeoutError, websockets.WebSocketException):
            async with _websocket(place, f"/v1/sandboxes/{place.box}/ports/{port}/") as socket:
                await _read_for(socket, FLOOD_S)


@case("a tunnel that floods", f"WS {BOX}/port-tunnels/{{port}}")
async def _tunnel(place: Place) -> None:
    await place.run(_SERVER)
    with suppress(TimeoutError, websockets.WebSocketException):
        async with _websocket(place, f"/v1/sandboxes/{place.box}/port-tunnels/8004") as socket:
            await socket.send(b"GET / HTTP/1.1\r\n\r\n")
            await _read_for(socket, FLOOD_S)


async def _flood(place: Place, frame: bytes) -> None:
    """Send frames as fast as the socket takes them."""
    await place.run(_SERVER)
    for path in (f"/v1/sandboxes/{place.box}/port-tunnels/8004", "/api/v1/events"):
        with suppress(websockets.WebSocketException):
            async with _websocket(place, path) as socket:
                socket.transport.write(frame * (600_000 // len(frame)))
                await asyncio.sleep(0.7)


@case("pings of a client", f"WS {BOX}/port-tunnels/{{port}}", "WS /api/v1/events")
async def _pings(place: Place) -> None:
    await _flood(place, b"\x89\x80\0\0\0\0")


@case("empty fragments of a client", f"WS {BOX}/port-tunnels/{{port}}", "WS /api/v1/events")
async def _fragments(place: Place) -> None:
    await _flood(place, b"\x02\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * 99_999)


@case("small messages of a client", f"WS {BOX}/port-tunnels/{{port}}")
async def _small(place: Place) -> None:
    await _flood(place, b"\x82\x81\0\0\0\0a")


def _websocket(place: Place, path: str) -> Any:
    return websockets.unix_connect(str(place.socket), uri=f"ws://localhost{path}", compression=None)


async def _read_for(socket: Any, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                await socket.recv()


GENERIC: Sequence[tuple[str, Callable[[int], bytes]]] = (
    (
        "all values",
        lambda size: b'{"x":[' + b"[]," * 4_900 + b'"' + b"x" * (size - 15_000) + b'"]}',
    ),
    ("too many values", lambda size: b'{"x":[' + b"[]," * (size // 3 - 10) + b"[]]}"),
    ("one text", lambda size: b'{"x":"' + b"x\\n" * (size // 3 - 10) + b'"}'),
    ("unknown fields", lambda size: b"{" + b",".join(b'"%d":1' % i for i in range(4_900)) + b"}"),
    ("base64", lambda size: b'{"x":"' + base64.b64encode(b"x" * (size // 2)) + b'"}'),
)
