"""One HTTP connection over a real socket: who is behind it, and how long a head may be."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from places import short_directory

from sbx.api import connections
from sbx.api.connections import HEAD_MAX, Connection

_OK = b"HTTP/1.1 200"


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
async def serving(sock: socket.socket, most: int | None = None) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,
        http=Connection,
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
    told = json.loads(answer.partition(b"\r\n\r\n")[2])["peer"]
    assert told == {"uid": os.getuid(), "gid": os.getgid(), "pid": os.getpid()}


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
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    answer = await reply(path, begun)
    assert answer.startswith(b"HTTP/1.1 408")
    assert error_of(answer) == "request_timeout"


async def test_connections_beyond_their_number_are_503_and_then_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    monkeypatch.setattr(connections, "FULL_S", 0.2)
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path := directory / "s"))
        sock.listen()
        async with serving(sock, 2):
            open_ = [await asyncio.open_unix_connection(str(path)) for _ in range(2)]
            await asyncio.sleep(0.05)
            for sent in (get, b""):
                answer = await reply(path, sent)
                assert answer.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1\r\n" in answer
                assert error_of(answer) == "too_many_connections"
            open_ += [await asyncio.open_unix_connection(str(path)) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert await reply(path, get) == b""
            for reader, writer in open_[:2]:
                writer.write(get)
                assert (await reader.read(1 << 16)).startswith(_OK)
            for _, writer in open_:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            await asyncio.sleep(0.05)
            assert (await reply(path, get)).startswith(_OK)
