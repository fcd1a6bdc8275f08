"""The WebSocket of a terminal, by a client that is not ours: who may attach, what it may say."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory
from sessions_calls import ensure, new_user
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sbx.api.server import websocket_protocol
from sbx.api.v1 import terminals
from sbx.protocol.terminals import MESSAGE_MAX, UNKNOWN

pytestmark = pytest.mark.core
ALLOWED = "https://allowed.example"
WAIT_S = 60.0


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        async with live(directory, cors_origins=(ALLOWED,)) as served:
            yield served


class Place:
    """A sandbox of an owner, and its key."""

    def __init__(self, served: Served, owner: str, key: str, box: str) -> None:
        self.served, self.owner, self.key, self.box = served, owner, key, box

    def path(self, terminal: str = "", conversation: str = "default") -> str:
        at = f"/v1/sandboxes/{self.box}/conversations/{conversation}/terminals"
        return f"{at}/{terminal}" if terminal else at

    async def open(self, conversation: str = "default", **asked: Any) -> str:
        async with self.served.client(self.key) as client:
            made = await client.post(self.path("", conversation), json=asked)
            assert made.status_code == 201, made.text
            return str(made.json()["id"])

    def attach(
        self, terminal: str, *, key: str | None = None, conversation: str = "default", **more: Any
    ) -> Any:
        headers = {"authorization": f"Bearer {key or self.key}", **more.pop("headers", {})}
        return unix_connect(
            str(self.served.socket),
            f"ws://sbx{self.path(terminal, conversation)}/attach{more.pop('query', '')}",
            additional_headers=headers,
            max_size=None,
            **more,
        )

    async def refusal(self, terminal: str, **more: Any) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as refused:
            async with self.attach(terminal, **more):
                pass
        reported = json.loads(bytes(refused.value.response.body))
        return refused.value.response.status_code, reported["error"]["code"]


@pytest_asyncio.fixture(scope="module")
async def place(served: Served) -> AsyncIterator[Place]:
    owner = new_user()
    key = await served.key_of(owner)
    async with served.client(key) as client:
        assert (await ensure(client, owner)).status_code == 201
        reported = (await client.get(f"/v1/sandboxes/sb-session-{owner}-agent")).json()
    yield Place(served, owner, key, reported["id"])


async def until(socket: ClientConnection, text: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(WAIT_S):
        while text not in seen:
            message = await socket.recv()
            assert isinstance(message, bytes), message
            seen += message
    return seen


async def closed(socket: ClientConnection) -> int | None:
    """The code that ends it."""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await socket.recv()
    return socket.close_code


async def test_what_ran_and_how_it_ended(place: Place) -> None:
    terminal = await place.open(command="read x; echo [$x]; exit 6")
    async with place.attach(terminal, query="?rows=31&columns=97") as socket:
        await socket.send(b"hello\n")
        await until(socket, b"[hello]")
        async with asyncio.timeout(WAIT_S):
            while isinstance(message := await socket.recv(), bytes):
                pass
        assert json.loads(message) == {"type": "ended", "exit_code": 6, "reason": ""}
        assert await closed(socket) == 1000
    async with place.served.client(place.key) as client:
        reported = (await client.get(place.path(terminal))).json()
        assert (reported["rows"], reported["columns"], reported["exit_code"]) == (31, 97, 6)
        shown = (await client.get(f"{place.path(terminal)}/screen")).json()
        assert "[hello]" in shown["lines"]
        assert (await client.delete(place.path(terminal))).status_code == 204
        assert (await client.get(place.path(terminal))).status_code == 404


async def test_resize_by_a_message_and_by_a_route(place: Place) -> None:
    terminal = await place.open()
    async with place.attach(terminal) as socket:
        await socket.send(json.dumps({"type": "resize", "rows": 12, "columns": 34}))
        await socket.send(b"stty size\n")
        await until(socket, b"12 34")
        async with place.served.client(place.key) as client:
            size = {"rows": 13, "columns": 35}
            assert (await client.post(f"{place.path(terminal)}/resize", json=size)).is_success
        await socket.send(b"stty size\n")
        await until(socket, b"13 35")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("no JSON", 1003),
        ('{"type": "else"}', 1003),
        ('{"type": "resize", "rows": 0, "columns": 5}', 1003),
        ('{"type": "resize", "rows": 5, "columns": 1000000}', 1003),
        ("[" * 100_000, 1003),
        (b"x" * (MESSAGE_MAX + 1), 1009),
    ],
    ids=["no JSON", "unknown", "no rows", "too many columns", "deep", "too long"],
)
async def test_a_message_that_is_none_ends_the_connection_only(
    place: Place, message: str | bytes, code: int
) -> None:
    terminal = await place.open()
    async with place.attach(terminal) as other:
        async with place.attach(terminal) as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.send(message)
            # Who still sends when the service has gone may not hear why.
            assert await closed(socket) in ({code} if code != 1009 else {1009, 1006})
        await other.send(b"echo still'' there\n")
        await until(other, b"still there")


async def test_text_that_is_not_utf8_ends_the_connection_without_an_error_in_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """An attached client could fill the log with tracebacks."""
    terminal = await place.open()
    async with place.attach(terminal) as socket:
        await socket.send(b"\xff", text=True)
        assert await closed(socket) == 1007
    async with place.attach(terminal) as socket:
        with contextlib.suppress(ConnectionClosed):
            await socket.send([b"\xc3", b"\x28"], text=True)
        assert await closed(socket) == 1007
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


async def test_invalid_text_during_output_is_no_error_in_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The service closes the connection while it has output to send."""
    terminal = await place.open(command="while :; do echo output; done")
    for _ in range(10):  # the output of one of them comes between the close and its end
        async with place.attach(terminal) as socket:
            await until(socket, b"output")
            await socket.send(b"\xff", text=True)
            assert await closed(socket) == 1007
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


async def test_what_nobody_reads_is_said_in_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbx.runtime.processes.terminal._TYPING_S", 0.5)
    terminal = await place.open(command="stty raw -echo; echo go; sleep 100")
    async with place.attach(terminal) as socket:
        await until(socket, b"go")
        with contextlib.suppress(ConnectionClosed):
            for _ in range(20):
                await socket.send(b"x" * 65536)
        assert await closed(socket) == 4408


async def test_a_page_of_another_origin_may_not(place: Place) -> None:
    terminal = await place.open()
    for origin in ("https://evil.example", "null", "http://sbx:8080", "http://sbx.evil.example"):
        assert await place.refusal(terminal, origin=origin) == (403, "forbidden")
    for origin in (ALLOWED, "http://sbx"):
        async with place.attach(terminal, origin=origin) as socket:
            await socket.send(b"echo let'' in\n")
            await until(socket, b"let in")


async def test_who_is_not_known_or_may_not_see_it_is_refused(served: Served, place: Place) -> None:
    terminal = await place.open()
    stranger = await served.key_of(new_user())
    assert await place.refusal(terminal, key="sk-nothing") == (401, "unauthorized")
    assert await place.refusal(terminal, key=stranger) == (404, "not_found")
    assert await place.refusal("term-000000000000") == (404, "not_found")
    assert await place.refusal(terminal, query="?rows=x") == (400, "invalid_size")
    assert (await place.refusal(terminal, query="?rows=%ff"))[0] == 400


async def test_the_user_behind_the_socket_needs_no_key(served: Served) -> None:
    async with served.client() as client:
        box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        path = f"/v1/sandboxes/{box}/conversations/default/terminals"
        terminal = (await client.post(path, json={})).json()["id"]
    uri = f"ws://sbx{path}/{terminal}/attach"
    async with unix_connect(str(served.socket), uri) as socket:
        await socket.send(b"echo peer'' known\n")
        await until(socket, b"peer known")


async def test_a_token_of_another_conversation_does_not_reach_it(
    served: Served, place: Place
) -> None:
    terminal = await place.open("mine")
    bounds = {"user_id": place.owner, "ttl_s": 600.0}
    make = served.service.access.make_token
    _, mine = await make(place.owner, conversation_id="mine", **bounds)  # type: ignore[arg-type]
    _, other = await make(place.owner, conversation_id="other", **bounds)  # type: ignore[arg-type]
    _, reads = await make(place.owner, scopes=["files:read"], **bounds)  # type: ignore[arg-type]
    async with place.attach(terminal, key=mine, conversation="mine") as socket:
        await socket.send(b"echo my'' own\n")
        await until(socket, b"my own")
    for token in (other, reads):
        status, _ = await place.refusal(terminal, key=token, conversation="mine")
        assert status in (403, 404)
    async with served.client(other) as client:
        for reply in (
            await client.get(place.path("", "mine")),
            await client.get(f"{place.path(terminal, 'mine')}/screen"),
            await client.delete(place.path(terminal, "mine")),
            await client.post(place.path("", "mine"), json={}),
        ):
            assert reply.status_code == 404, reply.text


async def test_a_terminal_is_only_in_its_own_conversation(place: Place) -> None:
    terminal = await place.open("here")
    await place.open("there")
    assert await place.refusal(terminal, conversation="there") == (404, "not_found")


async def test_an_idle_terminal_keeps_no_sandbox_and_an_attached_one_does(
    served: Served, place: Place
) -> None:
    terminal = await place.open("kept")
    box = served.service.sandboxes.index.by_id(place.box)
    assert box is not None
    assert box.active is not None
    async with place.attach(terminal, conversation="kept") as socket:
        await until(socket, b"$ ")
        assert box.users > 0
        assert box.active.busy
    async with asyncio.timeout(WAIT_S):
        while box.users:  # noqa: ASYNC110  # nobody tells it
            await asyncio.sleep(0.02)
    assert not box.active.busy


async def test_a_refused_upgrade_leaves_the_service_as_it_was(served: Served) -> None:
    with pytest.raises(InvalidStatus):
        async with unix_connect(str(served.socket), "ws://sbx/v1/nothing"):
            pass
    async with served.client() as client:
        assert (await client.get("/health")).status_code == 200


async def test_what_cannot_be_asked_for_is_said_in_the_usual_shape(
    served: Served, place: Place
) -> None:
    async with served.client(place.key) as client:
        wrong: httpx.Response = await client.post(place.path(), json={"rows": 0})
        assert wrong.status_code == 422
        assert (await client.get(place.path("term-none"))).status_code == 404
        assert (await client.get(place.path("", "never-made"))).status_code == 404


def upgrade(path: str, *more: str) -> bytes:
    """The head of a request for a WebSocket."""
    lines = (
        f"GET {path} HTTP/1.1",
        "Host: sbx",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *more,
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    "head",
    [
        upgrade("/" + "a" * 9000),
        upgrade("/v1/nothing", "X-Long: " + "a" * 9000),
        upgrade("/v1/nothing", "Content-Length: 5"),
    ],
    ids=["a long path", "a long header", "a body"],
)
async def test_a_head_that_the_library_does_not_take_is_answered(
    served: Served, head: bytes
) -> None:
    """By nobody that is known: it would hold a connection for as long as it likes."""
    answer = await served.raw(head, within_s=5)
    assert answer.startswith(b"HTTP/1.1 400 ")
    reported = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert reported["error"]["code"] == "validation_error"
    assert reported["error"]["request_id"].encode() in answer.partition(b"\r\n\r\n")[0]


async def is_cut(writer: asyncio.StreamWriter) -> bool:
    """Whether nobody is there any more to whom anything could be said."""
    try:
        for _ in range(10):
            writer.write(b"\x89\x80\0\0\0\0")  # a ping
            await writer.drain()
            await asyncio.sleep(0.05)
    except ConnectionError:
        return True
    return False


async def test_who_leaves_and_reads_nothing_holds_no_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_protocol, "_CLOSE_S", 1.0)
    terminal = await place.open(command="while :; do seq 1 100000; done")
    path = f"{place.path(terminal)}/attach"
    reader, writer = await asyncio.open_unix_connection(str(place.served.socket), limit=1 << 10)
    try:
        writer.write(upgrade(path, f"Authorization: Bearer {place.key}"))
        await reader.readline()
        await asyncio.sleep(1.0)  # until all of the way to here is full
        writer.write(b"\x88\x82\0\0\0\0\x03\xe8")  # a close frame
        async with asyncio.timeout(60):
            while not await is_cut(writer):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        writer.transport.abort()
        async with place.served.client(place.key) as client:
            await client.delete(place.path(terminal))


async def test_a_key_that_was_revoked_is_attached_no_more(
    served: Served, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminals, "_CHECK_S", 0.1)
    key, text = await served.service.access.make_key(place.owner)
    terminal = await place.open()
    async with place.attach(terminal, key=text) as socket, place.attach(terminal) as other:
        await until(socket, b"$ ")
        await asyncio.sleep(0.3)
        await socket.send(b"echo $((6*7))\n")
        await until(socket, b"42")
        await served.service.access.revoke_key(key.id)
        assert await closed(socket) == UNKNOWN
        await other.send(b"echo $((7*7))\n")
        await until(other, b"49")


async def test_an_owner_holds_no_more_of_them_than_other_streams() -> None:
    """They are the connections of everybody."""
    with short_directory() as directory:
        async with live(directory, followers_per_owner=2) as served:
            async with served.client() as client:
                box = (await client.post("/v1/sandboxes", json={})).json()["id"]
            key = await served.key_of(f"uid:{os.getuid()}")
            place = Place(served, "", key, box)
            terminal = await place.open()
            async with place.attach(terminal), place.attach(await place.open()):
                assert await place.refusal(terminal) == (429, "too_many_followers")
            async with asyncio.timeout(WAIT_S):
                while not await attaches(place, terminal):  # noqa: ASYNC110  # nobody tells it
                    await asyncio.sleep(0.02)


async def attaches(place: Place, terminal: str) -> bool:
    """Whether there is room: who goes is noticed a moment later."""
    try:
        async with place.attach(terminal) as socket:
            await until(socket, b"$ ")
    except InvalidStatus as refused:
        return refused.response.status_code != 429
    return True
