"""Servers of external tools: an MCP server as a program, and an HTTP server in a thread."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn
from live_app import QuietServer
from mcp.server import MCPServer

MCP_SERVER = '''
import base64, os, sys, time
from mcp.server import MCPServer

server = MCPServer("tests")
if os.environ.get("HANGS"):
    time.sleep(600)
if path := os.environ.get("STARTS"):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
def secret(form: str) -> str:
    """Reveal the secret of this server."""
    value = os.environ["TOKEN"]
    print(value, file=sys.stderr, flush=True)
    if form == "error":
        raise ValueError(f"wrong token {value}")
    if form == "base64":
        return base64.b64encode(f"user:{value}".encode()).decode()
    return f"the token is {value} indeed; variables: {sorted(os.environ)}"

@server.tool()
def huge(megabytes: int) -> str:
    """Answer with many megabytes."""
    return "x" * (megabytes << 20)

@server.tool()
def parts(count: int) -> list[str]:
    """Answer with many parts."""
    return ["a"] * count

@server.tool()
async def hang() -> str:
    """Never answer."""
    import anyio
    await anyio.sleep(600)
    return "late"

@server.tool()
def where() -> str:
    """Return the working directory."""
    return os.getcwd()

@server.tool()
def die() -> str:
    """End the server."""
    print("I end now", file=sys.stderr, flush=True)
    os._exit(3)

server.run("stdio")
'''


def mcp_file(place: Path, **more: Any) -> str:
    """The text of a source that starts the MCP server, which is written to a file. `more` are
    fields of the source."""
    program = place / "mcp_server.py"
    program.write_text(MCP_SERVER)
    fields = {"approval": "allow", **more}
    env = fields.pop("env", {})
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if name != "secrets"]
    if "secrets" in fields:
        lines += [
            "[secrets]",
            *(f"{name} = {json.dumps(at)}" for name, at in fields["secrets"].items()),
        ]
    lines += ["[mcp]", f"command = {json.dumps([sys.executable, str(program)])}", "[mcp.env]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in env.items()]
    return "\n".join(lines)


@asynccontextmanager
async def mcp_over_http() -> AsyncIterator[tuple[str, list[str]]]:
    """The address of an MCP server over HTTP, and the headers `authorization` of its requests."""
    server = MCPServer("remote")
    tokens: list[str] = []

    @server.tool()
    def echo(text: str) -> str:
        """Return the text."""
        return text

    @server.tool()
    def wide(megabytes: int) -> str:
        """Answer with many megabytes."""
        return "x" * (megabytes << 20)

    @server.tool()
    def hidden() -> str:
        """Not chosen by the source."""
        return ""

    inner = server.streamable_http_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http":
            tokens.append(headers.get(b"authorization", b"").decode())
        await inner(scope, receive, send)

    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = QuietServer(config)
        task = asyncio.create_task(serving.serve([listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", tokens
        finally:
            serving.should_exit = True
            await task


class HttpServer:
    """Answers with what it got, as JSON. `/big` has 20 MB, `/moved` is a redirect, `/broken` has
    status 500, `/binary` no text."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def do_POST(self) -> None:
                server.answer(self)

            def do_PUT(self) -> None:
                server.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        size = int(request.headers.get("content-length", 0))
        parts = urlsplit(request.path)
        got = {
            "method": request.command,
            "path": parts.path,
            "query": parse_qs(parts.query),
            "body": request.rfile.read(size).decode(),
            "token": request.headers.get("authorization"),
            "trace": request.headers.get("x-trace"),
        }
        self.requests.append(got)
        status, content = 200, json.dumps(got).encode()
        if parts.path == "/big":
            content = b"y" * (20 << 20)
        elif parts.path == "/binary":
            content = b"\xff\xfe\x00" * 100
        elif parts.path == "/broken":
            status = 500
        elif parts.path == "/moved":
            status = 302
        request.send_response(status)
        request.send_header("content-length", str(len(content)))
        if status == 302:
            request.send_header("location", f"{self.url}/elsewhere")
        request.end_headers()
        with suppress(OSError):  # the client may close the connection
            request.wfile.write(content)

    @contextmanager
    def serving(self) -> Iterator["HttpServer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
