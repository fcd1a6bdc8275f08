"""Previews at the listeners of the console: a link to a port, and no other way to it."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from console_service import Console, console

from sbx.client import Client, RemoteSandbox

__all__ = ["console"]
pytestmark = pytest.mark.needs("namespaces")
_SERVER = """
import http.server, threading

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{self.path} {self.headers.get('Authorization')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


@pytest_asyncio.fixture(scope="module")
async def box(console: Console) -> AsyncIterator[RemoteSandbox]:
    async with Client(console.served.socket) as client, await client.create() as box:
        await box.run(_SERVER)
        yield box


async def _link(console: Console, box: RemoteSandbox, *, unix: bool = False) -> tuple[str, str]:
    """Return the host and the address of a new link to the server inside."""
    cookie = await console.login()
    path = f"/v1/sandboxes/{box.id}/port-links"
    page = console.page(cookie)
    reply = await console.send("POST", path, page, {"port": 8000, "ttl": 60}, unix=unix)
    assert reply.status == 201, reply.body
    url = urlsplit(reply.json["url"])
    return url.netloc, f"{url.path}?{url.query}"


@pytest.mark.parametrize("unix", [False, True])
async def test_a_preview_needs_no_other_address(
    console: Console, box: RemoteSandbox, unix: bool
) -> None:
    host, target = await _link(console, box, unix=unix)
    assert host == f"8000-{box.id}.localhost:{console.port}"
    reply = await console.send("GET", target, {"Host": host}, unix=unix)
    assert (reply.status, reply.body) == (200, b"/ None")
    cookie = reply.headers["set-cookie"].partition(";")[0]
    again = await console.send("GET", "/a?b=1", {"Host": host, "Cookie": cookie}, unix=unix)
    assert again.body == b"/a?b=1 None"


@pytest.mark.parametrize("unix", [False, True])
async def test_nothing_but_a_link_opens_a_port(
    console: Console, box: RemoteSandbox, unix: bool
) -> None:
    async with Client(console.served.socket) as client:
        key = (await client.make_key("operator", operator=True))["key"]
    login = await console.login()
    host = f"8000-{box.id}.localhost:{console.port}"
    for headers in (
        {},  # the peer of the socket
        {"Authorization": f"Bearer {key}"},
        {"Cookie": f"sbx_console={login}"},
        {"Cookie": f"sbx_token={key}"},
        {"Cookie": "sbx_link=wrong"},
    ):
        reply = await console.send("GET", "/", {"Host": host, **headers}, unix=unix)
        assert (reply.status, reply.code) == (401, "unauthorized"), headers


async def test_a_link_opens_no_other_port(console: Console, box: RemoteSandbox) -> None:
    _, target = await _link(console, box)
    host = f"8001-{box.id}.localhost:{console.port}"
    reply = await console.send("GET", target, {"Host": host})
    assert reply.status in (401, 403)
    # The page of the console itself is not there.
    page = await console.send("GET", f"/console/{target}", {"Host": host})
    assert page.status in (401, 403)
