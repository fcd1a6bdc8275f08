"""The client beside what both faces share: streams, progress, sessions, what an operator asks."""

import asyncio
import gc
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory

import sbx
from sbx import Sandbox
from sbx.client import Client, RemoteSandbox
from sbx.errors import (
    BadRequest,
    Closed,
    Conflict,
    Denied,
    NotFound,
    PolicyError,
    SbxError,
    Unavailable,
)
from sbx.protocol.runs import Event, InputRequest, RunEnd, RunStart, Status, Stdout
from sbx.sync.client import BlockingClient


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        async with live(directory) as served:
            yield served


@pytest_asyncio.fixture(scope="module")
async def client(served: Served) -> AsyncIterator[Client]:
    async with Client(served.socket) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def box(client: Client) -> AsyncIterator[RemoteSandbox]:
    async with await client.create() as box:
        yield box


# -- runs ------------------------------------------------------------------------------------------


async def test_a_run_is_followed_from_its_start_by_somebody_else(
    client: Client, box: RemoteSandbox
) -> None:
    run = box.conversation("default").start_run("print('a')\ninput('b? ')", on_input=lambda _: "c")
    seen: list[Event] = []
    async for event in run.events():
        seen.append(event)
        if isinstance(event, RunStart):
            ids = [
                (number, type(one)) async for number, one in client.run_events(box.id, event.run_id)
            ]
    assert ids[0] == (1, RunStart)
    assert ids[-1] == (len(seen), RunEnd)
    assert any(isinstance(event, InputRequest) for event in seen)
    again = [one async for one in client.run_events(box.id, run.run_id or "", after=len(seen) - 1)]
    assert [number for number, _ in again] == [len(seen)]


async def test_a_stream_survives_the_loss_of_its_connection(box: RemoteSandbox) -> None:
    code = "import time\nfor n in range(20): print(n, flush=True); time.sleep(0.02)"
    text = ""
    async for event in box.stream(code):
        if isinstance(event, Stdout):
            if not text:
                for connection in list(box._wire._busy):
                    connection._transport.abort()
            text += event.text
    assert isinstance(event, RunEnd)
    assert event.run.ok
    assert text == event.run.stdout == "".join(f"{n}\n" for n in range(20))


async def test_a_run_in_the_queue_is_taken_out_alone(client: Client, box: RemoteSandbox) -> None:
    running = box.conversation("default").start_run(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n'whole'"
    )
    async for _ in running.events():
        break
    waiting = box.conversation("default").start_run("open('ran', 'w')")
    async for _ in waiting.events():
        break
    assert await client.interrupt_run(box.id, waiting.run_id or "")
    assert (await waiting.result()).status == Status.INTERRUPTED
    await box.files.write("go", "")
    assert (await running.result()).result == "'whole'"
    with pytest.raises(NotFound):
        await box.files.stat("ran")


async def test_code_of_several_mib_goes_through(box: RemoteSandbox) -> None:
    text = "é" * (3 << 20)
    assert (await box.run(f"len('{text}')")).result == str(3 << 20)


async def test_output_of_every_kind_comes_back_as_it_was(box: RemoteSandbox) -> None:
    code = "from IPython.display import JSON, display\ndisplay(JSON({'$float': 'nan'}))\n10**20"
    run = await box.run(code)
    assert run.outputs[0]["application/json"] == {"$float": "nan"}
    assert run.result == str(10**20)


# -- files -----------------------------------------------------------------------------------------


async def test_files_go_in_and_out_byte_for_byte_and_tell_how_far(
    box: RemoteSandbox, tmp_path: Path
) -> None:
    content = os.urandom(5 << 20) + b"\r\n0\r\n\r\n"
    (tmp_path / "in").write_bytes(content)
    sent: list[tuple[int, int | None]] = []
    got: list[tuple[int, int | None]] = []
    size = await box.files.upload(
        tmp_path / "in", "deep/raw", on_progress=lambda *done: sent.append(done)
    )
    assert size == len(content)
    assert sent[-1] == (size, size)
    assert await box.files.download(
        "deep/raw", tmp_path / "out", on_progress=lambda *done: got.append(done)
    )
    assert (tmp_path / "out").read_bytes() == content
    assert got[-1] == (size, size)
    assert [done for done, _ in got] == sorted(done for done, _ in got)
    upload = await box.uploads.put(tmp_path / "in", "up.bin")
    assert upload.sha256 == hashlib.sha256(content).hexdigest()
    assert await box.uploads.download("up.bin", tmp_path / "out") == size
    async with box.files.open_stream("uploads/temparea/up.bin") as incoming:
        assert incoming.size == size
        assert b"".join([piece async for piece in incoming.chunks()]) == content
    await box.files.delete("deep")


async def test_a_download_that_fails_leaves_nothing(box: RemoteSandbox, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("before")
    with pytest.raises(NotFound) as raised:
        await box.files.download("missing", tmp_path / "kept")
    assert raised.value.code == "file_not_found"
    assert (tmp_path / "kept").read_text() == "before"
    assert os.listdir(tmp_path) == ["kept"]


async def test_names_that_addresses_do_not_like(box: RemoteSandbox) -> None:
    names = ("a b", "100%", "a?b#c&d=e", "ü", "%2e%2e", "+", "\u202egnp.exe", "'\"")
    for name in names:
        await box.uploads.put_bytes(name, name.encode())
        assert await box.uploads.read_bytes(name) == name.encode()
        await box.files.write(f"names/{name}", name)
        assert await box.files.read(f"names/{name}") == name
    assert [entry.name for entry in await box.files.list("names")] == sorted(names)


async def test_a_source_that_fails_leaves_what_was_there(box: RemoteSandbox) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("the source failed")

    await box.files.write("kept", "before")
    with pytest.raises(RuntimeError, match="the source failed"):
        await box.files.write_stream("kept", failing())
    with pytest.raises(RuntimeError):
        await box.files.write_stream("kept", failing(), size=100)
    assert await box.files.read("kept") == "before"


# -- sandboxes -------------------------------------------------------------------------------------


async def test_the_life_of_a_sandbox(client: Client) -> None:
    box = await client.create(ttl_s=600, env={"A": "b"}, narrower={"limits": {"tasks_max": 50}})
    info = await client.get(box.id)
    assert (info.status, info.policy) == ("idle", "default")
    assert info.expires_at is not None
    assert 590 < info.expires_at - info.created_at < 610
    assert (await box.run("import os; os.environ['A']")).result == "'b'"
    assert (await client.get(box.id)).status == "ready"
    assert box.id in [one.id for one in await client.sandboxes(limit=200)]
    assert box.id in [one.id for one in await client.sandboxes(all_owners=True, limit=200)]
    later = await client.extend(box.id, 600)
    assert later.expires_at is not None
    assert later.expires_at > info.expires_at
    seen = await client.inspect(box.id)
    assert seen["kernels"][0]["host_pids"]
    answer, standing = seen["kernels"][0]["receipt"], (await box.start()).to_dict()
    assert min(answer.pop("read_at"), standing.pop("read_at")) > 0
    assert answer == standing | {"walls": [dict(wall) for wall in standing["walls"]]}
    assert seen["env"] == {"A": "b"}
    await client.keepalive(box.id)
    await client.stop(box.id)
    assert await box.read_receipt() is None
    entries, total = await client.history(box.id)
    assert total == 1
    assert entries[0]["code"].startswith("import os")
    assert [event["type"] for event in await client.events(box.id)][:2] == ["created", "started"]
    await box.close()
    with pytest.raises(Closed):
        await box.run("1")
    with pytest.raises(NotFound):
        await client.get(box.id)
    await client.delete(box.id)


async def test_the_events_of_a_sandbox_are_followed_to_its_end(client: Client) -> None:
    box = await client.create()

    async def following() -> list[str]:
        return [answer["type"] async for _, answer in client.follow_events(box.id)]

    listening = asyncio.create_task(following())
    await box.start()
    await box.close()
    async with asyncio.timeout(60):
        kinds = await listening
    assert kinds[0] == "created"
    assert kinds[-1] == "deleted"


async def test_what_a_service_does_not_take(client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFound) as missing:
        await client.create("data-sience")
    assert missing.value.code == "policy_not_found"
    with pytest.raises(BadRequest) as by_value:
        await client.create(tmp_path)  # type: ignore[arg-type]
    assert by_value.value.code == "invalid_policy"
    with pytest.raises((BadRequest, PolicyError)):
        await client.create(narrower={"limits": {"memory_mix": 1}})
    with pytest.raises(NotFound):
        await client.sandbox("sandbox-none").run("1")
    with pytest.raises(BadRequest):
        await client.request("POST", "/v1/cargos", json={"size_limit_mb": "x"})


async def test_one_key_makes_one_sandbox(client: Client) -> None:
    one = await client.create(idempotency_key="the-same")
    two = await client.create(idempotency_key="the-same")
    assert one.id == two.id
    with pytest.raises(Conflict):
        await client.create(idempotency_key="the-same", ttl_s=5)
    await one.close()


async def test_workspace_outlives_its_sandbox(client: Client) -> None:
    workspace = await client.create_workspace(16)
    async with await client.create(workspace_id=workspace["id"]) as box:
        await box.files.write("kept", "x")
        with pytest.raises(Conflict):
            await client.delete_workspace(workspace["id"])
    async with await client.create(workspace_id=workspace["id"]) as box:
        assert await box.files.read("kept") == "x"
    assert workspace["id"] in [one["id"] for one in await client.workspaces()]
    await client.delete_workspace(workspace["id"])


# -- sessions --------------------------------------------------------------------------------------


async def test_a_session_is_made_found_and_woken(client: Client) -> None:
    made = await asyncio.gather(*(client.ensure_session("ann", "helper") for _ in range(5)))
    assert {one.session_id for one in made} == {"sb-session-ann-helper"}
    assert {one.status for one in made} == {"running"}
    box = client.sandbox(made[0].session_id)
    assert (await box.conversation("c1").run("1 + 1")).result == "2"
    await client.stop(made[0].session_id)
    again = await client.ensure_session("ann", "helper", retry_interval=0.05)
    assert again.status == "running"
    with pytest.raises(BadRequest):
        await client.ensure_session("../x", "helper")
    await client.request("DELETE", "/api/v1/sessions/sb-session-ann-helper")


# -- who may ---------------------------------------------------------------------------------------


async def test_keys_and_tokens(client: Client, served: Served, box: RemoteSandbox) -> None:
    made = await client.make_key("bob", "laptop")
    assert made["owner"] == "bob"
    assert made["id"] in [key["id"] for key in await client.keys()]
    async with Client(served.socket, key=made["key"]) as bobs:
        assert len(await bobs.sandboxes()) == 0
        with pytest.raises(NotFound):
            await bobs.sandbox(box.id).run("1")
        with pytest.raises(Denied) as raised:
            await bobs.keys()
        assert raised.value.code == "forbidden"
        await client.revoke_key(made["id"])
        with pytest.raises(Denied) as refused:
            await bobs.sandboxes()
        assert (refused.value.code, bool(refused.value.hint)) == ("unauthorized", True)
    session = await client.ensure_session("eve", "bot")
    token = await client.make_token(user_id="eve", scopes=["files:read"], ttl_s=60)
    assert token["id"] in [one["id"] for one in await client.tokens()]
    async with Client(served.socket, key=token["token"]) as eves:
        assert await eves.sandbox(session.session_id).uploads.list() == ()
        with pytest.raises(NotFound):
            await eves.sandbox(session.session_id).run("1")
        with pytest.raises(NotFound):
            await eves.sandbox(box.id).files.list()
        await client.revoke_token(token["id"])
        with pytest.raises(Denied):
            await eves.sandbox(session.session_id).uploads.list()


async def test_the_operator_s_calls(client: Client) -> None:
    assert (await client.collect())["total_errors"] == 0
    assert "default" in [profile["id"] for profile in await client.profiles()]
    assert (await client.health())["status"] == "ok"


# -- without asyncio -------------------------------------------------------------------------------


async def test_the_blocking_client_does_the_same(served: Served, tmp_path: Path) -> None:
    def work() -> None:
        with BlockingClient(served.socket) as client, client.create() as box:
            assert box.run("1 + 1").result == "2"
            assert [one.type for one in box.stream("2")][-1] == "run_end"
            assert box.receipt is not None
            (tmp_path / "f").write_bytes(b"x" * 100)
            assert box.files.upload(tmp_path / "f", "f") == 100
            assert box.uploads.put(tmp_path / "f").size == 100
            assert box.uploads.download("f", tmp_path / "g") == 100
            assert box.conversation("other").shell("echo hi").stdout == "hi\n"
            assert client.get(box.id).status == "ready"
            assert next(event["type"] for event in client.events(box.id)) == "created"
            assert client.ensure_session("sync", "bot").status == "running"
        with pytest.raises(Closed):
            client.health()

    await asyncio.to_thread(work)


async def test_a_connected_sandbox_lives_no_longer_than_its_program_needs_it(
    served: Served, client: Client, tmp_path: Path
) -> None:
    def work() -> list[str]:
        with pytest.raises(BadRequest) as raised:
            Sandbox(connect=served.socket, workspace=tmp_path)
        assert raised.value.code == "not_over_the_wire"
        with pytest.raises(Unavailable):
            Sandbox(connect=tmp_path / "none")
        forgotten = Sandbox(connect=served.socket)
        kept = Sandbox(connect=str(served.socket))
        ids = [forgotten.id, kept.id]
        assert kept.run("1").ok
        del forgotten
        gc.collect()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                kept.run("1")
            except SbxError as error:
                code = 0 if error.code == "used_after_fork" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        sbx.close()
        with pytest.raises(Closed):
            kept.run("1")
        return ids

    for sandbox_id in await asyncio.to_thread(work):
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.get(sandbox_id)
                except NotFound:
                    break
                await asyncio.sleep(0.02)


async def test_a_program_that_only_connects_imports_little(served: Served) -> None:
    """`sbx ps` is to be quick: neither pydantic nor FastAPI is needed to ask a service."""
    code = """
import sys
from sbx import Sandbox
with Sandbox(connect=sys.argv[1]) as box:
    assert box.run("1 + 1").result == "2"
heavy = {"pydantic", "fastapi", "httpx", "IPython", "msgspec", "structlog", "starlette"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", code, str(served.socket)
    )
    async with asyncio.timeout(60):
        assert await process.wait() == 0
