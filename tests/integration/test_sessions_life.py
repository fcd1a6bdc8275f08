"""/api/v1/sessions over a real socket: made once, shown, stopped, extended, expired, deleted."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live_app import Served, live
from persistent_sandboxes import ME
from places import short_directory
from sessions_calls import API, code_of, ensure, names, new_session, new_user, put, run, until, url

from sbx.errors import Conflict
from sbx.store.events import EventRow
from tests.fake_clock import FakeClock


async def settled(client: httpx.AsyncClient, session: str) -> str:
    """The status once it is `pending` no more."""

    async def status() -> str:
        return str((await client.get(url(session))).json()["status"])

    async def is_settled() -> bool:
        return await status() != "pending"

    await until(is_settled)
    return await status()


async def test_a_session_is_made_and_then_found(client: httpx.AsyncClient) -> None:
    user = new_user()
    body = {"user_id": user, "agent_id": "a1", "business_domain_id": "bd"}
    made = await client.post(f"{API}/sessions", json=body)
    assert made.status_code == 201
    shown = made.json()
    assert shown["session_id"] == f"sb-session-{user}-a1"
    assert shown["status"] in ("pending", "running")
    assert (shown["ttl"], type(shown["ttl"]), type(shown["created_at"])) == (7200, int, int)
    assert shown["info"]["expires_at"] == pytest.approx(shown["created_at"] + 7200, abs=1)
    assert shown["info"] == {
        "policy": "default",
        "expires_at": shown["info"]["expires_at"],
        "conversations": [],
        "file_upload_config": {
            "max_file_size": 100,
            "max_file_size_unit": "MB",
            "max_file_count": 50,
            "allowed_file_types": ["csv", "xlsx", "json", "txt", "pkl", "png", "jpg", "pdf"],
        },
        "reason": None,
        "recreated_because": None,
        "restored": False,
    }
    again = await client.post(f"{API}/sessions", json=body)
    assert again.status_code == 200
    assert again.json() | {"status": 0} == shown | {"status": 0}
    assert await settled(client, shown["session_id"]) == "running"
    found = await client.get(url(shown["session_id"]))
    assert found.json() == shown | {"status": "running"}


async def test_fifty_at_once_for_one_pair_make_one_session(client: httpx.AsyncClient) -> None:
    user = new_user()
    replies = await asyncio.gather(*(ensure(client, user) for _ in range(50)))
    assert sorted(reply.status_code for reply in replies) == [200] * 49 + [201]
    assert {reply.json()["session_id"] for reply in replies} == {f"sb-session-{user}-agent"}
    assert len({reply.json()["created_at"] for reply in replies}) == 1
    listed = (await client.get(f"{API}/sessions", params={"limit": 200})).json()["items"]
    assert sum(one["session_id"] == f"sb-session-{user}-agent" for one in listed) == 1


async def test_two_pairs_whose_ids_read_the_same_never_share(client: httpx.AsyncClient) -> None:
    user = new_user()
    assert (await ensure(client, f"{user}-b", "c")).status_code == 201
    assert code_of(await ensure(client, user, "b-c")) == (409, "conflict")
    both = [ensure(client, *pair) for pair in ((f"{user}-d", "e"), (user, "d-e")) * 10]
    replies = await asyncio.gather(*both)
    assert {reply.status_code for reply in replies[::2]} in ({200, 201}, {409})
    assert {reply.status_code for reply in replies} == {200, 201, 409}


async def test_owners_with_the_same_pair_have_each_their_own(
    served: Served, client: httpx.AsyncClient
) -> None:
    user = new_user()
    keys = [await served.key_of(owner) for owner in ("alice", "bob")]
    async with served.client(keys[0]) as alice, served.client(keys[1]) as bob:
        assert (await ensure(alice, user)).status_code == 201
        session = f"sb-session-{user}-agent"
        for reply in (
            await bob.get(url(session)),
            await bob.delete(url(session)),
            await bob.post(url(session, "/stop")),
            await bob.post(url(session, "/extend_ttl"), json={"extend_by": 1}),
            await bob.get(url(session, "/files"), params={"conversation_id": "c"}),
            await put(bob, session, "a.csv", b"x"),
            await run(bob, session, "1"),
            await bob.get(url(session, "/conversations")),
        ):
            assert code_of(reply) == (404, "not_found")
        assert (await ensure(bob, user)).status_code == 201
        await put(alice, session, "a.csv", b"alice")
        await put(bob, session, "a.csv", b"bob")
        params = {"conversation_id": "c1"}
        assert (await alice.get(url(session, "/files/a.csv"), params=params)).text == "alice"
        assert (await bob.get(url(session, "/files/a.csv"), params=params)).text == "bob"
        listed = (await bob.get(f"{API}/sessions")).json()["items"]
        assert [one["session_id"] for one in listed] == [session]


@pytest.mark.parametrize("bad", ["", "x" * 129, "a/b"])
@pytest.mark.parametrize("field", ["user_id", "agent_id"])
async def test_ids_that_cannot_be_ids_are_400(
    client: httpx.AsyncClient, field: str, bad: str
) -> None:
    body = {"user_id": "u", "agent_id": "a", field: bad}
    reply = await client.post(f"{API}/sessions", json=body)
    assert code_of(reply) == (400, "validation_error")
    assert reply.json()["error"]["details"]["field"] == field


@pytest.mark.parametrize("odd", ["%2F..", "\u202egpj", "a'\"--;", "💥" * 100])
async def test_any_other_text_is_an_id(client: httpx.AsyncClient, odd: str) -> None:
    reply = await ensure(client, odd, new_user())
    assert reply.status_code == 201
    session = reply.json()["session_id"]
    assert (await put(client, session, "a.csv", b"x", odd)).status_code == 201
    assert await names(client, session, odd) == ["a.csv"]
    assert (await client.delete(url(session))).status_code == 204


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"user_id": 1, "agent_id": "a"},
        {"user_id": "u", "agent_id": "a", "config": {"ttl": "soon"}},
        {"user_id": "u", "agent_id": "a", "config": {"ttl": 0}},
        {"user_id": "u", "agent_id": "a", "config": {"file_upload_config": {"max_file_size": 0}}},
        {
            "user_id": "u",
            "agent_id": "a",
            "config": {"file_upload_config": {"max_file_size_unit": "TB"}},
        },
        {"user_id": "u", "agent_id": "a", "config": {"env": {"A": 1}}},
        [],
    ],
)
async def test_a_request_of_another_shape_is_422_for_both_readers(
    client: httpx.AsyncClient, body: object
) -> None:
    reply = await client.post(f"{API}/sessions", json=body)
    assert code_of(reply) == (422, "validation_error")
    assert all({"loc", "msg", "type"} <= set(one) for one in reply.json()["detail"])


async def test_what_the_request_says_the_id_is_must_be_the_id(client: httpx.AsyncClient) -> None:
    user = new_user()
    assert code_of(await ensure(client, user, session_id="mine")) == (400, "validation_error")
    right = await ensure(client, user, session_id=f"sb-session-{user}-agent")
    assert right.status_code == 201


async def test_limits_may_be_narrowed_and_are_kept(client: httpx.AsyncClient) -> None:
    config = {
        "max_file_size": 10,
        "max_file_size_unit": "KB",
        "max_file_count": 2,
        "allowed_file_types": ["CSV"],
    }
    reply = await ensure(client, new_user(), ttl=60, file_upload_config=config)
    assert reply.status_code == 201
    assert reply.json()["ttl"] == 60
    session = reply.json()["session_id"]
    shown = (await client.get(url(session))).json()["info"]["file_upload_config"]
    assert shown == config | {"allowed_file_types": ["csv"]}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"ttl": 7201}, "ttl"),
        ({"file_upload_config": {"max_file_size": 101}}, "max_file_size"),
    ],
)
async def test_limits_may_not_be_widened(
    client: httpx.AsyncClient, config: dict[str, Any], field: str
) -> None:
    user = new_user()
    for _ in range(2):  # without a session, and with one
        reply = await ensure(client, user, **config)
        assert code_of(reply) == (400, "limit_widened")
        assert reply.json()["error"]["details"]["field"] == field
        assert reply.json()["error"]["details"]["limit"]
        await ensure(client, user)


@pytest.mark.needs("memory")  # which strict demands as a hard wall
async def test_policy_and_environment_can_be_chosen(client: httpx.AsyncClient) -> None:
    session = await new_session(client, policy="strict", env={"GREETING": "hello"})
    assert (await client.get(url(session))).json()["info"]["policy"] == "strict"
    reply = await run(client, session, "import os; os.environ['GREETING']")
    assert reply.json()["result"] == "'hello'", reply.text
    assert (await ensure(client, new_user(), policy="nonesuch")).status_code in (400, 404)


async def test_a_stopped_session_keeps_its_files_and_is_made_usable_again(
    client: httpx.AsyncClient,
) -> None:
    user = new_user()
    session = (await ensure(client, user)).json()["session_id"]
    await put(client, session, "a.csv", b"kept")
    assert (await run(client, session, "x = 1; open('mine', 'w').write('m')")).json()["error"] is (
        None
    )
    stopped = await client.post(url(session, "/stop"))
    assert (stopped.status_code, stopped.json()["status"]) == (200, "stopped")
    assert (await client.post(url(session, "/stop"))).json()["status"] == "stopped"
    again = await ensure(client, user)
    assert (again.status_code, again.json()["status"]) == (200, "running")
    assert await names(client, session) == ["a.csv"]
    after = (await run(client, session, "open('mine').read(), 'x' in globals()")).json()
    assert after["result"] == "('m', False)"


async def test_a_stopped_session_resumes_with_the_next_run(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    await run(client, session, "x = 1")
    await client.post(url(session, "/stop"))
    assert (await run(client, session, "2 + 3")).json()["result"] == "5"
    assert (await client.get(url(session))).json()["status"] == "running"


async def test_a_deleted_session_is_gone_with_its_files(
    served: Served, client: httpx.AsyncClient
) -> None:
    user = new_user()
    session = (await ensure(client, user)).json()["session_id"]
    await put(client, session, "gone.csv", b"x")
    await run(client, session, "1")
    assert (await client.delete(url(session))).status_code == 204
    assert code_of(await client.delete(url(session))) == (404, "not_found")
    assert code_of(await client.get(url(session))) == (404, "not_found")
    assert code_of(await run(client, session, "1")) == (404, "not_found")
    assert code_of(await client.delete(url("sb-session-never-was"))) == (404, "not_found")
    left = await asyncio.to_thread(lambda: list(served.socket.parent.rglob("gone.csv")))
    assert left == []
    again = await ensure(client, user)
    assert again.status_code == 201
    assert code_of(await client.get(url(session, "/files"), params={"conversation_id": "c1"})) == (
        404,
        "not_found",
    )


async def test_a_sandbox_of_v1_is_no_session(client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/sandboxes", json={})).json()["id"]
    assert code_of(await client.get(url(made))) == (404, "not_found")
    assert code_of(await client.delete(url(made))) == (404, "not_found")
    assert code_of(await run(client, made, "1")) == (404, "not_found")
    listed = (await client.get(f"{API}/sessions", params={"limit": 200})).json()["items"]
    assert made not in [one["session_id"] for one in listed]
    await client.delete(f"/v1/sandboxes/{made}")


async def test_sessions_are_listed_in_pages_and_by_status(served: Served) -> None:
    async with served.client(await served.key_of("lister")) as client:
        made = [await new_session(client) for _ in range(5)]
        for session in made[:2]:
            await client.post(url(session, "/stop"))
        for session in made[2:]:
            assert await settled(client, session) == "running"
        found = []
        cursor: str | None = None
        while True:
            params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
            page = (await client.get(f"{API}/sessions", params=params)).json()
            found += [one["session_id"] for one in page["items"]]
            assert len(page["items"]) <= 2
            if (cursor := page["next_cursor"]) is None:
                break
        assert sorted(found) == sorted(made)
        for status, expected in (("stopped", made[:2]), ("running", made[2:]), ("error", [])):
            page = (await client.get(f"{API}/sessions", params={"status": status})).json()
            assert sorted(one["session_id"] for one in page["items"]) == sorted(expected)
            assert page["next_cursor"] is None
        assert (await client.get(f"{API}/sessions", params={"status": "odd"})).status_code == 422
        assert (await client.get(f"{API}/sessions", params={"limit": 0})).status_code == 422


@pytest_asyncio.fixture
async def timed() -> AsyncIterator[tuple[Served, httpx.AsyncClient, FakeClock]]:
    clock = FakeClock()
    with short_directory() as directory:
        settings: dict[str, Any] = {"files_grace": 1000, "gc_interval": 60}
        async with live(directory, clock=clock, **settings) as served, served.client() as client:
            yield served, client, clock


OWNER = f"uid:{os.geteuid()}"  # of a caller over the socket
Timed = tuple[Served, httpx.AsyncClient, FakeClock]


async def pass_time(timed: Timed, seconds: float) -> None:
    """Move the clock, and let the service do what is due."""
    served, _, clock = timed
    clock.advance(seconds)
    await served.service.reaper.round()
    with suppress(Conflict):  # the reaper's own collection is at work
        await served.service.reaper.collect()


async def events(timed: Timed, session: str) -> list[EventRow]:
    served, _, _ = timed
    page = await served.service.events.page(replace(ME, owner=OWNER), session)
    return list(page.items)


async def test_an_expired_session_is_an_error_until_it_is_made_anew(timed: Timed) -> None:
    _, client, clock = timed
    user = new_user()
    session = (await ensure(client, user, ttl=100)).json()["session_id"]
    await put(client, session, "old.csv", b"x")
    later = await client.post(url(session, "/extend_ttl"), json={"extend_by": 50})
    assert (later.status_code, later.json()["ttl"]) == (200, 100)
    assert later.json()["info"]["expires_at"] == clock.now() + 150
    for bad in (0, -1):
        reply = await client.post(url(session, "/extend_ttl"), json={"extend_by": bad})
        assert code_of(reply) == (400, "validation_error")
    clock.advance(151)
    shown = (await client.get(url(session))).json()
    assert (shown["status"], shown["info"]["reason"]) == (
        "error",
        "expired: its time to live is over",
    )
    params = {"conversation_id": "c1"}
    for reply in (
        await run(client, session, "1"),
        await put(client, session, "a.csv", b"x"),
        await client.get(url(session, "/conversations/c1/prompt")),
        await client.post(url(session, "/extend_ttl"), json={"extend_by": 50}),
    ):
        assert code_of(reply) == (409, "sandbox_expired")
    for path in ("/files", "/files/old.csv"):  # its uploads are kept for a while
        assert (await client.get(url(session, path), params=params)).status_code == 200
    await pass_time(timed, 1000)
    anew = await ensure(client, user)
    assert anew.status_code == 201
    info = anew.json()["info"]
    assert (info["restored"], info["conversations"]) == (False, [])
    assert (await ensure(client, user)).status_code == 200
    reply = await client.get(url(session, "/files"), params=params)
    assert code_of(reply) == (404, "not_found")
    assert (await client.delete(url(session))).status_code == 204


async def test_a_session_is_restored_with_its_files_and_another_policy(timed: Timed) -> None:
    served, client, clock = timed
    user = new_user()
    session = (await ensure(client, user, ttl=100)).json()["session_id"]
    await put(client, session, "old.csv", b"kept")
    await run(client, session, "x = 1; open('made.txt', 'w').write('made')")
    await pass_time(timed, 101)
    await pass_time(timed, 998)  # the last second of its grace period
    assert (await client.get(url(session))).json()["status"] == "error"
    anew = await ensure(client, user, ttl=200, policy="strict")
    assert anew.status_code == 201
    shown = anew.json()
    assert (shown["status"] in ("pending", "running"), shown["ttl"]) == (True, 200)
    info = shown["info"]
    assert (info["recreated_because"], info["restored"], info["policy"]) == (
        *("expired", True),
        "strict",
    )
    assert (info["conversations"], info["expires_at"]) == (["c1"], clock.now() + 200)
    assert await names(client, session) == ["old.csv"]
    assert (await ensure(client, user)).status_code == 200
    again = (await run(client, session, "open('made.txt').read(), 'x' in globals()")).json()
    assert (again["result"], again["state_lost"]) == ("('made', False)", True)
    row = await served.service.store.row("SELECT ttl_s, restored FROM sandboxes")
    assert row is not None
    assert tuple(row) == (200, 1)
    assert (await client.delete(url(session))).status_code == 204
    left = await asyncio.to_thread(lambda: list(served.socket.parent.rglob("old.csv")))
    assert left == []  # a deletion has no grace period


async def test_a_conversation_that_was_deleted_is_not_restored(timed: Timed) -> None:
    _, client, _ = timed
    user = new_user()
    session = (await ensure(client, user, ttl=100)).json()["session_id"]
    for conversation in ("c1", "c2"):
        await put(client, session, "a.csv", b"x", conversation)
    assert (await client.delete(url(session, "/conversations/c1"))).status_code == 204
    await pass_time(timed, 150)
    restored = (await ensure(client, user)).json()["info"]
    assert (restored["restored"], restored["conversations"]) == (True, ["c2"])


async def test_two_days_of_use_and_of_none() -> None:
    """A message every half an hour keeps a session. Without one it is announced, expires, and is
    restored with its files a day later."""
    clock = FakeClock()
    with short_directory() as directory:
        async with live(directory, clock=clock) as served, served.client() as client:
            timed = served, client, clock
            busy, quiet = [await new_session(client) for _ in range(2)]
            for session in (busy, quiet):
                await put(client, session, "data.csv", b"kept")
            for half_hour in range(96):
                if half_hour % 8 == 0:
                    assert (await run(client, busy, f"{half_hour} + 1")).json()["status"] == "ok"
                else:
                    assert await names(client, busy) == ["data.csv"]
                for _ in range(6):
                    await pass_time(timed, 300)
            assert (await client.get(url(busy))).json()["status"] == "running"
            ends = {"expiring", "expired"}
            assert ends.isdisjoint(event.type for event in await events(timed, busy))
            assert (await client.get(url(quiet))).json()["status"] == "error"
            end = [event for event in await events(timed, quiet) if event.type in ends]
            assert [event.type for event in end] == ["expiring", "expired"]
            assert end[0].details["expires_at"] - end[0].at == 600
            user = quiet.removeprefix("sb-session-").removesuffix("-agent")
            restored = await ensure(client, user)
            assert (restored.status_code, restored.json()["info"]["restored"]) == (201, True)
            assert await names(client, quiet) == ["data.csv"]


async def test_a_session_does_not_expire_under_a_run_or_a_follower(timed: Timed) -> None:
    served, client, _ = timed
    session = (await ensure(client, new_user(), ttl=100)).json()["session_id"]
    wait = "import os, time\nwhile not os.path.exists('uploads/temparea/go.csv'): time.sleep(0.01)"
    running = asyncio.create_task(run(client, session, wait))
    caller = replace(ME, owner=OWNER)

    async def is_busy() -> bool:
        sandbox = served.service.sandboxes.index.find(caller, session)
        return sandbox is not None and sandbox.active is not None and sandbox.active.busy

    await until(is_busy)
    for _ in range(5):
        await pass_time(timed, 99)
    assert (await put(client, session, "go.csv", b"x")).status_code == 201
    assert (await running).json()["status"] == "ok"
    async with aclosing(served.service.events.follow(caller, session)) as following:
        assert (await anext(following)).type == "created"
        for _ in range(5):
            await pass_time(timed, 99)
        assert (await client.get(url(session))).json()["status"] == "running"
    await pass_time(timed, 101)
    assert (await client.get(url(session))).json()["status"] == "error"
    types = [event.type for event in await events(timed, session)]
    assert types[-2:] == ["expiring", "expired"]


async def test_past_the_limit_of_sandboxes_is_429_and_says_when_to_ask_again() -> None:
    with short_directory() as directory:
        async with live(directory, sandboxes_per_owner=1) as served, served.client() as client:
            user = new_user()
            assert (await ensure(client, user)).status_code == 201
            assert (await ensure(client, user)).status_code == 200
            full = await ensure(client, new_user())
            assert code_of(full) == (429, "too_many_sandboxes")
            assert int(full.headers["retry-after"]) > 0
            # Ends while what its kernels are forked from is still on its way up.


async def test_what_is_done_to_a_session_is_in_the_audit_log() -> None:
    with short_directory() as directory:
        async with live(directory) as served, served.client() as client:
            session = await new_session(client)
            await put(client, session, "a.csv", b"x")
            await client.delete(url(session, "/files/a.csv"), params={"conversation_id": "c1"})
            await client.post(url(session, "/stop"))
            await client.post(url(session, "/extend_ttl"), json={"extend_by": 5})
            await client.delete(url(session, "/conversations/c1"))
            await client.delete(url(session))
        log = (directory / "data" / "audit.jsonl").read_text().splitlines()
        answer = [json.loads(line) for line in log]
        assert [one["what"] for one in answer if one["object"] == session] == [
            "session.create", "upload.put", "upload.delete", "session.stop", "session.extend",
            "conversation.delete", "session.delete",
        ]  # fmt: skip
        assert {one["who"] for one in answer if one["object"] == session} == {f"uid:{os.getuid()}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/stop"),
        ("GET", "/files"),
        ("GET", "/conversations"),
        ("GET", "/conversations/c/prompt"),
    ],
)
@pytest.mark.parametrize("session", ["sb-session-ünknown-a", "sandbox-unknown"])
async def test_an_unknown_session_is_named_as_a_session(
    client: httpx.AsyncClient, method: str, path: str, session: str
) -> None:
    """The answer was about a sandbox, with the hint `sbx ps`."""
    reply = await client.request(method, url(session, path))
    assert code_of(reply) == (404, "not_found")
    error = reply.json()["error"]
    assert error["message"] == f"session {session} does not exist"
    assert "/api/v1/sessions" in error["hint"]
    assert error["details"] == {"session_id": session}
