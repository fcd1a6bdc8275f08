"""Servers that code starts inside: HTTP, WebSockets, links, and a name of their own."""

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import made, refused
from both_sdks import Both
from live_app import live
from opensandbox.config import ConnectionConfig
from opensandbox.sandbox import Sandbox
from sdk_service import SdkService
from serving import Service
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import InvalidStatus

from sbx.api import ports
from sbx.api.surfaces import PLANE_PORTS
from sbx.client import Client
from sbx.errors import Conflict, SbxError
from tests.fake_clock import FakeClock

# Echoes each request as JSON; some paths misbehave.
SERVER = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        if self.path == "/garbage":
            self.wfile.write(b"this is no HTTP" + bytes([13, 10, 13, 10]))
            self.close_connection = True
            return
        if self.path == "/short":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
            return
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        seen = {"method": self.command, "path": self.path, "size": len(body),
                "body": body[:100].decode("latin-1"),
                "headers": {k.lower(): v for k, v in self.headers.items()}}
        data = json.dumps(seen).encode()
        self.send_response(201)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("set-cookie", "inner=1")
        for name in ("strict-transport-security", "nel", "report-to", "www-authenticate"):
            self.send_header(name, "max-age=999")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", 8000), Echo).serve_forever()
"""
SOCKETS = """
import asyncio
import websockets

async def echo(socket):
    async for message in socket:
        if message == "end":
            return
        await socket.send(message)

async def main():
    async with websockets.serve(echo, "127.0.0.1", 9000):
        await asyncio.Future()

asyncio.run(main())
"""
WAITS = "until (exec 3<>/dev/tcp/127.0.0.1/{0}) 2>/dev/null; do sleep 0.05; done"


async def started(http: httpx.AsyncClient, box: str, name: str, code: str, port: int) -> None:
    """Start a server inside, and wait until it listens."""
    place = f"/v1/sandboxes/{box}/conversations/default"
    reply = await http.put(f"{place}/files", params={"path": name}, content=code.encode())
    assert reply.status_code == 200, reply.text
    reply = await http.post(f"{place}/commands", json={"command": f"python3 {name}"})
    assert reply.status_code == 200, reply.text
    wait = {"kind": "shell", "code": WAITS.format(port), "timeout": 30}
    assert (await http.post(f"{place}/runs", json=wait)).json()["status"] == "ok"


@pytest_asyncio.fixture(scope="module")
async def http(sdk: SdkService) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {await sdk.key('porter')}"}
    async with httpx.AsyncClient(base_url=sdk.url, headers=headers, timeout=60) as http:
        yield http


@pytest_asyncio.fixture(scope="module")
async def box(http: httpx.AsyncClient) -> str:
    box: str = (await made(http))["id"]
    await started(http, box, "server.py", SERVER, 8000)
    return box


async def linked(http: httpx.AsyncClient, box: str, **body: Any) -> dict[str, Any]:
    reply = await http.post(f"/v1/sandboxes/{box}/port-links", json={"port": 8000, **body})
    assert reply.status_code == 201, reply.text
    link: dict[str, Any] = reply.json()
    return link


async def test_the_owner_reaches_a_server_inside(http: httpx.AsyncClient, box: str) -> None:
    url = f"/v1/sandboxes/{box}/ports/8000"
    reply = await http.get(f"{url}/a/b?x=1&y=%20z", headers={"x-own": "v"})
    assert reply.status_code == 201
    seen = reply.json()
    assert (seen["method"], seen["path"]) == ("GET", "/a/b?x=1&y=%20z")
    assert seen["headers"]["x-own"] == "v"
    assert seen["headers"]["host"] == "localhost:8000"
    odd = await http.get(f"{url}/a%20b/%C3%BC;x=1?q=%2F")
    assert odd.json()["path"] == "/a%20b/%C3%BC;x=1?q=%2F"
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        seen = (await http.request(method, f"{url}/", content=b"body")).json()
        assert (seen["method"], seen["body"]) == (method, "body")
    assert (await http.head(f"{url}/")).status_code == 201


async def test_a_large_body_and_one_in_chunks(http: httpx.AsyncClient, box: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 100_000

    url = f"/v1/sandboxes/{box}/ports/8000/up"
    assert (await http.post(url, content=b"x" * 5_000_000)).json()["size"] == 5_000_000
    assert (await http.post(url, content=chunks())).json()["size"] == 5_000_000


async def test_no_credential_goes_inside_and_no_cookie_comes_out(
    http: httpx.AsyncClient, box: str
) -> None:
    reply = await http.get(
        f"/v1/sandboxes/{box}/ports/8000/", headers={"cookie": "sbx_token=secret; a=b"}
    )
    seen = reply.json()["headers"]
    assert "authorization" not in seen
    assert "cookie" not in seen
    assert "set-cookie" not in reply.headers
    for name in ("strict-transport-security", "nel", "report-to", "www-authenticate"):
        assert name not in reply.headers, name
    assert reply.headers["content-security-policy"].startswith("sandbox ")
    assert "allow-same-origin" not in reply.headers["content-security-policy"]


async def test_a_closed_port_and_a_server_that_does_not_speak_http(
    http: httpx.AsyncClient, box: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request to a closed port was logged as an error of sbx, with a traceback."""
    refused(await http.get(f"/v1/sandboxes/{box}/ports/8001/"), 502, "port_not_open")
    refused(await http.get(f"/v1/sandboxes/{box}/ports/8000/garbage"), 502, "port_not_open")
    refused(await http.get(f"/v1/sandboxes/{box}/ports/0/"), 400, "validation_error")
    refused(await http.get(f"/v1/sandboxes/{box}/ports/99999/"), 400, "validation_error")
    with pytest.raises(httpx.RemoteProtocolError):
        await http.get(f"/v1/sandboxes/{box}/ports/8000/short")
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
    assert (await http.get(f"/v1/sandboxes/{box}/ports/8000/")).status_code == 201


ODD = """
import socket
HEADS = {
    b"/204": b"204 No Content", b"/304": b"304 Not Modified", b"/600": b"600 O", b"/999": b"999 O",
}
with socket.create_server(("127.0.0.1", 8002)) as server:
    while True:
        connection, _ = server.accept()
        path = (connection.recv(65536).split() + [b"", b""])[1]
        status = HEADS.get(path, b"200 OK")
        connection.sendall(b"HTTP/1.1 %b\\r\\nContent-Length: 5\\r\\n\\r\\nhello" % status)
        connection.close()
"""


async def test_an_odd_reply_is_no_error_of_the_service(
    http: httpx.AsyncClient, box: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A 304 with Content-Length, which RFC 9110 allows, and a status above 599 were logged as
    errors with a traceback, and the connection of the client was cut."""
    await started(http, box, "odd.py", ODD, 8002)
    url = f"/v1/sandboxes/{box}/ports/8002"
    for status in (204, 304):
        reply = await http.get(f"{url}/{status}")
        assert (reply.status_code, reply.content) == (status, b"")
    for status in (600, 999):
        refused(await http.get(f"{url}/{status}"), 502, "port_not_open")
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_sandbox_where_nothing_runs(http: httpx.AsyncClient) -> None:
    idle = (await made(http))["id"]
    refused(await http.get(f"/v1/sandboxes/{idle}/ports/8000/"), 502, "port_not_open")


async def test_many_requests_at_once(http: httpx.AsyncClient, box: str) -> None:
    url = f"/v1/sandboxes/{box}/ports/8000"
    replies = await asyncio.gather(*(http.get(f"{url}/{n}") for n in range(40)))
    assert [each.json()["path"] for each in replies] == [f"/{n}" for n in range(40)]


async def test_a_link_opens_one_port_of_one_sandbox(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    other = (await made(http))["id"]
    link = await linked(http, box)
    text = link["path"].partition("sbx_link=")[2]
    async with httpx.AsyncClient(base_url=sdk.url, timeout=60) as nobody:
        reply = await nobody.get(link["path"])
        assert reply.status_code == 201
        assert reply.json()["path"] == "/"
        by_header = {"sbx-link": text}
        place = f"/v1/sandboxes/{box}"
        reply = await nobody.get(f"{place}/ports/8000/deep", headers=by_header)
        assert reply.json()["path"] == "/deep"
        assert "sbx-link" not in reply.json()["headers"]
        for method, path in (
            ("GET", f"{place}/ports/8001/"),
            ("GET", f"/v1/sandboxes/{other}/ports/8000/"),
            ("GET", place),
            ("POST", f"{place}/port-links"),
            ("POST", f"{place}/conversations/default/runs"),
        ):
            reply = await nobody.request(method, path, headers=by_header, json={"port": 8000})
            assert reply.status_code == 401, path
        assert (await nobody.get(f"{place}/ports/8000/")).status_code == 401
        forged = {"sbx-link": f"{text[:-4]}AAAA"}
        assert (await nobody.get(f"{place}/ports/8000/", headers=forged)).status_code == 401


async def test_the_code_inside_does_not_get_the_link(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    """It was in `Referer` and in the address of the page, and named the owner and the user."""
    link = (await linked(http, box))["url"].partition("sbx_link=")[2]
    for part in link.split("."):
        data = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
        assert box.encode() not in data
        assert b"porter" not in data
    host = f"8000-{box}.localhost:{sdk.host.partition(':')[2]}"
    async with httpx.AsyncClient(base_url=sdk.url, headers={"host": host}, timeout=60) as browser:
        page = {"accept": "text/html,*/*;q=0.8"}
        for path, location in (
            (f"/?sbx_link={link}", "/"),
            (f"/a%20b/?x=1&sbx_link={link}&y=%2F", "/a%20b/?x=1&y=%2F"),
            (f"/a?sbx%5Flink={link}", "/a"),
            (f"{sdk.url}//other.example/?sbx_link={link}", "/.//other.example/"),
        ):
            first = await browser.get(path, headers=page)
            assert (first.status_code, first.headers["location"]) == (303, location)
            assert first.headers["cache-control"] == "no-store"
            assert first.headers["set-cookie"].startswith(f"sbx_link={link}; ")
        wrong = await browser.get(f"/?sbx_link={link[:-4]}AAAA", headers=page)
        assert wrong.status_code == 401
        # A program without cookies, a form, and a frame get the reply at this address.
        for method, headers in (
            ("GET", {}),
            ("POST", page),
            ("GET", {**page, "sec-fetch-dest": "iframe"}),
        ):
            sent = {**headers, "referer": f"http://{host}/x?sbx%5Flink={link}&a=1"}
            reply = await browser.request(method, f"/b?c=1&sbx_link={link}", headers=sent)
            assert (reply.status_code, reply.json()["path"]) == (201, "/b?c=1")
            assert reply.json()["headers"]["referer"] == f"http://{host}/x?a=1"
            assert link not in reply.text
            assert reply.headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("port", [49983, 49999, 44772, 18080])
async def test_a_link_opens_no_control_port_of_an_sdk(
    http: httpx.AsyncClient, sdk: SdkService, box: str, port: int
) -> None:
    """A link to port 49983 was an access token of E2B's daemon, which starts processes."""
    link = (await linked(http, box, port=port))["path"].partition("sbx_link=")[2]
    e2b = {"e2b-sandbox-id": box.replace("-", ""), "e2b-sandbox-port": str(port)}
    calls: list[tuple[str, str, dict[str, str]]] = [
        ("POST", "/process.Process/Start", {**e2b, "x-access-token": link}),
        ("POST", "/execute", {**e2b, "e2b-traffic-access-token": link}),
        ("GET", "/files?path=/etc/passwd", {**e2b, "x-access-token": link}),
    ]
    if port in PLANE_PORTS:
        place = f"/opensandbox/v1/sandboxes/{box}/proxy/{port}"
        calls = [(method, place + path, {"sbx-link": link}) for method, path, _ in calls]
    async with httpx.AsyncClient(base_url=sdk.url, timeout=60) as holder:
        for method, path, headers in calls:
            reply = await holder.request(method, path, headers=headers, json={})
            assert reply.status_code == 401, path
        place = f"/v1/sandboxes/{box}/ports/{port}/"
        refused(await holder.get(place, headers={"sbx-link": link}), 502, "port_not_open")


async def test_another_owner_reaches_nothing(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    headers = {"authorization": f"Bearer {await sdk.key('stranger')}"}
    async with httpx.AsyncClient(base_url=sdk.url, headers=headers, timeout=60) as stranger:
        assert (await stranger.get(f"/v1/sandboxes/{box}/ports/8000/")).status_code == 404
        reply = await stranger.post(f"/v1/sandboxes/{box}/port-links", json={"port": 8000})
        assert reply.status_code == 404


async def test_a_link_ends(tmp_path: Any) -> None:
    clock = FakeClock()
    async with live(tmp_path, clock=clock) as served, served.client() as http:
        box = (await made(http))["id"]
        await started(http, box, "server.py", SERVER, 8000)
        link = await linked(http, box, ttl=60)
        assert link["url"] is None
        async with served.client(key="sk-sbx-" + "0" * 64) as nobody:
            assert (await nobody.get(link["path"])).status_code == 201
            clock.advance(62)
            assert (await nobody.get(link["path"])).status_code == 401


async def test_a_page_has_a_name_of_its_own(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    link = await linked(http, box)
    host = f"8000-{box}.localhost"
    port = sdk.host.partition(":")[2]
    assert link["url"].startswith(f"http://{host}:{port}/?sbx_link=")
    async with httpx.AsyncClient(
        base_url=sdk.url, headers={"host": f"{host}:{port}"}, timeout=60
    ) as browser:
        assert (await browser.get("/page")).status_code == 401
        first = await browser.get(f"/?{link['url'].partition('?')[2]}")
        assert first.status_code == 201
        cookies = first.headers.get_list("set-cookie")
        assert "inner=1" in cookies
        (kept,) = [each for each in cookies if each.startswith("sbx_link=")]
        assert "HttpOnly" in kept
        assert "content-security-policy" not in first.headers
        cookie = f"{kept.partition(';')[0]}; inner=1"
        page = await browser.get("/v1/sandboxes?x=1", headers={"cookie": cookie})
        assert page.json()["path"] == "/v1/sandboxes?x=1"
        assert page.json()["headers"]["cookie"] == "inner=1"
        wrong = {"host": f"8001-{box}.localhost:{port}", "cookie": cookie}
        assert (await browser.get("/", headers=wrong)).status_code == 401


async def test_a_websocket_is_relayed(http: httpx.AsyncClient, sdk: SdkService, box: str) -> None:
    await started(http, box, "sockets.py", SOCKETS, 9000)
    link = (await linked(http, box, port=9000))["path"]
    async with connect_websocket(f"ws://{sdk.host}{link}") as socket:
        await socket.send("text")
        assert await socket.recv() == "text"
        await socket.send(bytes(range(256)))
        assert await socket.recv() == bytes(range(256))
        await socket.send("end")
        await asyncio.wait_for(socket.wait_closed(), 30)
    with pytest.raises(InvalidStatus) as raised:
        async with connect_websocket(f"ws://{sdk.host}{link.replace('9000', '9001')}"):
            pass
    assert raised.value.response.status_code == 401


async def test_a_websocket_to_a_closed_port_is_refused(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    link = (await linked(http, box, port=9777))["path"]
    with pytest.raises(InvalidStatus) as raised:
        async with connect_websocket(f"ws://{sdk.host}{link}"):
            pass
    assert raised.value.response.status_code == 502
    assert json.loads(raised.value.response.body)["error"]["code"] == "port_not_open"


# Echoes the bytes of a connection in capitals once its client has ended its direction.
PLAIN = """
import socket
with socket.create_server(("127.0.0.1", 7000)) as server:
    while True:
        connection, _ = server.accept()
        data = b""
        while piece := connection.recv(65536):
            data += piece
        connection.sendall(data.upper())
        connection.close()
"""


async def test_a_local_port_carries_any_protocol(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    await started(http, box, "plain.py", PLAIN, 7000)
    problems: list[SbxError] = []
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with Client(sdk.url, key=key) as client:
        remote = client.sandbox(box)

        async def echoed(port: int, data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            try:
                return await asyncio.wait_for(reader.read(), 30)
            finally:
                writer.close()
                await writer.wait_closed()

        async with remote.forward_port(7000, on_error=problems.append) as port:
            large = b"a\x00\xff" * 300_000
            assert await echoed(port, large) == large.upper()
            assert await echoed(port, b"") == b""
            assert problems == []
            with pytest.raises(Conflict) as raised:
                async with remote.forward_port(7000, local_port=port):
                    pass
            assert raised.value.code == "port_taken"
        async with remote.forward_port(7001, on_error=problems.append) as port:
            assert await echoed(port, b"x") == b""
        assert [error.code for error in problems] == ["port_not_open"]


async def test_a_local_port_that_is_broken_off_closes_its_connections(
    http: httpx.AsyncClient, sdk: SdkService, box: str
) -> None:
    await started(http, box, "plain.py", PLAIN, 7000)
    key = http.headers["authorization"].removeprefix("Bearer ")
    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    async with Client(sdk.url, key=key) as client:

        async def break_off() -> None:
            async with client.sandbox(box).forward_port(7000) as port:
                streams.append(await asyncio.open_connection("127.0.0.1", port))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await break_off()
        ((reader, writer),) = streams
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


# Begins a reply, and never ends it. A connection without a request is one that waits for the port.
ENDLESS = """
import socket, time
with socket.create_server(("127.0.0.1", 8000)) as server:
    while True:
        connection, _ = server.accept()
        if connection.recv(65536):
            connection.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\nbegun")
            time.sleep(1000)
"""


async def test_a_reply_is_cut_once_its_key_is_revoked(
    sdk: SdkService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_CHECK_S", 0.1)
    access = sdk.served.service.access
    key, text = await access.make_key("stopper", operator=False)
    headers = {"authorization": f"Bearer {text}"}
    async with httpx.AsyncClient(base_url=sdk.url, headers=headers, timeout=60) as http:
        box = (await made(http))["id"]
        await started(http, box, "endless.py", ENDLESS, 8000)
        async with http.stream("GET", f"/v1/sandboxes/{box}/ports/8000/") as reply:
            pieces = reply.aiter_raw()
            assert await anext(pieces) == b"begun"
            await access.revoke_key(key.id)
            with pytest.raises(httpx.RemoteProtocolError):
                await asyncio.wait_for(anext(pieces), 30)


async def test_an_endpoint_of_opensandbox_is_such_a_port(sdk: SdkService) -> None:
    where: dict[str, Any] = {"domain": f"{sdk.host}/opensandbox", "api_key": await sdk.key("os")}
    transport = ConnectionConfig(**where).new_owned_transport()
    config = ConnectionConfig(**where, transport=transport)
    box = Both(await Sandbox.create("ubuntu", connection_config=config))
    await box.files.write_file("/workspace/server.py", SERVER)
    await box.commands.run("python3 server.py >/dev/null 2>&1 &")
    await box.commands.run(WAITS.format(8000))
    endpoint = await box.get_endpoint(8000)
    async with httpx.AsyncClient(timeout=60) as http:
        reply = await http.get(f"http://{endpoint.endpoint}/x?y=1", headers=endpoint.headers)
        assert (reply.status_code, reply.json()["path"]) == (201, "/x?y=1")
        assert (await http.get(f"http://{endpoint.endpoint}/x")).status_code == 401
    await box.destroy()
    await transport.aclose()


async def test_the_jail_still_has_no_network(http: httpx.AsyncClient, box: str) -> None:
    await http.get(f"/v1/sandboxes/{box}/ports/8000/")
    code = (
        "import socket\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "try:\n    socket.create_connection(('192.0.2.1', 80), 3)\n"
        "except OSError as error:\n    print(names, type(error).__name__)"
    )
    run = {"code": code}
    reply = await http.post(f"/v1/sandboxes/{box}/conversations/default/runs", json=run)
    assert reply.json()["stdout"] == "['lo'] OSError\n"


def test_sbx_port_opens_a_local_port(service: Service) -> None:
    box = json.loads(service.quick("create", "--json").stdout)["id"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sbx", "port", box, "8000", "-L", "0"],
        env={**os.environ, "SBX_SOCKET": str(service.socket), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        host, _, port = process.stdout.readline().decode().strip().partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""  # nothing listens inside
    finally:
        process.send_signal(signal.SIGINT)
        _, problems = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"a connection was refused" in problems
    assert service.quick("port", "sandbox-unknown", "8000", "-L", "0").returncode != 0
    assert service.quick("port", box, "8000", "-L", "70000").returncode == 2


def test_sbx_port_prints_a_link(service: Service) -> None:
    box = json.loads(service.quick("create", "--json").stdout)["id"]
    shown = service.quick("port", box, "8000")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"/v1/sandboxes/{box}/ports/8000/?sbx_link=")
    assert "--listen" in shown.stderr
    body = json.loads(service.quick("port", box, "8000", "--ttl", "60", "--json").stdout)
    assert set(body) == {"path", "url", "expires_at"}
    assert service.quick("port", box, "0").returncode == 2
    assert service.quick("port", "sandbox-unknown", "8000").returncode != 0
