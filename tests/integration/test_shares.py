"""What one owner holds at once, of uploads, downloads and followers, leaves room for the others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import made, refused
from live_app import Served, live
from places import short_directory

from sbx.api import middleware, sse

SIZE = 8 << 20  # more than the sockets between take
SSE = {"accept": "text/event-stream"}


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    narrow: dict[str, Any] = {
        "uploads_at_once": 4, "uploads_per_owner": 2, "downloads_per_owner": 2,
        "followers_per_owner": 2,
    }  # fmt: skip
    with short_directory() as directory:
        async with live(directory, **narrow) as served:
            yield served


@pytest_asyncio.fixture
async def alice(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client(await served.key_of("alice")) as client:
        yield client


@pytest_asyncio.fixture
async def bob(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client(await served.key_of("bob")) as client:
        yield client


async def dripping(begun: asyncio.Event) -> AsyncIterator[bytes]:
    """A body without end. `begun` is set when its first piece is on its way."""
    while True:
        yield b"x" * 1024
        begun.set()
        await asyncio.sleep(0.1)


async def put(client: httpx.AsyncClient, box: str, name: str, body: AsyncIterator[bytes]) -> int:
    url = f"/v1/sandboxes/{box}/conversations/default/files"
    return (await client.put(url, params={"path": name}, content=body)).status_code


async def once(body: bytes = b"x") -> AsyncIterator[bytes]:
    yield body


@contextlib.asynccontextmanager
async def uploading(client: httpx.AsyncClient, box: str, count: int) -> AsyncIterator[None]:
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [
        asyncio.create_task(put(client, box, f"{n}", dripping(one))) for n, one in enumerate(begun)
    ]
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.wait() for one in begun))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.full_tier
async def test_who_uploads_slowly_does_not_keep_others_from_it(
    alice: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    hers, his = (await made(alice))["id"], (await made(bob))["id"]
    async with uploading(alice, hers, 8):
        async with asyncio.timeout(60):  # the slow ones never end
            assert await put(bob, his, "a", once()) == 200


async def test_a_slot_is_for_who_may_upload(
    alice: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    hers = (await made(alice))["id"]
    async with uploading(alice, hers, 3):
        for url in ("filesystem/upload", "conversations/c/uploads/a.csv"):
            method = "POST" if url == "filesystem/upload" else "PUT"
            reply = await alice.request(
                method, f"/v1/sandboxes/nobody/{url}", files={"file": ("a", b"x")}
            )
            assert reply.status_code == 404, reply.text
        sent = {"file": ("a.csv", b"x")}
        reply = await alice.post("/api/v1/sessions/nobody/files/upload", files=sent)
        assert reply.status_code == 404  # and the slow ones never end


async def test_slow_uploads_end_when_others_wait(
    served: Served, bob: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "HURRIED_AFTER_S", 0.3)
    his = (await made(bob))["id"]
    async with contextlib.AsyncExitStack() as held:
        for owner in ("carol", "dave"):
            client = await held.enter_async_context(served.client(await served.key_of(owner)))
            await held.enter_async_context(uploading(client, (await made(client))["id"], 2))
        async with asyncio.timeout(60):
            assert await put(bob, his, "a", once()) == 200


async def test_unread_downloads_are_bounded(
    served: Served, alice: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    async def url_of(client: httpx.AsyncClient) -> str:
        box = (await made(client))["id"]
        assert await put(client, box, "big", once(b"x" * SIZE)) == 200
        return f"/v1/sandboxes/{box}/filesystem/download?path=big"

    hers, his = await url_of(alice), await url_of(bob)
    async with alice.stream("GET", hers) as one, alice.stream("GET", hers) as two:
        assert (one.status_code, two.status_code) == (200, 200)
        reply = await alice.get(hers)
        assert refused(reply, 429, "too_many_downloads")["limit"] == 2
        assert reply.headers["retry-after"] == "1"
        assert (await bob.get(his)).status_code == 200
        assert len(await one.aread()) == SIZE
    assert (await until_ok(alice, hers)).status_code == 200


async def until_ok(client: httpx.AsyncClient, url: str, **headers: str) -> httpx.Response:
    """The first reply that is no 429: who goes is noticed a moment later."""
    async with asyncio.timeout(60):
        while True:
            async with client.stream("GET", url, headers=headers) as reply:
                if reply.status_code != 429:
                    return reply
            await asyncio.sleep(0.02)


async def test_followers_are_bounded_and_forgotten_when_they_go(
    alice: httpx.AsyncClient, bob: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FIRST_S", 0.05)
    boxes = [(await made(who))["id"] for who in (alice, bob)]
    hers, his = (f"/v1/sandboxes/{box}/events?cursor=999999" for box in boxes)
    async with alice.stream("GET", hers, headers=SSE) as silent:
        async with alice.stream("GET", hers, headers=SSE):
            reply = await alice.get(hers, headers=SSE)
            assert refused(reply, 429, "too_many_followers")["limit"] == 2
            assert (await alice.get(hers)).status_code == 200
            async with bob.stream("GET", his, headers=SSE) as other:
                assert other.status_code == 200
            exec_ = f"/v1/sandboxes/{boxes[0]}/python/exec"
            reply = await alice.post(exec_, json={"code": "1"}, headers=SSE)
            assert reply.status_code == 200
        assert silent.status_code == 200
        assert (await until_ok(alice, hers, **SSE)).status_code == 200


async def test_a_stream_ends_when_its_key_is_revoked(
    served: Served, alice: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once went on for as long as its client read."""
    monkeypatch.setattr(sse, "KNOWN_S", 0.05)
    box = (await made(alice))["id"]
    key, text = await served.service.access.make_key("alice")
    async with (
        asyncio.timeout(60),
        served.client(text) as other,
        other.stream("GET", f"/v1/sandboxes/{box}/events", headers=SSE) as reply,
    ):
        lines = reply.aiter_lines()
        await anext(lines)
        await served.service.access.revoke_key(key.id)
        rest = [line async for line in lines]
    last = json.loads(next(line for line in reversed(rest) if line[:5] == "data:")[5:])
    assert (last["type"], last["status"]) == ("failure", 401)
    assert last["error"]["code"] == "unauthorized"
