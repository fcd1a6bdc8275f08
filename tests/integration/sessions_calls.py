"""The calls of /api/v1 that its tests share."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from live_app import Served

API = "/api/v1"
C1 = {"conversation_id": "c1"}
_numbers = itertools.count(1)


def new_user() -> str:
    """A user that no other test has."""
    return f"user-{next(_numbers)}"


def url(session_id: str, rest: str = "") -> str:
    return f"{API}/sessions/{quote(session_id, safe='')}{rest}"


async def ensure(
    client: httpx.AsyncClient, user: str, agent: str = "agent", **config: Any
) -> httpx.Response:
    body: dict[str, Any] = {"user_id": user, "agent_id": agent}
    if config:
        body["config"] = config
    return await client.post(f"{API}/sessions", json=body)


async def new_session(client: httpx.AsyncClient, **config: Any) -> str:
    """The id of a new session."""
    reply = await ensure(client, new_user(), **config)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["session_id"])


async def put(
    client: httpx.AsyncClient,
    session: str,
    name: str,
    content: bytes,
    conversation: str = "c1",
    **fields: str,
) -> httpx.Response:
    return await client.post(
        url(session, "/files/upload"),
        data={"conversation_id": conversation, **fields},
        files={"file": (name, content)},
    )


async def names(client: httpx.AsyncClient, session: str, conversation: str = "c1") -> list[str]:
    reply = await client.get(url(session, "/files"), params={"conversation_id": conversation})
    assert reply.status_code == 200, reply.text
    listed: list[str] = reply.json()["files"]
    return listed


async def run(
    client: httpx.AsyncClient, session: str, code: str, conversation: str = "c1", **more: Any
) -> httpx.Response:
    body = {"conversation_id": conversation, "code": code, **more}
    return await client.post(url(session, "/execute"), json=body)


def code_of(reply: httpx.Response) -> tuple[int, str]:
    """Status and code of an error, whose body must have the shape of all errors."""
    error = reply.json()["error"]
    assert error["request_id"] == reply.headers["x-request-id"]
    assert error["message"]
    return reply.status_code, error["code"]


async def until(done: Callable[[], Awaitable[bool]], within_s: float = 30) -> None:
    """Wait for what nobody tells."""
    async with asyncio.timeout(within_s):
        while not await done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def get(client: httpx.AsyncClient, session: str, name: str, **headers: str) -> httpx.Response:
    return await client.get(
        url(session, f"/files/{quote(name, safe='')}"), params=C1, headers=headers
    )


def multipart(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    """A form as bytes: of each part what follows `form-data`, and its content."""
    body = b""
    for disposition, content in parts:
        head = f"--B\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode()
        body += head + content + b"\r\n"
    return body + end


async def post(
    client: httpx.AsyncClient, session: str, body: bytes, **headers: str
) -> httpx.Response:
    kind = {"content-type": "multipart/form-data; boundary=B", **headers}
    return await client.post(url(session, "/files/upload"), content=body, headers=kind)


def left(served: Served) -> list[Path]:
    """What lies in any staging directory."""
    return list(served.socket.parent.rglob("staging/*"))
