"""How the tests of the surfaces call, and read what comes back."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


async def made(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v1/sandboxes", json=body)
    assert reply.status_code == 201, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def collected(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """What a collection reports; asked for again while the reaper's own goes on."""
    async with asyncio.timeout(60):
        while (  # noqa: ASYNC110  # the reaper is no event of ours
            reply := await client.post("/v1/admin/gc/run", json=body)
        ).status_code == 423:
            await asyncio.sleep(0.02)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def refused(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The details of an error; every error says its code, a sentence, and the request's id."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert error["request_id"] == reply.headers["x-request-id"]
    details: dict[str, Any] = error.get("details", {})
    return details


class Event:
    """One event of a stream."""

    def __init__(self, block: str) -> None:
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
        self.id = int(lines["id"])
        self.type = lines["event"]
        self.data = json.loads(lines["data"])


async def events(reply: httpx.Response) -> AsyncIterator[Event]:
    held = ""
    async for text in reply.aiter_text():
        held += text
        *blocks, held = held.split("\n\n")
        for block in blocks:
            if not block.startswith(":"):
                yield Event(block)
