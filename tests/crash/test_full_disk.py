"""A service whose disk is full, and one whose store another process has locked.

What takes a right away, frees space or stops something is done and recorded. New work is refused
before it begins. Nothing that was done is answered as a failure.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory, small_disk
from pydantic import SecretStr

from sbx.agent.settings import AgentSettings
from sbx.store import Store, database
from sbx.store.pending import PendingWrites
from sbx.telemetry.audit_chain import verify

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("namespaces"),
]
SIZE = "32m"
LOCK_S = 0.2  # how long the store waits for a lock, instead of 5 s
WAIT_S = 60.0


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    with pytest.MonkeyPatch.context() as patch, small_disk(SIZE) as disk:
        patch.setattr(database, "_BUSY_S", LOCK_S)
        # No test reaches the model: the session of a chat is created first.
        model = AgentSettings(
            base_url="http://127.0.0.1:9/v1", api_key=SecretStr("key"), model_name="none"
        )
        async with live(disk, agent=model) as served:
            yield served


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client() as client:
        await recovered(client)
        yield client


def disk_of(served: Served) -> Path:
    return served.service.data_dir.parent


@contextmanager
def full(served: Served) -> Iterator[Callable[[], None]]:
    """Fill the disk; again, when the function is called. At the end the space is free."""
    path = disk_of(served) / "filling"
    with path.open("ab", buffering=0) as filling:

        def fill() -> None:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while True:
                        filling.write(bytes(size))

        try:
            with closing(sqlite3.connect(served.service.store.path)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the next write needs new blocks
            fill()
            yield fill
        finally:
            path.unlink()


@asynccontextmanager
async def locked(served: Served) -> AsyncIterator[None]:
    """Another process holds the store's write lock, as a bad backup does."""
    other = sqlite3.connect(
        served.service.store.path, isolation_level=None, timeout=WAIT_S, check_same_thread=False
    )
    await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110  # the service is asked
            await asyncio.sleep(0.02)


async def recovered(client: httpx.AsyncClient) -> None:
    """Wait until the service takes new work."""

    async def healthy() -> bool:
        return "problems" not in (await client.get("/health")).json()

    await until(healthy)


async def new_sandbox(client: httpx.AsyncClient) -> str:
    reply = await client.post("/v1/sandboxes", json={})
    assert reply.status_code == 201, reply.text
    at = f"/v1/sandboxes/{reply.json()['id']}"
    warm = await client.post(f"{at}/python/exec", json={"code": "1"})
    assert warm.status_code == 200, warm.text
    return at


async def new_key(client: httpx.AsyncClient, owner: str) -> tuple[str, str]:
    reply = (await client.post("/v1/admin/keys", json={"owner": owner})).json()
    return reply["id"], reply["key"]


def refused(reply: httpx.Response) -> tuple[int, str]:
    error = reply.json()["error"]
    assert "/disk/" not in reply.text
    return reply.status_code, error["code"]


async def opens(served: Served, key: str) -> bool:
    async with served.client(key) as client:
        return (await client.get("/v1/sandboxes")).status_code == 200


@pytest_asyncio.fixture
async def at(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The path of a sandbox with a kernel."""
    at = await new_sandbox(client)
    yield at
    await client.delete(at)


async def meet(client: httpx.AsyncClient, at: str) -> list[str]:
    """Run until the service has met the full disk; the ids of the runs that it answered."""
    answered: list[str] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            reply = await client.post(f"{at}/python/exec", json={"code": "1"})
            if reply.status_code != 200:
                assert refused(reply) == (507, "no_space")
                return answered
            answered.append(reply.json()["execution_id"])


async def is_on_disk(served: Served, key_id: str) -> bool:
    sql = "SELECT 1 FROM keys WHERE revoked_at > 0 AND id = ?"
    return await served.service.store.row(sql, key_id) is not None


# -- a full disk -----------------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_keys_and_tokens_are_revoked_on_a_full_disk(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    """The revocation was refused, and the key continued to work."""
    key_id, key = await new_key(client, "alice")
    made = (await client.post("/v1/admin/tokens", json={"user_id": "u", "ttl_s": 600})).json()
    assert await opens(served, key)
    assert await opens(served, made["token"])
    with full(served):
        for path in (f"keys/{key_id}", f"tokens/{made['id']}"):
            reply = await client.delete(f"/v1/admin/{path}")
            assert reply.status_code == 204, reply.text
        assert not await opens(served, key)
        assert not await opens(served, made["token"])
    await recovered(client)
    assert await is_on_disk(served, key_id)


async def listed(client: httpx.AsyncClient, what: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await client.get(f"/v1/admin/{what}")).json()["items"]
    return items


async def test_chat_on_a_full_disk_gets_the_error_of_the_disk(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    """The chat answered 500 `session_create_failed`: each 503 or 507 of a new session became an
    error of sbx, without `Retry-After`."""
    message = {"user_id": "ann", "agent_id": "helper", "message": "hi"}
    with full(served):
        await meet(client, at)
        reply = await client.post("/api/v1/chat", json=message)
    assert refused(reply) == (507, "no_space")
    assert int(reply.headers["retry-after"]) > 0


async def test_full_disk_is_freed_by_deleting_what_filled_it(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    """No sandbox could be deleted, so the tenants who filled the disk could not free it."""
    big = await new_sandbox(client)
    written = {"code": "open('big', 'wb').write(bytes(4 << 20)); 0"}
    assert (await client.post(f"{big}/python/exec", json=written)).json()["success"]
    with full(served) as fill:
        await meet(client, at)
        fill()
        health = (await client.get("/health")).json()
        reply = await client.post("/v1/admin/gc/run", json={})
        assert reply.status_code == 200, reply.text
        reply = await client.delete(big)
        assert reply.status_code == 204, reply.text
        assert (await client.get(big)).status_code == 404
        await recovered(client)
        again = await client.post(f"{at}/python/exec", json={"code": "1"})
        assert again.status_code == 200, again.text
    assert health["problems"] == ["no_space"]


async def test_full_disk_without_a_reserve_is_freed_by_deleting_what_filled_it(
    served: Served, client: httpx.AsyncClient
) -> None:
    big = await new_sandbox(client)
    written = {"code": "open('big', 'wb').write(bytes(4 << 20)); 0"}
    assert (await client.post(f"{big}/python/exec", json=written)).json()["success"]
    reserve = served.service.recording.reserve
    while reserve.give_up():
        pass
    with full(served):
        reply = await client.delete(big)
        assert reply.status_code == 204, reply.text
        assert (await client.get(big)).status_code == 404
        await recovered(client)


async def test_life_is_extended_on_a_full_disk(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    mortal = (await client.post("/v1/sandboxes", json={"ttl": 600})).json()
    with full(served):
        path = f"/v1/sandboxes/{mortal['id']}/extend_ttl"
        reply = await client.post(path, json={"extend_by": 600})
        assert reply.status_code == 200, reply.text
    await client.delete(f"/v1/sandboxes/{mortal['id']}")


async def test_new_work_is_refused_and_the_rest_is_done_and_recorded(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    """A terminal was opened, a file deleted, and the answer was that the disk is full."""
    talk, files = f"{at}/conversations/default", f"{at}/filesystem/files"
    names = [f"{number}.txt" for number in range(30)]  # empty: deleting them frees no block
    for name in names:
        await client.put(files, json={"path": name, "content": ""})
    command = (await client.post(f"{talk}/commands", json={"command": "sleep 600"})).json()
    terminal = (await client.post(f"{talk}/terminals", json={})).json()
    with full(served) as fill:
        answered = await meet(client, at)
        fill()
        for method, path, body in (
            ("POST", f"{talk}/terminals", {}),
            ("POST", f"{talk}/commands", {"command": "true"}),
            ("POST", f"{talk}/runs", {"code": "1"}),
            ("POST", f"{at}/shell/exec", {"command": "true"}),
            ("PUT", files, {"path": "b.txt", "content": "b"}),
            ("POST", "/v1/sandboxes", {}),
            ("POST", "/v1/cargos", {}),
        ):
            reply = await client.request(method, path, json=body)
            assert refused(reply) == (507, "no_space"), path
            assert reply.headers["retry-after"] == "1"
        there = (await client.get(f"{talk}/terminals")).json()["items"]
        assert [one["id"] for one in there] == [terminal["id"]]
        done = [await client.delete(files, params={"path": name}) for name in names]
        done += [
            await client.delete(f"{talk}/terminals/{terminal['id']}"),
            await client.post(f"{talk}/commands/{command['id']}/stop"),
            await client.post(f"{at}/stop"),
        ]
        assert {one.status_code for one in done} <= {200, 204}, [one.text for one in done]
        assert (await client.get(files, params={"path": names[0]})).status_code == 404
        for run in answered:
            shown = await client.get(f"{at}/history/{run}")
            assert shown.status_code == 200, shown.text
    await recovered(client)
    acts = acts_of(served)
    assert acts.count("file.delete") == len(names)
    assert {"terminal.close", "command.stop", "sandbox.stop"} <= {*acts}


def acts_of(served: Served) -> list[str]:
    path = served.service.data_dir / "audit.jsonl"
    assert verify(path).ok
    acts = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):  # the full disk tore it, and it was written again
            acts.append(json.loads(line)["what"])
    return acts


async def test_disk_without_a_reserve_left_delays_records_and_loses_none(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    """Code in a sandbox can take the space of the reserve, too."""
    key_id, key = await new_key(client, "bob")
    files = f"{at}/filesystem/files"
    names = [f"{number}.txt" for number in range(30)]
    for name in names:
        await client.put(files, json={"path": name, "content": ""})
    deleted = acts_of(served).count("file.delete")
    cell = {"code": "import time; time.sleep(600)"}
    running = asyncio.create_task(client.post(f"{at}/python/exec", json=cell))

    async def begun() -> bool:
        row = await served.service.store.row("SELECT 1 FROM runs WHERE status = 'running'")
        return row is not None

    await until(begun)
    reserve = served.service.recording.reserve
    while reserve.give_up():
        pass
    with full(served) as fill:
        done = []
        for name in names:
            done.append(await client.delete(files, params={"path": name}))
            fill()
        assert {one.status_code for one in done} == {200}, [one.text for one in done]
        reply = await client.delete(f"/v1/admin/keys/{key_id}")
        assert (reply.status_code, reply.json()) == (200, {"recorded": False})
        assert not await opens(served, key)
        assert (await client.post(f"{at}/interrupt")).json()["interrupted"]
        run = (await running).json()
        assert run["recorded"] is False
        shown = await client.get(f"{at}/history/{run['execution_id']}")
        assert shown.status_code == 200, shown.text
        problems = (await client.get("/health")).json()["problems"]
        assert problems == ["no_space", "not_recording"]
        assert not await is_on_disk(served, key_id)
    await recovered(client)
    assert await is_on_disk(served, key_id)
    assert (await client.get(f"{at}/history")).json()["entries"][0]["id"] == run["execution_id"]
    assert acts_of(served).count("file.delete") == deleted + len(names)


# -- a store that another process has locked -------------------------------------------------------


async def test_locked_store_loses_no_run(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    """A run was answered with 200 and an id that was 404 from then on."""
    talk = f"{at}/conversations/default"
    async with locked(served):
        reply = await client.post(f"{at}/python/exec", json={"code": "2 + 40"})
        assert reply.status_code == 200, reply.text
        run, recorded = reply.json()["execution_id"], reply.json().get("recorded")
        shown = await client.get(f"{at}/history/{run}")
        assert shown.status_code == 200, shown.text
        assert (shown.json()["id"], recorded) == (run, False)
        history = (await client.get(f"{at}/history")).json()
        assert [one["id"] for one in history["entries"]][:1] == [run]
        assert (await client.get("/health")).json()["problems"] == ["not_recording"]
        for path, body in ((f"{at}/python/exec", {"code": "1"}), (f"{talk}/terminals", {})):
            reply = await client.post(path, json=body)
            assert refused(reply) == (503, "not_recording")
            assert reply.headers["retry-after"] == "1"
    await recovered(client)
    after = (await client.get(f"{at}/history")).json()
    assert after == history
    events = await client.get(f"{at}/runs/{run}/events")
    assert '"recorded"' not in events.text
    reply = await client.post(f"{at}/python/exec", json={"code": "1"})
    assert "recorded" not in reply.json()


async def _none_waits(served: Served) -> bool:
    return not served.service.runs.history._unrecorded


async def test_history_has_pages_of_what_waits_and_what_is_stored(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    pages = [(100, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (1, 2)]

    async def shown() -> list[dict[str, Any]]:
        params = [{"limit": limit, "offset": offset} for limit, offset in pages]
        return [(await client.get(f"{at}/history", params=one)).json() for one in params]

    await client.post(f"{at}/shell/exec", json={"command": "true"})
    async with locked(served):
        posts = (client.post(f"{at}/shell/exec", json={"command": f"echo {n}"}) for n in range(3))
        replies = await asyncio.gather(*posts)
        assert [one.json()["recorded"] for one in replies] == [False] * 3
        waiting = await shown()
        kept = dict(served.service.runs.history._unrecorded)
    await recovered(client)
    assert await shown() == waiting
    # The moment between the commit of the store and the next turn of the loop: both have the rows.
    await until(lambda: _none_waits(served))
    for unrecorded in (kept, dict(list(kept.items())[:1])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.service.runs.history, "_unrecorded", unrecorded)
            assert [page["total"] for page in await shown()] == [5] * len(pages)
    assert [(one["total"], len(one["entries"])) for one in waiting] == [
        (5, 5), (5, 2), (5, 2), (5, 2), (5, 2), (5, 1), (5, 1),
    ]  # fmt: skip


async def test_every_wire_says_that_a_run_is_not_recorded(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    session = (await client.post("/api/v1/sessions", json={"user_id": "u", "agent_id": "a"})).json()
    execute = f"/api/v1/sessions/{session['session_id']}/execute"
    cell = {"conversation_id": "c", "code": "1"}
    assert (await client.post(execute, json=cell)).status_code == 200
    native = f"{at}/conversations/default/runs"
    for path, body in (
        (native, {"code": "1"}),
        (native, {"code": "1", "stream": True}),
        (f"{at}/shell/exec", {"command": "true"}),
        (f"{at}/python/exec", {"code": "1", "stream": True}),
        (execute, cell),
        (execute, {**cell, "stream": True}),
    ):
        async with locked(served):
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert '"recorded":false' in reply.text, path
        await recovered(client)
        assert '"recorded"' not in (await client.post(path, json=body)).text


async def test_revocation_holds_from_the_call_on_though_the_store_is_locked(
    served: Served, client: httpx.AsyncClient, at: str
) -> None:
    key_id, key = await new_key(client, "carol")
    assert await opens(served, key)
    async with locked(served):
        revoking = asyncio.create_task(client.delete(f"/v1/admin/keys/{key_id}"))

        async def closed() -> bool:
            return not await opens(served, key)

        await until(closed)
        reply = await revoking
        assert (reply.status_code, reply.json()) == (200, {"recorded": False})
        assert {one["id"] for one in await listed(client, "keys") if one["revoked_at"]} >= {key_id}
        assert (await client.delete("/v1/admin/keys/key-none")).status_code == 404
    await recovered(client)
    assert not await opens(served, key)
    assert await is_on_disk(served, key_id)
    assert (await client.delete(f"/v1/admin/keys/{key_id}")).status_code == 204


# -- the end of a service --------------------------------------------------------------------------


async def test_service_starts_on_a_full_disk_and_can_free_it() -> None:
    with small_disk(SIZE) as disk:
        async with live(disk) as served, served.client() as client:
            at = await new_sandbox(client)
            written = {"code": "open('big', 'wb').write(bytes(4 << 20)); 0"}
            assert (await client.post(f"{at}/python/exec", json=written)).json()["success"]
        filling = disk / "filling"
        with filling.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        async with live(disk) as served, served.client() as client:
            reply = await client.delete(at)
            assert reply.status_code == 204, reply.text
            await recovered(client)


async def test_pending_ends_are_written_when_the_service_ends() -> None:
    async def release_later(lock: AbstractAsyncContextManager[None]) -> None:
        await asyncio.sleep(4 * LOCK_S)
        await lock.__aexit__(None, None, None)

    with pytest.MonkeyPatch.context() as patch, short_directory() as directory:
        patch.setattr(database, "_BUSY_S", LOCK_S)
        async with live(directory) as served, served.client() as client:
            at = await new_sandbox(client)
            lock = locked(served)
            await lock.__aenter__()
            reply = await client.post(f"{at}/python/exec", json={"code": "1"})
            releasing = asyncio.create_task(release_later(lock))
        await releasing
        async with live(directory) as served, served.client() as client:
            shown = await client.get(f"{at}/history/{reply.json()['execution_id']}")
            assert (shown.status_code, shown.json()["success"]) == (200, True)
            assert reply.json()["recorded"] is False


def delete_keys(on: sqlite3.Connection) -> None:
    on.execute("DELETE FROM keys")


async def test_writes_that_no_store_takes_are_bounded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_S", LOCK_S)
    ends: dict[str, bool] = {}
    async with await Store.open(tmp_path / "sbx.db") as store:
        pending = PendingWrites(store, count_max=2)
        other = sqlite3.connect(tmp_path / "sbx.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for name in "abc":
            on_done = partial(ends.__setitem__, name)
            assert not await pending.write(name, delete_keys, on_done=on_done)
        assert (pending.count, ends, pending.refused) == (2, {"c": False}, True)
        await pending.close(0.3)
        other.close()
    assert ends == {"a": False, "b": False, "c": False}
    lost = [line.getMessage() for line in caplog.records if "is lost" in line.getMessage()]
    assert [line.split()[0] for line in lost] == ["c", "a", "b"]
    assert sum("refuses writes" in line.getMessage() for line in caplog.records) == 1


# -- a damaged store -------------------------------------------------------------------------------


async def test_damaged_store_is_a_problem_of_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reads were refused, but `/health` had no problem, and the log no error."""
    with short_directory() as directory:
        async with live(directory) as served, served.client() as client:
            at = await new_sandbox(client)
            with closing(sqlite3.connect(served.service.store.path)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                other.execute("PRAGMA user_version = 99")  # the service reads its pages again
                with served.service.store.path.open("r+b") as file:
                    (size,) = other.execute("PRAGMA page_size").fetchone()
                    file.seek(size)
                    file.write(b"\xff" * size * 200)
            for _ in range(2):
                reply = await client.get(f"{at}/history")
                assert refused(reply) == (503, "store_corrupt")
            assert (await client.get("/health")).json()["problems"] == ["store_corrupt"]
            reply = await client.post("/v1/sandboxes", json={})
            assert refused(reply) == (503, "store_corrupt")
    errors = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert 1 <= len(errors) <= 2  # one for each connection
