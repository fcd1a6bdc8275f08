"""A deletion is final at once: nothing of the content is left in the data directory, whatever the
state and the route. Each test writes a marker, and looks for it in every file afterwards."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import Desk, calls, desk, say
from model_server import BrokenOff
from places import short_directory
from sessions_calls import API, C1, code_of, ensure, names, put, run, until, url

from sbx.agent.messages import Response
from sbx.service.service import Service
from tests.fake_clock import FakeClock

MARK = "kumquat-7f3a9e"
HALVES = f"'{MARK[:7]}' + '{MARK[7:]}'"
SESSION = "sb-session-ann-helper"
CHAT = {"user_id": "ann", "agent_id": "helper"}
CONVERSATIONS = f"{API}/conversations"
TTL_S = 60


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def at(clock: FakeClock) -> AsyncIterator[Desk]:
    with short_directory() as directory:
        async with desk(directory, clock=clock) as at:
            yield at


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client


def marked(at: Desk) -> list[str]:
    """Return the files of the data directory that contain the marker; free pages and logs of the
    store count."""
    data = at.served.service.data_dir
    found = []
    for path in sorted(data.rglob("*")):
        with suppress(OSError):
            if path.is_file() and MARK.encode() in path.read_bytes():
                found.append(str(path.relative_to(data)))
    return found


async def fill(at: Desk, client: httpx.AsyncClient, name: str = "c1", **more: Any) -> None:
    """Write the marker to everything that a conversation has."""
    at.model.add(
        calls(("run_code", {"code": f"open('own.txt', 'w').write('{MARK}')\nprint({HALVES})"})),
        Response(f"an answer with {MARK}"),
    )
    await say(client, name, message=f"a message with {MARK}", **more)
    assert (await put(client, SESSION, "a.csv", MARK.encode(), name)).status_code == 201
    body = {"conversation_id": name, "code": f"print('{MARK}')"}
    done = await client.post(
        url(SESSION, "/execute"), json=body, headers={"Idempotency-Key": f"key-{name}"}
    )
    assert done.status_code == 200, done.text
    assert any(path.startswith("sandboxes/") for path in marked(at))
    assert "store.sqlite" in marked(at) or "store.sqlite-wal" in marked(at)


async def expire(at: Desk, clock: FakeClock) -> None:
    clock.advance(TTL_S + 1)
    await at.served.service.reaper.round()


async def delete(client: httpx.AsyncClient, route: str) -> httpx.Response:
    if route == "chat":
        return await client.delete(f"{CONVERSATIONS}/c1", params=CHAT)
    return await client.delete(url(SESSION, "/conversations/c1"))


# -- conversations and sessions --------------------------------------------------------------------


@pytest.mark.parametrize("state", ["live", "stopped", "expired"])
@pytest.mark.parametrize("route", ["chat", "session"])
async def test_a_deleted_conversation_leaves_nothing(
    at: Desk, client: httpx.AsyncClient, clock: FakeClock, route: str, state: str
) -> None:
    """In an expired session it kept its files, and the next session showed them again."""
    await ensure(client, "ann", "helper", ttl=TTL_S)
    await fill(at, client)
    if state == "stopped":
        await client.post(url(SESSION, "/stop"))
    elif state == "expired":
        await expire(at, clock)
    assert (await delete(client, route)).status_code == 204
    assert marked(at) == []
    assert code_of(await delete(client, route)) == (404, "not_found")
    assert code_of(await client.get(f"{CONVERSATIONS}/c1", params=CHAT)) == (404, "not_found")
    await ensure(client, "ann", "helper", ttl=TTL_S)
    params = {"conversation_id": "c1"}
    gone = await client.get(url(SESSION, "/files"), params=params)
    assert code_of(gone) == (404, "not_found")
    body = {"conversation_id": "c1", "code": f"print('{MARK}')"}
    again = await client.post(
        url(SESSION, "/execute"), json=body, headers={"Idempotency-Key": "key-c1"}
    )
    assert code_of(again) == (409, "reply_not_kept")


@pytest.mark.parametrize("state", ["live", "stopped", "expired"])
async def test_a_deleted_session_leaves_nothing(
    at: Desk, client: httpx.AsyncClient, clock: FakeClock, state: str
) -> None:
    await ensure(client, "ann", "helper", ttl=TTL_S)
    await fill(at, client)
    if state == "stopped":
        await client.post(url(SESSION, "/stop"))
    elif state == "expired":
        await expire(at, clock)
    assert (await client.delete(url(SESSION))).status_code == 204
    assert marked(at) == []
    assert code_of(await client.delete(url(SESSION))) == (404, "not_found")


async def test_a_session_past_its_grace_is_deleted_with_its_history(
    at: Desk, client: httpx.AsyncClient, clock: FakeClock
) -> None:
    await ensure(client, "ann", "helper", ttl=TTL_S)
    await fill(at, client)
    clock.advance(at.served.service.settings.files_grace + TTL_S + 1)
    await at.served.service.reaper.collect()
    assert marked(at)  # the history, for a user who comes back
    assert (await client.delete(url(SESSION))).status_code == 204
    assert marked(at) == []


@pytest.mark.parametrize("what", ["conversation", "session"])
async def test_a_run_that_a_deletion_ends_leaves_no_record(
    at: Desk, client: httpx.AsyncClient, what: str
) -> None:
    """Its end was recorded after the deletion, with its code and its output."""
    await ensure(client, "ann", "helper")
    code = f"print('{MARK}', flush=True)\nopen('own.txt', 'w').write('{MARK}')\nwhile True: pass"
    body = {"conversation_id": "c1", "code": code}
    running = asyncio.create_task(
        client.post(url(SESSION, "/execute"), json=body, headers={"Idempotency-Key": "k"})
    )

    async def writes() -> bool:
        return any(path.startswith("sandboxes/") for path in await asyncio.to_thread(marked, at))

    await until(writes)
    rest = "/conversations/c1" if what == "conversation" else ""
    assert (await client.delete(url(SESSION, rest))).status_code == 204
    await running
    await at.served.service.store.settled()
    assert marked(at) == []


async def test_deleting_a_conversation_aborts_its_agent(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(BrokenOff(Response(f"thinking about {MARK}"), after=3, then="hang"))
    asked = {**CHAT, "conversation_id": "c1", "message": MARK, "detach": True}
    assert (await client.post(f"{API}/chat", json=asked)).status_code == 202
    assert (await delete(client, "session")).status_code == 204
    assert marked(at) == []
    assert (await client.get(f"{API}/runs")).json()["items"] == []


async def test_a_deleted_context_leaves_no_history(at: Desk, client: httpx.AsyncClient) -> None:
    await ensure(client, "ann", "helper")
    place = f"/v1/sandboxes/{SESSION}/conversations/c1"
    assert (await client.post(f"{place}/contexts", json={"name": MARK})).status_code == 201
    done = await client.post(f"{place}/runs", json={"code": f"print('{MARK}')", "context": MARK})
    assert done.json()["status"] == "ok"
    hangs = {"code": f"print('{MARK}', flush=True)\nwhile True: pass", "context": MARK}
    running = asyncio.create_task(client.post(f"{place}/runs", json=hangs))

    async def is_busy() -> bool:
        return bool((await client.get(f"{place}/contexts/{MARK}")).json()["status"] == "busy")

    await until(is_busy)
    assert (await client.delete(f"{place}/contexts/{MARK}")).status_code == 204
    await running
    await at.served.service.store.settled()
    await at.served.service.store.fold()
    log = ["audit.jsonl"]  # it keeps the names
    assert marked(at) == log
    assert (await client.delete(f"{place}/contexts/{MARK}")).status_code == 404


# -- projects --------------------------------------------------------------------------------------


async def project(at: Desk, client: httpx.AsyncClient) -> str:
    made = {"name": "p", "working_directory": str(at.directory("one"))}
    reply = await client.post(f"{API}/projects", json=made)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


async def fill_project(at: Desk, client: httpx.AsyncClient, project_id: str) -> None:
    at.model.add(Response(f"an answer with {MARK}"))
    await say(client, "c1", message=MARK, project_id=project_id)
    assert (await put(client, SESSION, "a.csv", MARK.encode())).status_code == 201
    assert await names(client, SESSION) == ["a.csv"]


async def test_a_deleted_project_leaves_no_uploads(at: Desk, client: httpx.AsyncClient) -> None:
    """Only its rows were deleted: the uploads of its conversations stayed, also in a live
    session."""
    made = await project(at, client)
    await fill_project(at, client, made)
    assert (await client.delete(f"{API}/projects/{made}")).status_code == 204
    assert code_of(await client.get(url(SESSION, "/files"), params=C1)) == (404, "not_found")
    assert marked(at) == []
    assert code_of(await client.delete(f"{API}/projects/{made}")) == (404, "not_found")
    assert (at.projects / "one").is_dir()


async def test_a_project_is_deleted_while_its_agent_works(
    at: Desk, client: httpx.AsyncClient
) -> None:
    made = await project(at, client)
    await fill_project(at, client, made)
    at.model.add(BrokenOff(Response("thinking about it for long"), after=3, then="hang"))
    asked = {**CHAT, "conversation_id": "c1", "message": MARK, "project_id": made, "detach": True}
    assert (await client.post(f"{API}/chat", json=asked)).status_code == 202
    assert (await client.delete(f"{API}/projects/{made}")).status_code == 204
    assert marked(at) == []
    assert (await client.get(f"{API}/runs")).json()["items"] == []


async def test_the_next_start_completes_a_deletion() -> None:
    """After a kill between the intention and the end."""
    with short_directory() as directory:
        async with desk(directory) as at, at.served.client() as client:
            made = await project(at, client)
            await fill_project(at, client, made)
            await fill(at, client, "c2")
            await at.served.service.projects.hide(_owner(at), made)
            settings = at.served.service.settings
            assert code_of(await client.get(f"{API}/projects/{made}")) == (404, "not_found")
        async with Service(settings) as service:
            assert await service.projects.in_deletion() == []
            rows = await service.store.rows("SELECT conversation_id FROM chats")
            assert [row["conversation_id"] for row in rows] == ["c2"]


def _owner(at: Desk) -> str:
    return at.served.service.access.service_caller().owner


# -- users -----------------------------------------------------------------------------------------


async def test_all_data_of_a_user_are_forgotten(at: Desk, client: httpx.AsyncClient) -> None:
    await fill(at, client)
    made = await project(at, client)
    at.model.add(Response(MARK))
    await say(client, "c2", message=MARK, project_id=made)
    token = await client.post("/v1/admin/tokens", json={"user_id": "ann"})
    await ensure(client, "bob", "helper")
    other = "sb-session-bob-helper"
    await put(client, other, "b.csv", b"of bob")

    reply = await client.delete("/v1/admin/users/ann")
    assert reply.status_code == 200, reply.text
    removed = reply.json()["removed"]
    assert reply.json()["user_id"] == "ann"
    assert (removed["sessions"], removed["conversations"], removed["chats"]) == (1, 2, 2)
    assert (removed["uploads"], removed["tokens"]) == (1, 1)
    assert removed["messages"] >= 5
    assert marked(at) == []
    assert code_of(await client.get(url(SESSION))) == (404, "not_found")
    async with at.served.client(token.json()["token"]) as bearer:
        assert (await bearer.get(f"{API}/sessions")).status_code == 401
    for table in ("chats", "sandboxes", "tokens", "tasks"):
        query = f"SELECT count(*) AS n FROM {table} WHERE user_id = 'ann'"
        row = await at.served.service.store.row(query)
        assert row is not None
        assert row["n"] == 0, table
    assert await names(client, other) == ["b.csv"]
    again = (await client.delete("/v1/admin/users/ann")).json()
    assert set(again["removed"].values()) == {0}
    lines = (at.served.service.data_dir / "audit.jsonl").read_text().splitlines()
    assert [line for line in map(json.loads, lines) if line["what"] == "user.forget"]


async def test_a_key_forgets_users_of_its_owner_only(at: Desk, client: httpx.AsyncClient) -> None:
    async with at.served.client(await at.served.key_of("carol")) as carol:
        await ensure(carol, "ann", "helper")
        refused = await carol.delete("/v1/admin/users/ann", params={"owner": "dave"})
        assert code_of(refused) == (403, "forbidden")
        assert (await carol.get(url(SESSION))).status_code == 200
    reply = await client.delete("/v1/admin/users/ann", params={"owner": "carol"})
    assert reply.json()["removed"]["sessions"] == 1


# -- expired sessions ------------------------------------------------------------------------------


async def test_uploads_of_an_expired_session_are_listed_and_sent(
    at: Desk, client: httpx.AsyncClient, clock: FakeClock
) -> None:
    """They were kept, and refused with 409."""
    await ensure(client, "ann", "helper", ttl=TTL_S)
    await put(client, SESSION, "a.csv", MARK.encode())
    await put(client, SESSION, "b.csv", b"b")
    await expire(at, clock)
    native = f"/v1/sandboxes/{SESSION}/conversations/c1/uploads"
    assert await names(client, SESSION) == ["a.csv", "b.csv"]
    assert (await client.get(url(SESSION, "/files/a.csv"))).text == MARK
    assert [each["name"] for each in (await client.get(native)).json()["items"]] == [
        "a.csv",
        "b.csv",
    ]
    assert (await client.get(f"{native}/a.csv")).text == MARK
    listed = (await client.get(url(SESSION, "/conversations"))).json()["items"]
    assert [each["conversation_id"] for each in listed] == ["c1"]
    removed = await client.delete(url(SESSION, "/files/a.csv"), params=C1)
    assert removed.status_code == 204
    assert marked(at) == []
    assert code_of(await put(client, SESSION, "c.csv", b"c")) == (409, "sandbox_expired")
    assert code_of(await run(client, SESSION, "1")) == (409, "sandbox_expired")
    restored = await ensure(client, "ann", "helper", ttl=TTL_S)
    assert restored.json()["info"]["restored"] is True
    assert await names(client, SESSION) == ["b.csv"]
    assert (await run(client, SESSION, "print(1)")).json()["status"] == "ok"


# -- the audit log ---------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "sessions"])
async def test_each_way_to_a_session_is_in_the_audit_log(
    at: Desk, client: httpx.AsyncClient, clock: FakeClock, route: str
) -> None:
    """A session that a chat created was in no log."""

    async def need() -> None:
        if route == "chat":
            at.model.add(Response("done"))
            await say(client, "c1")
        else:
            await ensure(client, "ann", "helper")

    await need()
    await need()
    await client.post(url(SESSION, "/stop"))
    await need()
    await client.post(url(SESSION, "/extend_ttl"), json={"extend_by": 1})
    clock.advance(8000)
    await need()
    lines = (at.served.service.data_dir / "audit.jsonl").read_text().splitlines()
    about = [each for each in map(json.loads, lines) if each["object"] == SESSION]
    ways = [each for each in about if each["what"] not in ("session.stop", "session.extend")]
    assert [each["what"] for each in ways] == [
        "session.create",
        "session.reuse",
        "session.resume",
        "session.create",
    ]
    assert ways[0]["details"]["policy"] == "default"
    assert ways[-1]["details"]["replaced"] == "expired"


# -- refused requests ------------------------------------------------------------------------------

_PLACE = "/v1/sandboxes/{box}/conversations/new"
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "{session}/execute", {"conversation_id": "new", "code": "1", "timeout": 3601}),
    ("POST", "{session}/execute", {"conversation_id": "new", "code": "\ud800"}),
    ("POST", "{session}/execute", {"conversation_id": "new", "code": "1", "language": "cobol"}),
    ("POST", f"{_PLACE}/runs", {"code": "1", "timeout": 1e9}),
    ("POST", f"{_PLACE}/runs", {"code": "1", "timeout": -1}),
    ("POST", f"{_PLACE}/runs", {"code": "a\0b", "kind": "shell"}),
    ("POST", f"{_PLACE}/runs", {"code": "1", "context": "no-such"}),
    ("POST", f"{_PLACE}/runs", {"code": "1", "kind": "shell", "cwd": "a\0"}),
    ("POST", f"{_PLACE}/runs", {"code": "1", "kind": "shell", "env": {"a=b": "c"}}),
    ("POST", f"{_PLACE}/commands", {"command": "a\0b"}),
    ("POST", f"{_PLACE}/commands", {"command": "true", "env": {"a=b": "c"}}),
    ("POST", f"{_PLACE}/terminals", {"command": "a\0b"}),
    ("POST", f"{_PLACE}/terminals", {"cwd": "a\0b"}),
    ("POST", f"{_PLACE}/contexts", {"name": "a/b"}),
    ("POST", f"{_PLACE}/grants", {"kind": "no-such", "target": "x", "duration": "once"}),
    ("POST", f"{_PLACE}/grants", {"kind": "host", "target": "a.example", "duration": "once"}),
    ("POST", f"{_PLACE}/dry_runs", {"command": "a\0b"}),
    ("POST", f"{_PLACE}/dry_runs", {"command": "true", "timeout": 1e9}),
    ("POST", f"{_PLACE}/partials", {"path": "../x", "size": 1}),
    ("POST", f"{_PLACE}/partials", {"path": "x", "size": 1 << 60}),
    ("PUT", f"{_PLACE}/files?path=../x", {}),
    ("PUT", f"{_PLACE}/uploads/..%2fx", {}),
    ("PUT", f"{_PLACE}/uploads/x.exe", {}),
    ("POST", f"{_PLACE}/directories", {"path": "../x"}),
]


@pytest.mark.parametrize("warm", [True, False])
async def test_a_refused_request_leaves_no_conversation(
    at: Desk, client: httpx.AsyncClient, warm: bool
) -> None:
    """A time-out above the limit answered 400, and left an empty conversation. `warm`: a prewarmed
    sandbox waits for the first use."""
    if warm:
        await at.served.service.runtime.warm(count=1, new=True)
    await ensure(client, "ann", "helper")
    left = []
    for method, path, body in REFUSED:
        target = path.format(session=url(SESSION), box=SESSION)
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        reply = await client.request(method, target, content=content, headers=headers)
        assert 400 <= reply.status_code < 500, (target, body, reply.status_code, reply.text)
        conversations = (await client.get(url(SESSION))).json()["info"]["conversations"]
        rows = await at.served.service.store.rows("SELECT name FROM conversations")
        if "new" in conversations or "new" in {row["name"] for row in rows}:
            left.append((method, path, body))
            await client.delete(url(SESSION, "/conversations/new"))
    assert left == [], json.dumps(left)


async def test_a_refused_message_leaves_neither_session_nor_chat(
    at: Desk, client: httpx.AsyncClient
) -> None:
    profile = {"agent_id": "fixed", "profile": {"model": {"name": "scripted"}}}
    assert (await client.post(f"{API}/agents", json=profile)).status_code == 201
    who = {"user_id": "eve", "agent_id": "fixed", "conversation_id": "new"}
    refused = await client.post(f"{API}/chat", json={**who, "message": "x", "model": "other"})
    assert code_of(refused) == (403, "model_fixed")
    imported = await client.post(
        f"{API}/conversations/new/import", params={"user_id": "eve", "agent_id": "a"}, content=b"["
    )
    assert 400 <= imported.status_code < 500
    assert (await client.get(CONVERSATIONS)).json()["items"] == []
    sessions = (await client.get(f"{API}/sessions")).json()["items"]
    assert [each["session_id"] for each in sessions] == ["sb-session-eve-a"]  # of the import
