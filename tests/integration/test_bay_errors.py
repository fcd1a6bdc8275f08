"""/v1: rows of the error table that need a service of their own: time, limits, who calls."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import collected, made, refused
from live_app import Served, live
from places import short_directory

from tests.fake_clock import FakeClock

ORIGIN = "https://chat.example.org"
CLOCK = FakeClock(1_800_000_000.0)


@pytest_asyncio.fixture(scope="module")
async def small() -> AsyncIterator[Served]:
    """A service of narrow limits, on a clock that stands still."""
    limits: dict[str, Any] = {"sandboxes_per_owner": 2, "cors_origins": (ORIGIN,)}
    with short_directory() as directory:
        async with live(directory, clock=CLOCK, **limits) as served:
            yield served


@pytest_asyncio.fixture
async def client(small: Served, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A caller of each test's own, so that the limits of owners start anew."""
    key = await small.key_of(request.node.name[:100], operator=True)
    async with small.client(key) as client:
        yield client
        for item in (await client.get("/v1/sandboxes")).json()["items"]:
            await client.delete(f"/v1/sandboxes/{item['id']}")


async def test_an_expired_sandbox_refuses_every_use(client: httpx.AsyncClient) -> None:
    answer = await made(client, ttl=10)
    assert answer["created_at"] == "2027-01-15T08:00:00Z"
    assert answer["expires_at"] == "2027-01-15T08:00:10Z"
    url = f"/v1/sandboxes/{answer['id']}"
    CLOCK.advance(11)
    for reply in (
        await client.post(f"{url}/python/exec", json={"code": "1"}),
        await client.post(f"{url}/shell/exec", json={"command": "true"}),
        await client.post(f"{url}/resume"),
        await client.post(f"{url}/keepalive"),
        await client.post(f"{url}/extend_ttl", json={"extend_by": 5}),
        await client.get(f"{url}/filesystem/files", params={"path": "a"}),
        await client.put(f"{url}/filesystem/files", json={"path": "a", "content": ""}),
        await client.delete(f"{url}/filesystem/files", params={"path": "a"}),
        await client.get(f"{url}/filesystem/directories"),
        await client.get(f"{url}/filesystem/download", params={"path": "a"}),
        await client.post(
            f"{url}/filesystem/upload", data={"path": "a"}, files={"file": ("a", b"x")}
        ),
    ):
        details = refused(reply, 409, "sandbox_expired")
        assert details == {"sandbox_id": answer["id"], "expires_at": answer["expires_at"]}
    assert (await client.get(url)).json()["status"] == "expired"
    listed = (await client.get("/v1/sandboxes", params={"status": "expired"})).json()
    assert [item["id"] for item in listed["items"]] == [answer["id"]]
    await collected(client)
    refused(await client.get(url), 404, "not_found")
    types = [event["type"] for event in (await client.get(f"{url}/events")).json()["items"]]
    assert "expired" in types


async def test_extend_ttl_counts_from_the_old_end(client: httpx.AsyncClient) -> None:
    answer = await made(client, ttl=100)
    CLOCK.advance(50)
    reply = await client.post(f"/v1/sandboxes/{answer['id']}/extend_ttl", json={"extend_by": 100})
    assert seconds(reply.json()["expires_at"]) - seconds(answer["expires_at"]) == 100


def seconds(answer: str) -> float:
    return datetime.fromisoformat(answer).timestamp()


async def test_an_idle_kernel_is_stopped_and_files_stay(
    small: Served, client: httpx.AsyncClient
) -> None:
    url = f"/v1/sandboxes/{(await made(client))['id']}"
    await client.post(f"{url}/python/exec", json={"code": "open('a', 'w').write('x')"})
    CLOCK.advance(small.service.settings.idle_timeout + 1)
    results = (await collected(client))["results"]
    cleaned = {one["task_name"]: one["cleaned_count"] for one in results}
    answer = (await client.get(url)).json()
    assert (answer["status"], answer["idle_expires_at"]) == ("idle", None)
    assert cleaned["idle_session"] <= 1  # the reaper may have been first
    reply = await client.get(f"{url}/filesystem/files", params={"path": "a"})
    assert reply.json() == {"content": "x"}


async def test_too_many_sandboxes_is_429(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await made(client)
    reply = await client.post("/v1/sandboxes", json={})
    details = refused(reply, 429, "too_many_sandboxes")
    assert details["limit"] == 2
    assert int(reply.headers["retry-after"]) >= 1


async def test_two_collections_at_once_do_not_mix(client: httpx.AsyncClient) -> None:
    replies = await asyncio.gather(*(client.post("/v1/admin/gc/run") for _ in range(5)))
    for reply in replies:
        if reply.status_code != 200:
            refused(reply, 423, "gc_running")


async def test_tcp_needs_a_key(small: Served) -> None:
    """Without the extension that tells the peer of a Unix socket, nobody is anybody."""
    transport = httpx.ASGITransport(app=small.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        refused(await client.get("/v1/sandboxes"), 401, "unauthorized")
        refused(await client.get("/v1/profiles"), 401, "unauthorized")
        refused(await client.post("/v1/sandboxes", json={}), 401, "unauthorized")
        assert (await client.get("/health")).status_code == 200
        key = await small.key_of("over tcp")
        reply = await client.get("/v1/sandboxes", headers={"authorization": f"Bearer {key}"})
        assert reply.json() == {"items": [], "next_cursor": None}


# -- tokens ----------------------------------------------------------------------------------------


async def test_a_token_reaches_no_sandbox_of_bay(small: Served, client: httpx.AsyncClient) -> None:
    answer = await made(client)
    owner = (await small.service.access.from_bearer(client.headers["authorization"][7:])).owner
    _, token = await small.service.access.make_token(owner, user_id="u1", ttl_s=100)
    async with small.client(token) as bound:
        assert (await bound.get("/v1/sandboxes")).json()["items"] == []
        url = f"/v1/sandboxes/{answer['id']}"
        for reply in (
            await bound.get(url),
            await bound.post(f"{url}/python/exec", json={"code": "1"}),
            await bound.get(f"{url}/filesystem/files", params={"path": "a"}),
            await bound.delete(url),
            await bound.post("/v1/sandboxes", json={}),
            await bound.post("/v1/cargos", json={}),
            await bound.get(f"/v1/cargos/{answer['cargo_id']}"),
        ):
            refused(reply, 404, "not_found")
        refused(await bound.post("/v1/admin/gc/run"), 403, "forbidden")


# -- browsers --------------------------------------------------------------------------------------

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,idempotency-key,content-type,last-event-id,"
    "conversation_id,subdir,x-conversation-id",
}


async def test_an_allowed_origin_may_ask(client: httpx.AsyncClient) -> None:
    reply = await client.options("/v1/sandboxes", headers={"origin": ORIGIN, **PREFLIGHT})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert reply.headers["access-control-allow-credentials"] == "true"
    reply = await client.get("/v1/sandboxes", headers={"origin": ORIGIN})
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()


async def test_another_origin_may_not(client: httpx.AsyncClient) -> None:
    headers = {"origin": "https://evil.example.org", **PREFLIGHT}
    reply = await client.options("/v1/sandboxes", headers=headers)
    refused(reply, 403, "forbidden")
    assert "access-control-allow-origin" not in reply.headers
    reply = await client.get("/v1/sandboxes", headers={"origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in reply.headers


async def test_a_cookie_changes_nothing_from_another_origin(small: Served) -> None:
    _, token = await small.service.access.make_token("o", user_id="u1", ttl_s=100)
    async with small.client() as client:
        headers = {"cookie": f"sbx_token={token}", "origin": "http://sbx:8080"}
        refused(await client.post("/v1/cargos", json={}, headers=headers), 403, "forbidden")
        for origin in (ORIGIN, "http://sbx"):
            reply = await client.post("/v1/cargos", json={}, headers={**headers, "origin": origin})
            refused(reply, 404, "not_found")  # known, and not its own
        assert (await client.get("/v1/sandboxes", headers=headers)).status_code == 200


async def test_a_start_past_its_deadline_is_503_and_says_when_to_come_again() -> None:
    with short_directory() as directory:
        async with (
            live(directory, start_timeout=0.001, fast_path=False) as served,
            served.client() as client,
        ):
            answer = await made(client)
            url = f"/v1/sandboxes/{answer['id']}"
            for reply in (
                await client.post(f"{url}/python/exec", json={"code": "1"}),
                await client.post(f"{url}/resume"),
            ):
                details = refused(reply, 503, "session_not_ready")
                assert details["sandbox_id"] == answer["id"]
                assert details["retry_after_ms"] == 1000
                assert reply.headers["retry-after"] == "1"
            assert (await client.get(url)).json()["status"] == "failed"
