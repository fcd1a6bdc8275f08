"""One HTTP connection over a real socket: who is behind it, how long a head may be, how many may be
open, and what a client gets that shuts down its writing side."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from places import short_directory
from service_process import Service, service

from sbx.api import sse
from sbx.api.server import http_protocol
from sbx.api.server.http_protocol import HEAD_MAX, HEAD_S, HttpProtocol
from tests.tiers import rows

_OK = b"HTTP/1.1 200"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it knows of the peer, and how much body there was."""
    size = 0
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    body = json.dumps({"peer": scope["extensions"].get("sbx.peer"), "size": size}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(
    sock: socket.socket, most: int | None = None, served: Any = app
) -> AsyncIterator[None]:
    config = uvicorn.Config(
        served,
        http=HttpProtocol,
        lifespan="off",
        log_config=None,
        ws="none",
        limit_concurrency=most,
    )
    server = _Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110  # uvicorn tells it no other way
        await asyncio.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


@pytest.fixture
async def path() -> AsyncIterator[Path]:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(directory / "s"))
        sock.listen()
        async with serving(sock):
            yield directory / "s"


async def reply(path: Path, *pieces: bytes) -> bytes:
    """Send these, a moment apart; everything that comes back until the end or the first reply."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                return await reader.read(1 << 16)
            return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def error_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    code: str = json.loads(body)["error"]["code"]
    return code


async def test_the_user_behind_a_unix_socket_is_known(path: Path) -> None:
    answer = await reply(path, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    reported = json.loads(answer.partition(b"\r\n\r\n")[2])["peer"]
    assert reported == {"uid": os.getuid(), "gid": os.getgid(), "pid": os.getpid()}


async def test_no_header_names_a_peer_and_tcp_has_none() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        async with serving(sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nsbx.peer: 0\r\n\r\n")
            answer = await reader.read(1 << 16)
            writer.close()
            await writer.wait_closed()
    assert b'"peer": null' in answer


async def test_a_head_that_is_too_long_is_431(path: Path) -> None:
    answer = await reply(path, b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (HEAD_MAX + 100))
    assert answer.startswith(b"HTTP/1.1 431")
    assert error_of(answer) == "headers_too_large"


async def test_a_head_that_is_too_long_in_small_pieces_is_431(path: Path) -> None:
    pieces = [b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 8000 + b"\r\n"] * 9]
    assert (await reply(path, *pieces)).startswith(b"HTTP/1.1 431")


async def test_a_long_body_in_one_piece_with_its_head_is_none_of_the_head(path: Path) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"
    for pieces in ([head + b"z" * 200_000], [head[:-1], head[-1:] + b"z" * 200_000]):
        answer = await reply(path, *pieces)
        assert answer.startswith(_OK)
        assert b'"size": 200000' in answer


async def test_the_next_request_of_a_connection_has_a_head_of_its_own(path: Path) -> None:
    one = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b"z" * 60_000
    reader, writer = await asyncio.open_unix_connection(str(path))
    for _ in range(3):
        writer.write(one)
        await writer.drain()
        assert (await reader.read(1 << 16)).startswith(_OK)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nhost x\r\n\r\n", b"\0" * 99],
)
async def test_what_is_no_http_is_400_in_our_shape(path: Path, data: bytes) -> None:
    answer = await reply(path, data)
    assert answer.startswith(b"HTTP/1.1 400")
    assert error_of(answer) == "validation_error"


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost:"])
async def test_a_head_that_does_not_come_is_408(
    path: Path, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    answer = await reply(path, begun)
    assert answer.startswith(b"HTTP/1.1 408")
    assert error_of(answer) == "request_timeout"


async def test_connections_beyond_their_number_are_503_and_then_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    monkeypatch.setattr(http_protocol, "FULL_S", 0.2)
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path := directory / "s"))
        sock.listen()
        async with serving(sock, 4):
            open_ = [await asyncio.open_unix_connection(str(path)) for _ in range(4)]
            await asyncio.sleep(0.05)
            for sent in (get, b""):
                answer = await reply(path, sent)
                assert answer.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1\r\n" in answer
                assert error_of(answer) == "too_many_connections"
            open_.append(await asyncio.open_unix_connection(str(path)))
            await asyncio.sleep(0.05)
            assert await reply(path, get) == b""
            for reader, writer in open_[:4]:
                writer.write(get)
                assert (await reader.read(1 << 16)).startswith(_OK)
            for _, writer in open_:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            await asyncio.sleep(0.05)
            assert (await reply(path, get)).startswith(_OK)


# -- how many --------------------------------------------------------------------------------------

PLACES = 8
GET = b"GET /v1/sandboxes HTTP/1.1\r\nhost: sbx\r\n"
WAIT_S = 60


@pytest.fixture(scope="module")
def serviced() -> Iterator[Service]:
    """A service with few places, which listens on TCP too."""
    few = {"SBX_CONNECTIONS_MAX": str(PLACES), "SBX_FAST_PATH": "false"}
    with short_directory() as top, service(top, "--listen", "127.0.0.1:0", env=few) as served:
        yield served


def tcp_of(served: Service) -> tuple[str, int]:
    listening = next(line for line in served.log.splitlines() if '"listening on' in line)
    port = json.loads(listening)["event"].rpartition(":")[2]
    return "127.0.0.1", int(port)


def key_of(served: Service) -> str:
    return str(json.loads((served.data / "credentials.json").read_text())["api_key"])


def connected(served: Service, family: str) -> socket.socket:
    if family == "tcp":
        return socket.create_connection(tcp_of(served), WAIT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(str(served.socket))
    return sock


def everything(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    pieces = []
    while piece := sock.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def replied(sock: socket.socket) -> int:
    """The status of one reply, which is read to its end."""
    with http.client.HTTPResponse(sock) as answer:
        answer.begin()
        answer.read()
        return answer.status


def status_of(served: Service, family: str, more: bytes = b"") -> bytes:
    key = f"authorization: Bearer {key_of(served)}\r\n".encode() if family == "tcp" else b""
    with connected(served, family) as sock:
        sock.sendall(GET + key + more + b"connection: close\r\n\r\n")
        return everything(sock)[9:12]


@pytest.mark.full_tier
def test_silent_tcp_connections_lock_nobody_out(serviced: Service) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(serviced, "tcp")) for _ in range(4 * PLACES)]
        for _ in range(3):
            assert status_of(serviced, "unix") == b"200"
            assert status_of(serviced, "tcp") == b"200"
        assert silent[0].recv(1) == b""  # the oldest is closed, without a reply


def test_a_connection_with_a_key_is_not_closed_for_silent_ones(serviced: Service) -> None:
    asked = GET + f"authorization: Bearer {key_of(serviced)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(connected(serviced, "tcp"))
        known.sendall(asked)
        assert replied(known) == 200
        for _ in range(4 * PLACES):
            stack.enter_context(connected(serviced, "tcp"))
        assert status_of(serviced, "tcp") == b"200"
        known.sendall(asked)
        assert replied(known) == 200


def test_requests_with_a_wrong_key_make_no_client_known(serviced: Service) -> None:
    wrong = GET + b"authorization: Bearer sk-sbx-wrong\r\n\r\n"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(serviced, "tcp"))
        first.sendall(wrong)
        assert replied(first) == 401
        for _ in range(PLACES):
            stack.enter_context(connected(serviced, "tcp"))
        assert first.recv(1) == b""


def test_a_connection_without_a_valid_key_any_longer_is_closed_for_others(
    serviced: Service,
) -> None:
    """It once kept its place by requests without a key, as after a revocation."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(serviced, "tcp"))
        for key, status in ((key_of(serviced), 200), ("sk-sbx-wrong", 401)):
            first.sendall(GET + f"authorization: Bearer {key}\r\n\r\n".encode())
            assert replied(first) == status
        for _ in range(PLACES):
            stack.enter_context(connected(serviced, "tcp"))
        assert first.recv(1) == b""


def test_idle_connections_with_a_key_lock_nobody_out(serviced: Service) -> None:
    asked = GET + f"authorization: Bearer {key_of(serviced)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        known = []
        for _ in range(2 * PLACES):
            known.append(stack.enter_context(connected(serviced, "tcp")))
            known[-1].sendall(asked)
            assert replied(known[-1]) == 200
        assert status_of(serviced, "tcp") == b"200"
        assert known[0].recv(1) == b""


@pytest.mark.full_tier
def test_few_descriptors_are_enough_for_many_silent_connections() -> None:
    """The limit of open files would be reached before the limit of connections."""
    few = ("prlimit", "--nofile=128:128")
    cold = {"SBX_FAST_PATH": "false"}
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(short_directory())
        served = stack.enter_context(
            service(top, "--listen", "127.0.0.1:0", env=cold, launcher=few)
        )
        for _ in range(200):
            stack.enter_context(connected(served, "tcp"))
        for _ in range(3):
            assert status_of(served, "unix") == b"200"
            assert status_of(served, "tcp") == b"200"


def test_websockets_that_were_refused_give_their_places_back(serviced: Service) -> None:
    upgrade = (
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    head = GET.replace(b"sandboxes ", b"sandboxes/x/conversations/y/terminals/z/attach ")
    for _ in range(3 * PLACES):
        with connected(serviced, "unix") as sock:
            sock.sendall(head + upgrade)
            assert everything(sock).startswith(b"HTTP/1.1 404")
    assert status_of(serviced, "unix") == b"200"


# -- clients that send no more ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def box(serviced: Service) -> str:
    with serviced.client(key_of(serviced)) as client:
        made = client.post("/v1/sandboxes", json={})
        assert made.status_code == 201, made.text
        return f"/v1/sandboxes/{made.json()['id']}"


def posted(served: Service, path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nhost: sbx\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key_of(served)}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.full_tier
@pytest.mark.parametrize(("family", "version"), [("tcp", "1.0"), ("tcp", "1.1"), ("unix", "1.1")])
def test_a_client_that_shuts_down_its_writing_side_gets_its_reply(
    serviced: Service, box: str, family: str, version: str
) -> None:
    """As `nc -N` does: the run was made, and not a byte of its reply came."""
    code = "import time; time.sleep(1.5); print('whole' * 100_000)"
    with connected(serviced, family) as sock:
        sock.sendall(posted(serviced, f"{box}/python/exec", {"code": code}, version))
        sock.shutdown(socket.SHUT_WR)
        answer = everything(sock)
    interim, _, answer = answer.rpartition(b"HTTP/1.1 200")
    assert interim == (_CONTINUE if (family, version) == ("tcp", "1.1") else b"")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["output"] == "whole" * 100_000 + "\n"


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_all_requests_before_the_end_are_answered(serviced: Service, family: str) -> None:
    asked = GET + f"authorization: Bearer {key_of(serviced)}\r\n\r\n".encode()
    with connected(serviced, family) as sock:
        sock.sendall(asked * 3 + b"GET /half HT")
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock).count(_OK) == 3


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nx"]
)
async def test_an_end_without_a_whole_request_closes_the_connection(
    path: Path, sent: bytes
) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(HEAD_S / 2):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("family", "half_closed"),
    rows(product(["tcp", "unix"], [False, True]), ci_tier=[("tcp", False), ("unix", True)]),
)
def test_a_run_ends_when_its_client_is_gone(
    serviced: Service, box: str, family: str, half_closed: bool
) -> None:
    runs = f"{box}/conversations/default/runs"
    code = "import time; print('begun', flush=True); time.sleep(600)"
    with serviced.client(key_of(serviced)) as client, connected(serviced, family) as sock:
        asked = {"kind": "python", "code": code, "attended": True}
        sock.sendall(posted(serviced, runs, asked))
        if half_closed:
            sock.shutdown(socket.SHUT_WR)
            if family == "tcp":
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 100")
        busy(client, box)
        sock.close()
        done = client.post(runs, json={"kind": "python", "code": "1 + 1"})
        assert done.json()["status"] == "ok"


def busy(client: httpx.Client, box: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while (
        client.get(f"{box}/conversations/default/contexts").json()["items"][0]["status"] != "busy"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.full_tier
@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_a_stream_ends_when_a_client_that_sends_no_more_is_gone(family: str) -> None:
    """It reads on while it is there: that it sends no more does not end it."""
    gone = asyncio.Event()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        ends = asyncio.create_task(ended(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not ends.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.wait([ends], timeout=0.05)
        gone.set()

    async def ended(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    kind = socket.AF_UNIX if family == "unix" else socket.AF_INET
    with short_directory() as directory, socket.socket(kind) as sock:
        sock.bind(str(directory / "s") if family == "unix" else ("127.0.0.1", 0))
        sock.listen()
        async with serving(sock, None, streams), asyncio.timeout(WAIT_S):
            with socket.socket(kind) as client:
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, sock.getsockname())
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
                for _ in range(30):
                    assert await loop.sock_recv(client, 1 << 10)
                assert not gone.is_set()
            await gone.wait()


async def test_a_stream_of_events_ends_soon_after_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the next heartbeat, after 15 to 50 s, showed over TCP that the client was gone. It
    counted as a follower until then: 50 reloads of a page used up the followers of an owner."""
    monkeypatch.setattr(sse, "HEARTBEAT_S", 10.0 * WAIT_S)
    gone = asyncio.Event()

    async def events() -> AsyncIterator[tuple[int, dict[str, Any]]]:
        try:
            yield 1, {"type": "first"}
            await asyncio.sleep(2 * WAIT_S)
        finally:
            gone.set()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await (await sse.stream(events()))(scope, receive, send)

    loop = asyncio.get_running_loop()
    with socket.socket() as sock, socket.socket() as client:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        async with serving(sock, None, streams):
            client.setblocking(False)
            await loop.sock_connect(client, sock.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while b"first" not in await loop.sock_recv(client, 1 << 10):
                pass
            client.close()
            async with asyncio.timeout(WAIT_S):
                await gone.wait()


# -- pipelines -------------------------------------------------------------------------------------


async def until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def pipelined(served: Any) -> AsyncIterator[socket.socket]:
    """Serve `served` over TCP; a client that has sent two requests at once."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock, socket.socket() as client:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        async with serving(sock, None, served), asyncio.timeout(WAIT_S):
            client.setblocking(False)
            await loop.sock_connect(client, sock.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
            yield client


async def test_an_interim_reply_never_comes_within_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request in the pipeline once put one into the reply to the first."""
    monkeypatch.setattr(http_protocol, "LOOK_S", 0.01)

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        looks = asyncio.create_task(until_gone(receive))  # by this uvicorn reads on, to the end
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(30):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b""})
        await looks

    answer = b""
    async with pipelined(streams) as client:
        client.shutdown(socket.SHUT_WR)
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            answer += piece
    assert answer.count(_OK) == 2
    first = answer.partition(b"0\r\n\r\n")[0]
    assert first.partition(b"\r\n\r\n")[2] == b"1\r\nx\r\n" * 30


@pytest.mark.full_tier
async def test_a_stream_ends_when_the_client_of_a_pipeline_is_gone() -> None:
    """uvicorn tells only the last request of it."""
    begun, gone = asyncio.Event(), asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await until_gone(receive)
        gone.set()

    async with pipelined(waits) as client:
        await begun.wait()
        client.close()
        await gone.wait()


async def test_a_connection_whose_client_reads_nothing_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It once stayed for as long as the client wanted."""
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.1)
    begun, gone = asyncio.Event(), asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        is_second = begun.is_set()
        begun.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (32 << 20)})
        if is_second:
            gone.set()

    async with pipelined(large):
        await gone.wait()


async def test_a_client_that_reads_slowly_gets_its_whole_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_S", 1.0)
    size = 6 << 20  # more than all buffers together

    async def large(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    read, loop = 0, asyncio.get_running_loop()
    async with pipelined(large) as client:
        began = loop.time()
        while read < 2 * size:
            piece = await loop.sock_recv(client, 1 << 20)
            assert piece, "the service ended the connection"
            read += len(piece)
            await asyncio.sleep(0.12)
        assert loop.time() - began > 1.0  # longer than one that reads nothing may take
