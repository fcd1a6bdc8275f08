"""The store on real files: what it keeps, what it refuses, and that a refusal changes nothing."""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sbx.errors import BadRequest, Broken, Closed, SbxError, Unavailable
from sbx.protocol.changes import ChangesSetting
from sbx.service.caller import Caller
from sbx.store import Store, chats, database, events, sandboxes, worker
from sbx.store import pending as pending_writes
from sbx.store.migrations import APPLICATION_ID, Migration, migrate, shipped, version_of
from sbx.store.pending import PendingWrites

NEWEST = shipped()[-1].version
NEXT = NEWEST + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sbx.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    async with await Store.open(path) as store:
        yield store


def add_key(on: sqlite3.Connection, key_id: str = "key-1") -> None:
    on.execute(
        "INSERT INTO keys (id, owner, hash, created_at) VALUES (?, 'me', ?, 1.0)", (key_id, key_id)
    )


def add_sandbox(on: sqlite3.Connection, name: str = "1", session: str | None = None) -> None:
    table, column = "workspaces", "workspace_id"
    if version_of(on) < 7:
        table, column = "cargos", "cargo_id"
    on.execute(
        f"INSERT INTO {table} (id, owner, directory, created_at, last_accessed_at)"
        " VALUES (?, 'me', ?, 1, 1)",
        (f"ws-{name}", name),
    )
    policy = "profile" if version_of(on) < 14 else "policy_name"
    on.execute(
        f"INSERT INTO sandboxes (id, owner, {policy}, {column}, created_at, session_id)"
        " VALUES (?, 'me', 'default', ?, 1, ?)",
        (f"sandbox-{name}", f"ws-{name}", session),
    )


async def key_ids(store: Store) -> list[str]:
    return [row["id"] for row in await store.rows("SELECT id FROM keys ORDER BY rowid")]


# -- reading and writing ---------------------------------------------------------------------------


async def test_what_was_written_is_there_when_opened_again(path: Path) -> None:
    async with await Store.open(path) as store:
        await store.write(add_key)
    async with await Store.open(path) as store:
        row = await store.row("SELECT * FROM keys WHERE id = ?", "key-1")
        assert row is not None
        assert (row["owner"], row["created_at"]) == ("me", 1.0)
        assert await store.row("SELECT * FROM keys WHERE id = 'none'") is None


async def test_files_are_for_their_user_alone(store: Store, path: Path) -> None:
    await store.write(add_key)
    modes = {item.name: stat.S_IMODE(item.stat().st_mode) for item in path.parent.iterdir()}
    assert modes == {"sbx.db": 0o600, "sbx.db-wal": 0o600, "sbx.db-shm": 0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_store_that_others_could_read_is_closed_to_them(path: Path) -> None:
    await (await Store.open(path)).close()
    path.chmod(0o644)
    async with await Store.open(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_it_keeps_a_log_and_foreign_keys(store: Store) -> None:
    async def asked(pragma: str) -> Any:
        return await store.write(lambda on: on.execute(f"PRAGMA {pragma}").fetchone()[0])

    assert await asked("journal_mode") == "wal"
    assert await asked("foreign_keys") == 1
    assert await asked("application_id") == APPLICATION_ID
    assert await asked("user_version") == NEWEST


async def test_an_act_is_one_transaction(store: Store) -> None:
    def half(on: sqlite3.Connection) -> None:
        add_key(on)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        await store.write(half)
    assert await key_ids(store) == []
    await store.write(add_key)
    assert await key_ids(store) == ["key-1"]


async def test_an_act_may_catch_what_a_row_refuses(store: Store) -> None:
    await store.write(add_key)

    def twice(on: sqlite3.Connection) -> str:
        add_key(on, "key-2")
        try:
            add_key(on, "key-1")
        except sqlite3.IntegrityError:
            return "there already"
        return ""

    assert await store.write(twice) == "there already"
    assert await key_ids(store) == ["key-1", "key-2"]


async def test_writes_keep_their_order_and_closing_waits_for_them(path: Path) -> None:
    store = await Store.open(path)
    wanted = [f"key-{number}" for number in range(300)]
    for name in wanted:
        store.write_later(lambda on, name=name: add_key(on, name))  # type: ignore[misc]
    await store.write(lambda on: add_key(on, "awaited"))
    assert await key_ids(store) == [*wanted, "awaited"]
    store.write_later(lambda on: add_key(on, "last"))
    await store.close()
    async with await Store.open(path) as store:
        assert (await key_ids(store))[-1] == "last"


async def test_a_write_that_nobody_waits_for_is_logged_when_it_fails(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_later(lambda on: on.execute("INSERT INTO nowhere VALUES (1)"))
    await store.write(add_key)
    assert "nowhere" in caplog.text
    assert await key_ids(store) == ["key-1"]


@asynccontextmanager
async def busy_writer(store: Store) -> AsyncIterator[None]:
    """Inside the block, writes wait; the block ends when all of its tasks have put theirs."""
    blocked, going_on = threading.Event(), threading.Event()

    def block(_: sqlite3.Connection) -> None:
        blocked.set()
        going_on.wait(10)

    first = asyncio.create_task(store.write(block))
    await asyncio.to_thread(blocked.wait, 10)
    yield
    await asyncio.sleep(0)
    going_on.set()
    await first


async def test_waiting_writes_are_one_transaction_and_a_failure_ends_only_its_own(
    store: Store,
) -> None:
    counts = list[int]()

    def noted(on: sqlite3.Connection, key_id: str) -> str:
        counts.append(on.execute("SELECT count(*) FROM keys").fetchone()[0])
        add_key(on, key_id)
        return key_id

    async def written(*names: str) -> list[Any]:
        async with busy_writer(store):
            tasks = [asyncio.create_task(store.write(partial(noted, key_id=id))) for id in names]
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    before = store.failures
    assert await written("a", "b", "c") == ["a", "b", "c"]
    assert await key_ids(store) == ["a", "b", "c"]
    assert (counts, store.failures) == ([0, 1, 2], before)

    counts.clear()
    done = await written("d", "a", "e")  # a key may be there once
    assert (done[0], done[2]) == ("d", "e")
    assert isinstance(done[1], SbxError)
    assert await key_ids(store) == ["a", "b", "c", "d", "e"]
    assert counts == [3, 4, 3, 4, 4]  # the first two were rolled back, and done again alone
    assert store.failures > before


async def test_a_group_of_writes_that_cannot_be_committed_is_done_one_by_one(
    store: Store,
) -> None:
    """A foreign key that is checked at COMMIT fails there, for the whole group."""
    late = "CREATE TABLE late (parent TEXT REFERENCES keys (id) DEFERRABLE INITIALLY DEFERRED)"
    await store.write(lambda on: on.execute(late))
    async with busy_writer(store):
        right = asyncio.create_task(store.write(partial(add_key, key_id="right")))
        orphan = asyncio.create_task(
            store.write(lambda on: on.execute("INSERT INTO late VALUES ('missing')"))
        )
        await asyncio.sleep(0)
        store.write_later(partial(add_key, key_id="later"))
    await right
    with pytest.raises(SbxError):
        await orphan
    await store.settled()
    assert await key_ids(store) == ["right", "later"]
    assert await store.rows("SELECT * FROM late") == []


async def test_one_reading_sees_one_state(store: Store) -> None:
    between = threading.Event()
    loop = asyncio.get_running_loop()
    reading = asyncio.Event()

    def twice(on: sqlite3.Connection) -> list[int]:
        before = on.execute("SELECT count(*) FROM keys").fetchone()[0]
        loop.call_soon_threadsafe(reading.set)
        assert between.wait(60)
        return [before, on.execute("SELECT count(*) FROM keys").fetchone()[0]]

    counts = asyncio.create_task(store.read(twice))
    await reading.wait()
    await store.write(add_key)  # a reader does not keep the writer waiting
    between.set()
    assert await counts == [0, 0]
    assert await key_ids(store) == ["key-1"]


async def test_reading_cannot_write(store: Store) -> None:
    with pytest.raises(SbxError):
        await store.read(add_key)
    with pytest.raises(SbxError):
        await store.rows("DELETE FROM keys RETURNING id")


@pytest.mark.full_tier
async def test_the_loop_goes_on_while_a_query_takes_long(store: Store) -> None:
    long = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < ?)"
    asked = asyncio.create_task(store.rows(f"{long} SELECT max(i) FROM n", 3_000_000))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert (await asked)[0][0] == 3_000_000
    assert turns > 5


async def test_a_caller_that_is_gone_does_not_undo_its_write(store: Store) -> None:
    writing = asyncio.create_task(store.write(add_key))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await store.write(lambda on: add_key(on, "key-2"))
    assert await key_ids(store) == ["key-1", "key-2"]


@pytest.mark.parametrize("value", [2**63, -(2**70), "\ud800"])
async def test_a_value_that_no_row_can_hold_is_a_bad_request(store: Store, value: object) -> None:
    with pytest.raises(BadRequest):
        await store.rows("SELECT * FROM keys WHERE id = ?", value)
    with pytest.raises(BadRequest):
        await store.write(lambda on: on.execute("DELETE FROM keys WHERE id = ?", (value,)))


async def test_an_error_of_ours_is_broken_and_the_next_write_works(store: Store) -> None:
    for wrong in ("INSERT INTO nowhere VALUES (1)", "INSERT INTO keys (id) VALUES (1)"):
        with pytest.raises(Broken):
            await store.write(lambda on, wrong=wrong: on.execute(wrong))  # type: ignore[misc]
    with pytest.raises(Broken):
        await store.write(lambda on: next(iter(())))
    await store.write(add_key)


async def test_a_closed_store_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    store = await Store.open(path)
    await store.close()
    await store.close()
    with pytest.raises(Closed):
        await store.write(add_key)
    with pytest.raises(Closed):
        await store.rows("SELECT 1")
    store.write_later(add_key)
    assert "is lost" in caplog.text
    ours = set(threading.enumerate()) - before
    assert not [thread for thread in ours if thread.name.startswith("sbx-store")]


async def test_a_disk_that_does_not_answer_is_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_WAIT_S", 0.1)
    stuck = threading.Event()
    with pytest.raises(Unavailable) as refused:
        await store.write(lambda on: stuck.wait(10))
    stuck.set()
    assert refused.value.code == "store_busy"


async def test_another_process_that_writes_is_waited_for_and_then_named(
    store: Store, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await store.rows("SELECT 1 FROM keys")  # readers do not mind
        asked = asyncio.create_task(store.write(add_key))
        await asyncio.sleep(0.2)
        assert not asked.done()
        other.execute("COMMIT")
        await asked


async def test_a_kept_write_does_not_undo_a_newer_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry continued with the writes that it had listed before the newer one came."""
    monkeypatch.setattr(database, "_BUSY_S", 0.1)
    monkeypatch.setattr(pending_writes, "_RETRY_S", 3600.0)  # the test flushes
    async with await Store.open(path) as store:
        await keep_and_write(store, path)
        rows = await store.rows("SELECT directory FROM removals")
        assert [row["directory"] for row in rows] == ["new"]


async def keep_and_write(store: Store, path: Path) -> None:
    pending = PendingWrites(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun, released = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def waits(on: sqlite3.Connection) -> None:
            loop.call_soon_threadsafe(begun.set)
            released.wait(60)

        assert not await pending.write("first", waits)
        assert not await pending.write("one", partial(note_removal, name="old"))
    flushing = asyncio.create_task(pending.flush())
    await begun.wait()  # it is in the middle of its list
    newer = asyncio.create_task(pending.write("one", partial(note_removal, name="new")))
    await asyncio.sleep(0)
    released.set()
    assert await newer
    await flushing
    await pending.close()


async def test_a_refused_write_is_kept_although_its_caller_was_cancelled(store: Store) -> None:
    """The caller cannot see the refusal any more, and nobody else would try again."""
    pending = PendingWrites(store)
    begun, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    attempts = 0

    def refused_once(on: sqlite3.Connection) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            loop.call_soon_threadsafe(begun.set)
            released.wait(60)
            raise sqlite3.OperationalError("database is locked")
        note_removal(on, "kept")

    writing = asyncio.create_task(pending.write("one", refused_once))
    await begun.wait()
    writing.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await pending.close()
    rows = await store.rows("SELECT directory FROM removals")
    assert [row["directory"] for row in rows] == ["kept"]


def note_removal(on: sqlite3.Connection, name: str) -> None:
    on.execute("DELETE FROM removals")
    on.execute("INSERT INTO removals (directory) VALUES (?)", (name,))


# -- the schema ------------------------------------------------------------------------------------


async def test_one_live_sandbox_for_a_session(store: Store) -> None:
    await store.write(lambda on: add_sandbox(on, "1", "sb-session-u-a"))
    with pytest.raises(Broken):
        await store.write(lambda on: add_sandbox(on, "2", "sb-session-u-a"))
    await store.write(lambda on: on.execute("UPDATE sandboxes SET deleted_at = 2"))
    await store.write(lambda on: add_sandbox(on, "2", "sb-session-u-a"))
    await store.write(lambda on: add_sandbox(on, "3"))
    await store.write(lambda on: add_sandbox(on, "4"))


async def test_what_belongs_to_a_sandbox_needs_it_and_goes_with_it(store: Store) -> None:
    with pytest.raises(Broken):
        await store.write(lambda on: events.add(on, "sandbox-none", 1.0, "created"))
    await store.write(add_sandbox)
    await store.write(lambda on: events.add(on, "sandbox-1", 1.0, "created"))
    await store.write(lambda on: on.execute("DELETE FROM sandboxes"))
    assert await store.rows("SELECT * FROM events") == []


async def test_events_come_in_pages_and_the_last_is_the_tombstone(store: Store) -> None:
    await store.write(add_sandbox)

    def several(on: sqlite3.Connection) -> list[events.EventRow]:
        made = [events.add(on, "sandbox-1", float(n), "extended", by=n) for n in range(5)]
        return [*made, events.add(on, "sandbox-1", 9.0, "deleted", "requested")]

    made = await store.write(several)
    assert await events.list_for_sandbox(store, "sandbox-1") == made
    page = await events.list_for_sandbox(store, "sandbox-1", after=made[1].seq, limit=2)
    assert page == made[2:4]
    assert await events.list_for_sandbox(store, "sandbox-2") == []


# -- versions --------------------------------------------------------------------------------------


def store_of_version(path: Path, version: int) -> None:
    """A store as the sbx of that version left it, with a row in each table that it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as on:
        on.execute("PRAGMA journal_mode = WAL")
        migrate(on, [step for step in shipped() if step.version <= version])
        on.execute("PRAGMA foreign_keys = ON")
        add_sandbox(on)
        on.execute(
            "INSERT INTO conversations (sandbox_id, name, directory, created_at, last_used_at)"
            " VALUES ('sandbox-1', 'default', 'd', 1, 1)"
        )
        on.execute(
            "INSERT INTO uploads (sandbox_id, conversation, name, size, sha256, uploaded_at,"
            " uploaded_by) VALUES ('sandbox-1', 'default', 'a.csv', 1, 'x', 1, 'me')"
        )
        on.execute(
            "INSERT INTO runs (id, sandbox_id, conversation, kind, code, status, started_at)"
            " VALUES ('run-1', 'sandbox-1', 'default', 'python', '1+1', 'ok', 1)"
        )
        add_key(on)
        on.execute(
            "INSERT INTO tokens (id, owner, user_id, created_at, expires_at)"
            " VALUES ('tok-1', 'me', 'u', 1, 2)"
        )
        on.execute(
            "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
            " VALUES ('me', 'k', 'f', 201, x'7b7d', 1)"
        )
        events.add(on, "sandbox-1", 1.0, "created")
        if version >= 2:
            on.execute(
                "INSERT INTO contexts (sandbox_id, conversation, name, created_at)"
                " VALUES ('sandbox-1', 'default', 'other', 1)"
            )
        if version >= 3:
            add_agent_rows(on)


def add_agent_rows(on: sqlite3.Connection) -> None:
    on.execute(
        "INSERT INTO projects (id, owner, name, working_directory, created_at)"
        " VALUES ('project-1', 'me', 'site', '/srv/site', 1)"
    )
    on.execute(
        "INSERT INTO chats (id, owner, conversation_id, user_id, agent_id, sandbox_id, project_id,"
        " created_at, last_used_at) VALUES ('chat-1', 'me', 'default', 'u', 'a', 'sandbox-1',"
        " 'project-1', 1, 1)"
    )
    on.execute(
        "INSERT INTO messages (chat_id, seq, role, message, created_at)"
        " VALUES ('chat-1', 1, 'user', '{}', 1)"
    )
    on.execute(
        "INSERT INTO agent_runs (id, chat_id, status, model, max_steps, started_at)"
        " VALUES ('arun-1', 'chat-1', 'ended', 'm', 10, 1)"
    )
    on.execute(
        "INSERT INTO approvals (tool_call_id, chat_id, run_id, tool_name, tool_args, created_at,"
        " expires_at) VALUES ('call-1', 'chat-1', 'arun-1', 'execute_command', '{}', 1, 2)"
    )
    on.execute(
        "INSERT INTO approval_rules (id, owner, project_id, tool_name, kind, text, made_by,"
        " created_at) VALUES ('rule-1', 'me', 'project-1', 'execute_command', 'exact', 'ls', 'me',"
        " 1)"
    )


TABLES = (
    *("workspaces", "sandboxes", "conversations", "uploads", "runs"),
    *("keys", "tokens", "idempotency", "events"),
)
AGENT_TABLES = ("projects", "chats", "messages", "agent_runs", "approvals", "approval_rules")


# What was shipped stands: stores of that version are out there. A change is a step of its own.
SHIPPED = {
    1: "45d2d93078b43b3713f43fdbb344a86a72f7a7ec570e65a834023c2360f8626c",
    2: "7c62813a530bd92ab6cf63c02d4ecb2910c68a1ac10731e37811efbd1f2b07ff",
    3: "a59cf7f727c8668c2a0cbefbeb1fcc844181e3f14fb82120e5634c09c4d7447d",
    4: "b7b171fd7932b78f14ca00c5b5511831a85491919f4529df8afe423d6b976429",
    5: "1b83a0537e2797b64688417752e7bbb02cc0e2f84ed1eb664070e57a374536b2",
    6: "923e6f4facd35cf1b3061111a4827f5e06c161f37ac2ef4604bb5e08e2ee8d95",
    7: "fa7c282be7e7ffcf47fc973803f445c0774fd9f6af8f70782d4ebf8d6455d16f",
    8: "91902bdf818a6dbef7e1774e93a4031791e60bcadc0d59d621e3b368821082c3",
    9: "c88881d607794fc103cebe3aaed354506ff75cfba54de8d3edff625086a57ee5",
    10: "55bf472a7d8896ab9bad9ebe3545050053471e3c44d2712256976119471c5f80",
    11: "991727ec51e68aec3d83d418ce52ddf6156b7522af7eb5c210a254f542543a46",
    12: "a1b32032088cda1d728c212fea711e6983079ac1a466bf8ffbe683b2c139e89a",
    13: "fdb90d7c0eeec1a772b08859988b92f0a814fd94f43c2dae0001dd4a4851ecaa",
    14: "010de0ca0ad8bdeb03e905e3cba18365803acfce182c05e06f8ccff0471ea271",
    15: "f188eb74229d229eef270b8095b5c4086d78a0ec96655057d3afaa75c6c7843f",
    16: "f699b95354a438ba76791e4d42e96a41993fcc8bb0f70ffe188a7a24fef0f197",
    17: "202f0de0ed1cd56f1a9f8df3a09da2b7d4fce285aaf680a7fcde12450f4dce83",
    18: "9dece7267875ac0f67508efbb0699afc6cd2bf5ba844d26a6dce30f741392a88",
}


def test_steps_that_were_shipped_are_never_changed() -> None:
    assert {one.version: sha256(one.sql.encode()).hexdigest() for one in shipped()} == SHIPPED


@pytest.mark.full_tier
@pytest.mark.parametrize("version", [step.version for step in shipped()])
async def test_a_store_of_every_version_opens_with_its_rows(path: Path, version: int) -> None:
    store_of_version(path, version)
    async with await Store.open(path) as store:
        assert await store.read(version_of) == NEWEST
        for table in TABLES:
            assert len(await store.rows(f"SELECT * FROM {table}")) == 1, table
        assert (await store.rows("SELECT context FROM runs"))[0]["context"] == "default"
        assert len(await store.rows("SELECT * FROM contexts")) == (version >= 2)
        for table in AGENT_TABLES:
            assert len(await store.rows(f"SELECT * FROM {table}")) == (version >= 3), table
    async with await Store.open(path):
        pass  # and again, now that nothing is left to migrate


async def test_a_sandbox_of_an_older_store_keeps_its_policy_and_its_events(path: Path) -> None:
    store_of_version(path, 13)
    with closing(sqlite3.connect(path, isolation_level=None)) as on:
        events.add(on, "sandbox-1", 2.0, "created", profile="strict")
        events.add(on, "sandbox-1", 3.0, "mounted", target='{"profile": "')
    async with await Store.open(path) as store:
        assert [row.policy_name for row in await sandboxes.living(store)] == ["default"]
        kept = await events.list_for_sandbox(store, "sandbox-1", after=1, limit=9)
        assert [event.details for event in kept] == [
            {"policy": "strict"},
            {"target": '{"profile": "'},
        ]


async def test_a_chat_of_an_older_store_asks_about_every_change(path: Path) -> None:
    store_of_version(path, 3)
    async with await Store.open(path) as store:
        assert await chats.changes_setting(store, "chat-1") == ChangesSetting("ask", ())
        wanted = ChangesSetting("allow", ("tests", "docs/é"))
        await chats.set_changes(store, "chat-1", wanted)
        assert await chats.changes_setting(store, "chat-1") == wanted
        assert await chats.changes_setting(store, "none") == ChangesSetting()


async def test_an_older_store_keeps_its_idempotency_keys(path: Path) -> None:
    """Each space gets its kind; a row of an owner that is named like a token's space is dropped."""
    forged = '["ann", "u1", "a1", null, null]'
    token = '["ann", "u2", "a1", null, null]'
    owners = ["ann", 'b"b', "uid:7", "uid:x", token, forged, "é"]
    store_of_version(path, 4)
    with closing(sqlite3.connect(path)) as on:
        on.execute("DELETE FROM idempotency")
        on.executemany(
            "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
            " VALUES (?, 'k', 'f', 200, 'done', 1)",
            [(owner,) for owner in owners],
        )
        on.execute(
            "INSERT INTO keys (id, hash, owner, created_at) VALUES ('k-2', 'h2', ?, 1)",
            (forged,),
        )
        on.commit()
    async with await Store.open(path) as store:
        rows = await store.rows("SELECT owner FROM idempotency ORDER BY rowid")
    assert [row["owner"] for row in rows] == [
        Caller("ann", "key").space,
        Caller('b"b', "key").space,
        Caller("uid:7", "peer").space,
        Caller("uid:x", "key").space,
        Caller("ann", "token", user_id="u2", agent_id="a1").space,
    ]


async def test_two_users_of_an_older_store_may_have_one_conversation_id(path: Path) -> None:
    store_of_version(path, 4)
    async with await Store.open(path) as store:
        (before,) = await chats.list_for_owner(store, "me")
        theirs = replace(before, id="chat-2", user_id="another")
        assert await chats.ensure(store, theirs) == theirs
        names = await chats.named(store, "me", before.conversation_id)
        assert {row.id for row in names} == {before.id, "chat-2"}


@pytest.mark.parametrize("version", [1, 2])
async def test_an_older_store_takes_the_agents_rows_once_it_is_migrated(
    path: Path, version: int
) -> None:
    store_of_version(path, version)
    async with await Store.open(path) as store:
        await store.write(add_agent_rows)
        project = (await store.rows("SELECT * FROM projects"))[0]
        assert project["sandbox_enabled"] == 1
        await store.write(lambda on: on.execute("DELETE FROM projects"))
        for table in AGENT_TABLES:
            assert not await store.rows(f"SELECT * FROM {table}"), table


async def test_a_step_may_rebuild_a_table_that_others_refer_to(path: Path) -> None:
    store_of_version(path, 1)
    rebuilt = (
        "CREATE TABLE anew (id TEXT PRIMARY KEY, owner TEXT, directory TEXT);"
        "INSERT INTO anew SELECT id, owner, directory FROM workspaces;"
        "DROP TABLE workspaces; ALTER TABLE anew RENAME TO workspaces;"
    )
    async with await Store.open(path, migrations=[*shipped(), Migration(NEXT, rebuilt)]) as store:
        assert await store.read(version_of) == NEXT
        assert len(await store.rows("SELECT * FROM sandboxes")) == 1


@pytest.mark.parametrize(
    "wrong",
    ["CREATE TABLE later (id); INSERT INTO nowhere VALUES (1);", "DELETE FROM workspaces;"],
    ids=["fails in the middle", "breaks a reference"],
)
async def test_a_step_that_fails_leaves_the_version_before(path: Path, wrong: str) -> None:
    store_of_version(path, NEWEST)
    with pytest.raises(SbxError):
        await Store.open(path, migrations=[*shipped(), Migration(NEXT, wrong)])
    async with await Store.open(path) as store:
        assert await store.read(version_of) == NEWEST
        assert not await store.rows("SELECT * FROM sqlite_master WHERE name = 'later'")
        assert len(await store.rows("SELECT * FROM workspaces")) == 1


# -- refusals --------------------------------------------------------------------------------------


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in directory.iterdir()}


@contextmanager
def refused_untouched(path: Path, code: str) -> Iterator[None]:
    before = bytes_of(path.parent)
    with pytest.raises(Unavailable) as refused:
        yield
    assert refused.value.code == code
    assert bytes_of(path.parent) == before


async def copy_of_a_killed_store(path: Path, to: Path) -> Path:
    """What lies there when a process dies: the file, and a log that was not folded in."""
    async with await Store.open(path) as store:
        for number in range(50):
            await store.write(lambda on, number=number: add_key(on, f"key-{number}"))  # type: ignore[misc]
        to.mkdir()
        for name in ("sbx.db", "sbx.db-wal"):
            shutil.copy(path.parent / name, to / name)
    return to / "sbx.db"


async def test_a_newer_store_is_refused_and_left_as_it_was(path: Path) -> None:
    await (await Store.open(path, migrations=[*shipped(), Migration(NEXT, "")])).close()
    with refused_untouched(path, "store_newer"):
        await Store.open(path)


async def test_a_version_that_only_the_log_knows_is_refused_too(path: Path, tmp_path: Path) -> None:
    killed = await copy_of_a_killed_store(path, tmp_path / "killed")
    with closing(sqlite3.connect(killed)) as on:
        on.execute(f"PRAGMA user_version = {NEXT}")
        (tmp_path / "newer").mkdir()
        for name in ("sbx.db", "sbx.db-wal"):
            shutil.copy(killed.parent / name, tmp_path / "newer" / name)
    with refused_untouched(tmp_path / "newer" / "sbx.db", "store_newer"):
        await Store.open(tmp_path / "newer" / "sbx.db")


CORRUPTIONS = {
    "text": b"this is no store\n" * 100,
    "zeros": bytes(4096),
    "short": b"SQLite",
    "magic only": b"SQLite format 3\0",
    "magic and noise": b"SQLite format 3\0" + os.urandom(8192),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
async def test_what_is_no_store_is_refused_and_left_as_it_was(path: Path, kind: str) -> None:
    path.parent.mkdir()
    path.write_bytes(CORRUPTIONS[kind])
    with refused_untouched(path, "store_corrupt"):
        await Store.open(path)


async def test_another_programs_file_is_refused_and_left_as_it_was(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as on:
        on.execute("CREATE TABLE bookmarks (url TEXT)")
    with refused_untouched(path, "store_corrupt"):
        await Store.open(path)


async def test_a_damaged_page_is_refused_and_left_as_it_was(path: Path) -> None:
    store_of_version(path, NEWEST)
    content = bytearray(path.read_bytes())
    for page in range(1, len(content) // 4096):
        content[page * 4096 : page * 4096 + 200] = os.urandom(200)
    path.write_bytes(content)
    with refused_untouched(path, "store_corrupt"):
        await Store.open(path)


async def test_a_file_that_lost_its_end_is_refused_and_left_as_it_was(path: Path) -> None:
    store_of_version(path, NEWEST)
    path.write_bytes(path.read_bytes()[: 5 * 4096])
    with refused_untouched(path, "store_corrupt"):
        await Store.open(path)


async def test_a_file_emptied_beside_its_log_is_refused(path: Path, tmp_path: Path) -> None:
    """SQLite itself would throw the log away, and with it what could still be saved."""
    killed = await copy_of_a_killed_store(path, tmp_path / "killed")
    killed.write_bytes(b"")
    with refused_untouched(killed, "store_corrupt"):
        await Store.open(killed)


async def test_a_link_or_a_directory_is_refused(tmp_path: Path) -> None:
    await (await Store.open(tmp_path / "real.db")).close()
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    (tmp_path / "directory.db").mkdir()
    for name in ("link.db", "directory.db"):
        with pytest.raises(Unavailable):
            await Store.open(tmp_path / name)


async def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    async with await Store.open(path) as store:
        await store.write(add_key)


async def test_what_a_killed_first_start_left_is_cleared(path: Path) -> None:
    path.parent.mkdir()
    (path.parent / ".sbx.db.new").write_bytes(b"half")
    (path.parent / ".sbx.db.new-wal").write_bytes(b"half")
    async with await Store.open(path):
        pass
    assert [item.name for item in path.parent.iterdir()] == ["sbx.db"]


@pytest.mark.full_tier
@pytest.mark.parametrize("kept", [0, 31, 32, 5000, -1])
async def test_a_log_that_lost_its_end_gives_the_writes_before_it(
    path: Path, tmp_path: Path, kept: int
) -> None:
    killed = await copy_of_a_killed_store(path, tmp_path / "killed")
    log = killed.with_name("sbx.db-wal")
    log.write_bytes(log.read_bytes()[:kept])
    async with await Store.open(killed) as store:
        ids = await key_ids(store)
        assert ids == [f"key-{number}" for number in range(len(ids))]
        await store.write(lambda on: add_key(on, "after"))


async def test_a_log_with_a_flipped_byte_gives_the_writes_before_it(
    path: Path, tmp_path: Path
) -> None:
    killed = await copy_of_a_killed_store(path, tmp_path / "killed")
    log = killed.with_name("sbx.db-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    async with await Store.open(killed) as store:
        ids = await key_ids(store)
        assert 0 < len(ids) < 50
        assert ids == [f"key-{number}" for number in range(len(ids))]


@pytest.mark.needs("root")
async def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """By a read-only mount, as root writes past the mode of a directory."""
    path = tmp_path / "data" / "sbx.db"
    await (await Store.open(path)).close()
    with mounted("--bind", "-o", "ro", path.parent, path.parent):
        with refused_untouched(path, "store_unusable"):
            await Store.open(path)
        with refused_untouched(path, "store_unusable"):
            await Store.open(path.parent / "another.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes past the mode of a directory")
async def test_a_directory_of_a_mode_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    with pytest.raises(Unavailable) as refused:
        await Store.open(tmp_path / "data" / "sbx.db")
    assert refused.value.code == "store_unusable"


# -- a full disk -----------------------------------------------------------------------------------


@contextmanager
def mounted(*words: str | Path) -> Iterator[None]:
    subprocess.run(["mount", *words], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", words[-1]], check=True)


@pytest.mark.needs("root")
async def test_a_full_disk_refuses_the_write_and_keeps_the_rest(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1M", "none", small):
        async with await Store.open(small / "sbx.db") as store:
            await store.write(add_key)
            with pytest.raises(Unavailable) as refused:
                await fill_up(store)
            written = await rows_of(store)
            assert written > 5
            assert refused.value.code == "no_space"
            await store.write(lambda on: on.execute("DELETE FROM idempotency WHERE created_at < 0"))
        async with await Store.open(small / "sbx.db") as store:
            assert await rows_of(store) == written


@pytest.mark.needs("root")
async def test_a_disk_too_small_for_a_store_leaves_none(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=64k", "none", small):
        with pytest.raises(Unavailable) as refused:
            await Store.open(small / "sbx.db")
        assert refused.value.code == "no_space"
        assert list(small.iterdir()) == []


async def fill_up(store: Store) -> None:
    for number in range(1000):
        row = ("me", str(number), "f", 200, bytes(16_384), 1.0)
        await store.write(
            lambda on, row=row: on.execute(  # type: ignore[misc]
                "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )
        )


async def rows_of(store: Store) -> int:
    row = await store.row("SELECT count(*) FROM idempotency")
    assert row is not None
    return int(row[0])


# -- a check that would take too long --------------------------------------------------------------


async def test_the_check_of_a_large_store_is_left_when_it_takes_too_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of_version(path, NEWEST)
    monkeypatch.setattr(database, "_CHECK_S", -1.0)
    monkeypatch.setattr(database, "_CHECK_STEPS", 1)
    async with await Store.open(path):
        pass
