"""The service opens a data directory that commit baed541, with version 6 of the store, left.

`stores/version_6.tar.gz` was made by the service of that commit, stopped cleanly. It has sandboxes
with files, a session, a shared workspace, a sandbox that a honeytoken froze, one that an operator
unfroze and one that was deleted; runs, an upload, chats, approvals and an idempotency key.
"""

import asyncio
import json
import os
import sqlite3
import tarfile
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path

import pytest
from persistent_sandboxes import ME, open_service, run

from sbx.errors import Conflict
from sbx.protocol.approvals import ApprovalScope
from sbx.protocol.runs import Cause, Status
from sbx.service.lifecycle import State
from sbx.service.maintenance.backup import backup
from sbx.service.maintenance.check import check
from sbx.service.maintenance.repair import repair
from sbx.service.service import Service
from sbx.store import FILE_NAME, Store, chats
from sbx.store.approvals import ApprovalStore
from sbx.store.messages import Messages
from sbx.store.migrations import shipped, version_of
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.needs("namespaces")

BOX, SESSION = "sandbox-378ae4cbd8a6", "sandbox-d3ee60fb366d"
WORKSPACE, UNUSED = "ws-8643e7cbb204", "ws-b39be71898da"
SHARING = ("sandbox-dc5f0e777cf8", "sandbox-73ff04da6670")
FROZEN, UNFROZEN, DELETED = "sandbox-923f79244023", "sandbox-3df1f4844a6b", "sandbox-39238f0f2046"
UIDS = (700_000, 1_000)
DRY_RUN = {"status": "ok", "exit_code": 0, "changes": [{"path": "a.txt", "kind": "created"}]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with tarfile.open(Path(__file__).parent / "stores" / "version_6.tar.gz") as archive:
        archive.extractall(path, numeric_owner=True, filter="fully_trusted")
    if os.geteuid() != 0:
        for entry in (path, *path.rglob("*")):
            entry.chmod(entry.stat().st_mode | 0o700)
    policies = tmp_path / "policies"
    policies.mkdir()
    (policies / "trapped.toml").write_text(
        'schema = 1\nextends = "default"\n[pool]\nmin_idle = 0\nmax_idle = 0\n'
        "[honeytoken]\nenabled = true\n"
    )
    return path


def opened(data: Path) -> AbstractAsyncContextManager[Service]:
    return open_service(data, policy_dirs=(data.parent / "policies",), uid_range=UIDS)


async def files(service: Service, sandbox_id: str, name: str, conversation: str = "default") -> str:
    async with service.sandboxes.using(ME, sandbox_id, scope="files:read") as use:
        return await use.conversation(conversation).files.read(name)


@pytest.mark.full_tier
async def test_sandboxes_of_version_6_have_their_files_and_state(data: Path) -> None:
    async with opened(data) as service:
        assert await service.store.read(version_of) == shipped()[-1].version
        page = await service.sandboxes.list(ME)
        assert {view.id for view in page.items} == {BOX, SESSION, *SHARING, FROZEN, UNFROZEN}
        assert await files(service, BOX, "kept.txt") == "kept by an earlier version"
        assert await files(service, SESSION, "kept.txt", "talk") == "kept in a session"
        assert [await files(service, each, "shared.txt") for each in SHARING] == ["seen by two"] * 2
        names = {view.name for view in await service.sandboxes.conversations(ME, SESSION)}
        assert names == {"talk"}
        workspaces = {view.id: view for view in service.workspaces.list(ME).items}
        assert set(workspaces) == {WORKSPACE, UNUSED}
        assert workspaces[WORKSPACE].size_limit_mb == 64
        assert (await run(service, BOX, "open('kept.txt').read()")).state_lost
        async with service.sandboxes.using(ME, BOX, scope="execute") as use:
            assert use.conversation().contexts.find("other").name == "other"
            (upload,) = await use.conversation().uploads.list()
            assert await use.conversation().uploads.read_bytes(upload.name) == b"a,b\n1,2\n"
        rows = await service.store.rows("SELECT * FROM uploads")
        assert [(row["name"], row["sha256"]) for row in rows] == [("data.csv", upload.sha256)]
        with pytest.raises(Conflict, match="in use"):
            await service.workspaces.delete(ME, WORKSPACE)


async def test_runs_and_events_of_version_6_have_the_words_of_today(data: Path) -> None:
    async with opened(data) as service:
        rows, count = await service.runs.history.entries(ME, BOX)
        assert [row.kind for row in rows] == ["shell", "python", "python"]
        assert (count, rows[-1].description, rows[-1].tags) == (3, "the answer", "math")
        assert rows[-1].run is not None
        assert rows[-1].run.stdout == "42\n"
        (killed,), _ = await service.runs.history.entries(ME, FROZEN)
        assert (killed.status, killed.cause) == (Status.KILLED, Cause.HONEYTOKEN)
        assert killed.run is not None
        assert killed.run.cause is Cause.HONEYTOKEN
        events = (await service.events.page(ME, UNFROZEN)).items
        assert [event.type for event in events] == ["created", "started", "honeytoken", "unfrozen"]
        assert events[2].details == {"token": "GITHUB_TOKEN", "where": "an output"}
        assert (await service.events.page(ME, DELETED)).items[-1].type == "deleted"


@pytest.mark.full_tier
async def test_sandbox_that_version_6_froze_starts_only_once_it_is_unfrozen(data: Path) -> None:
    async with opened(data) as service:
        view = await service.sandboxes.get(ME, FROZEN)
        assert view.state is State.FAILED
        with pytest.raises(Conflict) as refused:
            async with service.sandboxes.using(ME, FROZEN, scope="execute") as use:
                await use.conversation().start()
        assert refused.value.code == "honeytoken"
        assert refused.value.details["token"] == "GITHUB_TOKEN"
        assert service.sandboxes.index.get_as_operator(ME, FROZEN).unfreeze()
        assert (await run(service, FROZEN, "1 + 1")).result == "2"


async def test_chats_approvals_and_keys_of_version_6_are_kept(data: Path) -> None:
    async with opened(data) as service:
        store = service.store
        assert {row.id for row in await chats.list_for_owner(store, "me")} == {"chat-1", "chat-2"}
        assert (await chats.changes_setting(store, "chat-2")).mode == "allow"
        messages, _ = await Messages(store, FakeClock()).page("chat-1")
        assert [row.message["content"] for row in messages] == ["rehearse the tripwire", "done"]
        approvals = ApprovalStore(store, service.pending)
        decided = await approvals.get("call-1")
        assert decided is not None
        assert decided.dry_run == DRY_RUN
        assert decided.decision is not None
        pending = await approvals.pending(
            ApprovalScope("me"), now=service.clock.now(), after=0, limit=10
        )
        assert [(each.tool_call_id, each.dry_run) for each in pending] == [("call-2", DRY_RUN)]

        async def not_again() -> tuple[int, bytes]:
            raise AssertionError("the call was made again")

        reply = await service.replies.once(ME, "made-before", "POST /v1/sandboxes", not_again)
        assert reply == (201, json.dumps({"id": BOX}).encode())
        assert len(await service.access.keys()) == len(await service.access.tokens()) == 1


async def test_maintenance_takes_a_store_of_version_6(data: Path, tmp_path: Path) -> None:
    result = check(data)
    assert (result.ok, result.version) == (True, 6)
    backup(data, tmp_path / "backup", force=False)
    assert (await asyncio.to_thread(repair, data)).replaced is None
    async with opened(data) as service:
        assert await files(service, BOX, "kept.txt") == "kept by an earlier version"


@pytest.mark.full_tier
async def test_repair_of_a_damaged_store_of_version_6_saves_its_workspaces(data: Path) -> None:
    path = data / FILE_NAME
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tokens'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    tables = (await asyncio.to_thread(repair, data)).tables
    assert tables["cargos"].saved == 7
    async with await Store.open_in(data) as store:
        assert len(await store.rows("SELECT * FROM workspaces")) == 7
