"""Contexts in a service: what becomes of them when their sandbox is idle, stopped, restarted,
deleted, or needs room; and who may reach them."""

import asyncio
import json
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest
from live_app import live
from persistent_sandboxes import ME, eventually, open_service, printed, run, state_events
from places import short_directory
from serving import Service as ServeProcess

from sbx.errors import Conflict, NotFound, SbxError, Unavailable
from sbx.protocol.runs import Cause, Run
from sbx.runtime.run.context import Context
from sbx.runtime.run.contexts import Contexts
from sbx.service.run import RunHandle, RunRequest
from sbx.service.service import Service
from sbx.store.conversations import ContextRow, add_context
from tests.fake_clock import FakeClock

HANG = "import time; print('on', flush=True); time.sleep(60)"


async def began(service: Service, sandbox_id: str, code: str, context: str) -> RunHandle:
    return await service.runs.start(
        ME, sandbox_id, "default", RunRequest("python", code, context=context)
    )


async def ran(service: Service, sandbox_id: str, code: str, context: str = "other") -> Run:
    return await (await began(service, sandbox_id, code, context)).result()


async def create(service: Service, sandbox_id: str, name: str = "other") -> None:
    async with service.sandboxes.using(ME, sandbox_id, scope="execute") as use:
        await use.conversation().contexts.create(name)


async def names(service: Service, sandbox_id: str) -> list[str]:
    async with service.sandboxes.using(ME, sandbox_id, scope="execute", starts=False) as use:
        return [one.name for one in await use.conversation().contexts.list()]


async def test_a_context_of_a_deleted_conversation_is_not_stored_for_a_later_one(
    tmp_path: Path,
) -> None:
    """A write that was under way while the conversation was deleted and created again left a
    context that no kernel belonged to."""
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        directories = []
        for _ in range(2):
            await run(service, made.id, "1")
            (row,) = await service.store.rows("SELECT directory FROM conversations")
            directories.append(row["directory"])
            if len(directories) == 1:
                await service.sandboxes.delete_conversation(ME, made.id, "default")
        late = ContextRow(made.id, "default", "late", 1.0)
        outcomes = [
            await service.store.write(partial(add_context, row=late, directory=directory))
            for directory in directories
        ]
    assert outcomes == [False, True]


async def test_a_context_that_is_deleted_while_it_starts_is_not_stored(tmp_path: Path) -> None:
    """The store was asked to drop the name, and then to add it: a row that no context had."""
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        await run(service, made.id, "1")
        disk = threading.Event()
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            contexts = use.conversation().contexts
            service.store.write_later(lambda on: disk.wait(30))
            creating = asyncio.create_task(contexts.create("other"))
            await asyncio.sleep(0)
            starting = contexts.find("other")
            deleting = asyncio.create_task(contexts.delete("other"))
            await eventually(lambda: creating.done() or starting.alive)
            disk.set()
            outcomes = await asyncio.gather(creating, deleting, return_exceptions=True)
            assert [one.name for one in contexts.ending] == ["default"]
        assert await service.store.rows("SELECT * FROM contexts") == []
        assert isinstance(outcomes[0], Conflict)


@pytest.mark.full_tier
@pytest.mark.core
async def test_contexts_outlive_an_idle_time_out_and_a_restart_and_say_what_was_lost(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with open_service(tmp_path / "data", clock, idle_timeout=100) as service:
        made = await service.sandboxes.create(ME)
        await create(service, made.id, "gone")
        await create(service, made.id)
        await ran(service, made.id, "x = 1")
        clock.advance(101)
        await service.reaper.round()
        assert ("stopped", "idle_timeout") in await state_events(service, made.id)
        assert (await ran(service, made.id, "'x' in globals()")).state_lost
        assert not (await ran(service, made.id, "1")).state_lost
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            await use.conversation().contexts.delete("gone")
    async with open_service(tmp_path / "data", clock) as service:
        assert await names(service, made.id) == ["default", "other"]
        later = await ran(service, made.id, "'x' in globals()")
        assert (later.result, later.state_lost) == ("False", True)
        await create(service, made.id, "gone")
        assert not (await ran(service, made.id, "1", "gone")).state_lost
        assert not (await ran(service, made.id, "1", "default")).state_lost
        await service.sandboxes.stop(ME, made.id)
        assert not (await ran(service, made.id, "1")).state_lost


@pytest.mark.full_tier
async def test_a_context_counts_as_a_kernel_and_makes_room(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", kernels_max=2) as service:
        made = await service.sandboxes.create(ME)
        await run(service, made.id, "x = 1")
        await create(service, made.id, "a")
        await create(service, made.id, "b")  # for which the first kernel goes
        page = await service.events.page(ME, made.id)
        assert (page.items[-1].type, page.items[-1].details.get("context")) == ("started", "b")
        handles = [await began(service, made.id, HANG, name) for name in "ab"]
        for handle in handles:
            await printed(handle)
        with pytest.raises(Unavailable) as full:
            await create(service, made.id, "c")
        assert full.value.code == "too_many_kernels"
        assert await names(service, made.id) == ["default", "a", "b"]
        await handles[0].interrupt()
        await handles[0].result()
        assert (await run(service, made.id, "'x' in globals()")).state_lost
        await state_events(service, made.id)
        page = await service.events.page(ME, made.id)
        made_room = [one for one in page.items if one.cause == "kernels_max"]
        assert [one.details.get("context") for one in made_room] == [None, "a"]


@pytest.mark.full_tier
async def test_runs_are_in_the_history_with_their_context(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        await create(service, made.id)
        await ran(service, made.id, "'there'")
        await run(service, made.id, "'here'")
        rows, _ = await service.runs.history.entries(ME, made.id)
        assert [(one.code, one.context) for one in rows] == [
            ("'here'", "default"),
            ("'there'", "other"),
        ]


async def test_a_queue_is_a_context_s_own(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", queue_max=1) as service:
        made = await service.sandboxes.create(ME)
        await create(service, made.id)
        handle = await began(service, made.id, HANG, "other")
        await printed(handle)
        await began(service, made.id, "1", "other")
        with pytest.raises(Unavailable) as full:
            await began(service, made.id, "1", "other")
        assert full.value.code == "queue_full"
        assert (await run(service, made.id, "1")).result == "1"
        assert not await service.runs.interrupt(ME, made.id, "default")
        assert await service.runs.interrupt(ME, made.id, "default", "other")


@pytest.mark.full_tier
async def test_files_are_put_away_only_when_no_context_uses_them(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        service.sandboxes.open_limit.most = 1
        await create(service, made.id)
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            talk = use.conversation()
            await talk.contexts.default.stop()
            await use.conversation("second").files.list()
            assert not talk.close_if_idle()
            handle = await began(service, made.id, "open('mine', 'w').write('1'); 'ok'", "other")
            assert (await handle.result()).result == "'ok'"
            await (await talk.contexts.get("other")).stop()
            assert talk.close_if_idle()
        assert (await ran(service, made.id, "open('mine').read()")).result == "'1'"


@pytest.mark.full_tier
async def test_what_is_deleted_with_its_conversation_does_not_come_back(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        await create(service, made.id)
        handle = await began(service, made.id, HANG, "other")
        await printed(handle)
        await service.sandboxes.delete_conversation(ME, made.id, "default")
        ended = await handle.result()
        assert ended.error is not None
        assert (ended.status, ended.error.name) == ("interrupted", "ConversationDeleted")
        assert await names(service, made.id) == ["default"]
        with pytest.raises(NotFound):
            await ran(service, made.id, "1")
        await create(service, made.id)
        assert not (await ran(service, made.id, "1")).state_lost


@pytest.mark.full_tier
@pytest.mark.parametrize("end", ["conversation", "sandbox", "stop", "context", "caller"])
async def test_what_ends_while_a_context_starts_ends_it_and_leaves_nothing(
    tmp_path: Path, end: str
) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        await run(service, made.id, "1")
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            contexts = use.conversation().contexts
        held = asyncio.create_task(contexts.create("other"))
        one = await _starting(contexts)
        async with asyncio.timeout(60):
            match end:
                case "conversation":
                    await service.sandboxes.delete_conversation(ME, made.id, "default")
                case "sandbox":
                    await service.sandboxes.delete(ME, made.id)
                case "stop":
                    await service.sandboxes.stop(ME, made.id)
                case "context":
                    await contexts.delete("other")
                case "caller":
                    held.cancel()
            with pytest.raises((SbxError, asyncio.CancelledError)):
                await held
        assert not one.alive
        assert one not in contexts.ending
        left = await service.store.rows("SELECT name FROM contexts")
        assert left == []


async def _starting(contexts: Contexts) -> Context:
    """The context, as soon as its kernel is on its way."""
    async with asyncio.timeout(60):
        while (one := contexts._others.get("other")) is None or not one._starting.locked():  # noqa: ASYNC110
            await asyncio.sleep(0)
    return one


@pytest.mark.full_tier
async def test_a_disk_limit_ends_who_grows_and_leaves_an_idle_one(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        narrower = {"limits": {"workspace_max": "8MiB"}}
        made = await service.sandboxes.create(ME, narrower=narrower)
        await run(service, made.id, "x = 1")
        await create(service, made.id)
        # What has done something since the last look at the disk is a suspect.
        living = next(iter(service.sandboxes.every()))
        assert living.active is not None
        watch = living.active.conversation("default").contexts.default.disk
        await eventually(lambda: not watch._active.is_set() and watch not in watch._shared.stir)
        code = "import time\nopen('big', 'wb').write(b'1' * (16 << 20)); time.sleep(50)"
        grown = await ran(service, made.id, code)
        assert (grown.status, grown.cause) == ("killed", Cause.DISK)
        assert (await run(service, made.id, "import time; time.sleep(1.2); x")).result == "1"
        assert (await ran(service, made.id, "import os; os.remove('big')")).state_lost


@pytest.mark.full_tier
async def test_a_disk_limit_is_not_evaded_beside_a_busy_context(tmp_path: Path) -> None:
    """Whoever looks first cannot know who wrote: so both that ran end, and not only one."""
    async with open_service(tmp_path / "data") as service:
        narrower = {"limits": {"workspace_max": "8MiB"}}
        made = await service.sandboxes.create(ME, narrower=narrower)
        await create(service, made.id)
        beside = await began(service, made.id, "import time; time.sleep(50)", "default")
        code = "import time\nopen('big', 'wb').write(b'1' * (16 << 20)); time.sleep(50)"
        grown = await ran(service, made.id, code)
        assert (grown.status, grown.cause) == ("killed", Cause.DISK)
        assert (await beside.result()).cause is Cause.DISK


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_the_routes_tell_what_there_is_and_refuse_what_is_not(tmp_path: Path) -> None:
    with short_directory() as directory:
        async with live(directory) as served, served.client() as client:
            box = (await client.post("/v1/sandboxes", json={})).json()["id"]
            talk = f"/v1/sandboxes/{box}/conversations/default"
            made = await client.post(f"{talk}/contexts", json={"name": "other"})
            assert (made.status_code, made.json()["status"]) == (201, "ready")
            assert made.json()["receipt"]["host_uid"] != 0
            ask = {"code": "x = 1", "context": "other"}
            assert (await client.post(f"{talk}/runs", json=ask)).json()["status"] == "ok"
            listed = (await client.get(f"{talk}/contexts")).json()
            shown = [(one["name"], one["status"]) for one in listed["items"]]
            assert shown == [("default", "idle"), ("other", "ready")]
            kernels = (await client.get(f"/v1/sandboxes/{box}/inspect")).json()["kernels"]
            assert [(one["conversation"], one["context"]) for one in kernels] == [
                ("default", "other")
            ]
            assert (await client.get(f"{talk}/receipt")).json() == {"receipt": None}
            again = await client.post(f"{talk}/contexts", json={"name": "other"})
            assert (again.status_code, again.json()["error"]["code"]) == (409, "context_exists")
            unknown = await client.post(f"{talk}/runs", json={"code": "1", "context": "no"})
            assert unknown.status_code == 404
            wrong = await client.post(f"{talk}/runs", json={"code": "1", "context": "a/b"})
            assert wrong.status_code == 400
            restarted = await client.post(f"{talk}/contexts/other/restart")
            assert restarted.json()["receipt"]["host_uid"] != 0
            ask = {"code": "'x' in globals()", "context": "other"}
            assert (await client.post(f"{talk}/runs", json=ask)).json()["result"] == "False"
            interrupted = await client.post(f"{talk}/contexts/other/interrupt")
            assert interrupted.json() == {"interrupted": False}
            for code in (204, 404):
                assert (await client.delete(f"{talk}/contexts/other")).status_code == code
            history = (await client.get(f"/v1/sandboxes/{box}/history")).json()["entries"]
            assert [one["context"] for one in history] == ["other", "other"]
            what = [
                json.loads(line)["what"]
                for line in (served.service.runtime.data.path / "audit.jsonl")
                .read_text()
                .splitlines()
            ]
            assert [one for one in what if one.startswith("context.")] == [
                "context.create", "context.restart", "context.delete",
            ]  # fmt: skip


@pytest.mark.full_tier
async def test_a_token_of_another_conversation_and_another_owner_reach_no_context(
    tmp_path: Path,
) -> None:
    with short_directory() as directory:
        async with live(directory) as served, served.client() as client:
            session = {"user_id": "u", "agent_id": "a"}
            made = await client.post("/api/v1/sessions", json=session)
            assert made.status_code in (200, 201), made.text
            box = (await client.get("/v1/sandboxes")).json()["items"][0]["id"]
            talk = f"/v1/sandboxes/{box}/conversations/mine/contexts"
            assert (await client.post(talk, json={"name": "other"})).status_code == 201
            token = await client.post(
                "/v1/admin/tokens", json={"user_id": "u", "conversation_id": "yours"}
            )
            assert token.status_code in (200, 201), token.text
            strangers = [token.json()["token"], await served.key_of("somebody")]
            for key in strangers:
                async with served.client(key) as stranger:
                    replies = [
                        await stranger.get(talk),
                        await stranger.post(talk, json={"name": "new"}),
                        await stranger.get(f"{talk}/other"),
                        await stranger.delete(f"{talk}/other"),
                        await stranger.post(f"{talk}/other/restart"),
                        await stranger.post(f"{talk}/other/stop"),
                        await stranger.post(f"{talk}/other/interrupt"),
                    ]
                    assert [one.status_code for one in replies] == [404] * len(replies)
            listed = (await client.get(talk)).json()["items"]
            assert [one["name"] for one in listed] == ["default", "other"]


# -- by command ------------------------------------------------------------------------------------


def words(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exec_runs_in_a_context_and_makes_it(service: ServeProcess) -> None:
    box = words(service.quick("create")).strip()
    words(service.quick("exec", box, "-c", "x = 1"))
    code = ("-c", "print('x' in globals()); x = 2")
    assert words(service.quick("exec", box, "--context", "other", *code)) == "False\n"
    assert words(service.quick("exec", box, "--context", "other", "-c", "x")) == "2\n"
    assert words(service.quick("exec", box, "-c", "x")) == "1\n"
    state_events = json.loads(words(service.quick("context", "list", box, "--json")))
    assert [one["name"] for one in state_events["contexts"]] == ["default", "other"]
    assert words(service.quick("context", "restart", box, "other")) == "other\n"
    assert words(service.quick("exec", box, "--context", "other", *code)) == "False\n"
    assert words(service.quick("context", "create", box, "third")) == "third\n"
    listed = words(service.quick("context", "list", box))
    assert [line.split() for line in listed.splitlines()[2:]] == [
        ["default", "ready"],
        ["other", "ready"],
        ["third", "ready"],
    ]
    words(service.quick("context", "delete", box, "third"))
    refused = service.quick("context", "delete", box, "third", "--json")
    assert refused.returncode != 0
    assert json.loads(refused.stdout)["error"]["code"] == "not_found"
