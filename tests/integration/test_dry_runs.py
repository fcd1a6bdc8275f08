"""Dry runs and checkpoints where they touch the host: whose the files are, what is left of them,
directories of the host, and a service."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from live_app import live
from persistent_sandboxes import ME, eventually, open_service
from places import short_directory
from places import short_directory as open_directory

from sbx import Runtime
from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.client import Client
from sbx.errors import Closed, Conflict, Denied, NotFound, TooLarge
from sbx.isolation.broker.process import start_broker
from sbx.policy import load
from sbx.protocol.dry_runs import CHANGES_MAX, DRY_RUNS_MAX
from sbx.protocol.runs import Status
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.sandbox import AsyncSandbox
from sbx.runtime.snapshots.checkpoints import Checkpoint
from sbx.runtime.snapshots.dry_run import DryRun

HANG = "touch made; sleep 50"


def talk_of(box: AsyncSandbox) -> Conversation:
    return box.conversation("default")


def copies(runtime: Runtime) -> int:
    """How many frozen copies there are, on the disk."""
    data = runtime.data
    known = runtime.copies
    return sum(name in known for box in data.sandboxes() for name in data.conversations(box))


def directories(runtime: Runtime, box: AsyncSandbox) -> int:
    return len(runtime.data.conversations(box._directory))


async def running(talk: Conversation) -> None:
    """Wait until the command of a dry run runs."""
    await eventually(lambda: any(one.alive for one in talk.dry_runs.contexts))


@pytest.mark.core
async def test_nothing_is_left_of_what_was_committed_discarded_cancelled_expired_or_closed(
    runtime: Runtime,
) -> None:
    box = await runtime.create()
    talk = talk_of(box)
    await box.start()
    made = [await box.dry_run("echo x > made") for _ in range(3)]
    assert copies(runtime) == 3
    await made[0].commit()
    await made[1].discard()
    cancelled = asyncio.create_task(box.dry_run(HANG))
    await running(talk)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (copies(runtime), directories(runtime, box)) == (1, 2)
    talk.dry_runs._lifetime_s = 0.0
    expired = await box.dry_run("true")
    await eventually(lambda: copies(runtime) == 1)
    with pytest.raises(NotFound):
        talk.dry_runs.get(expired.id)
    await box.checkpoint()
    ended = asyncio.create_task(box.dry_run(HANG))
    await running(talk)
    await box.close()
    with pytest.raises(Closed):
        await ended
    with pytest.raises(Closed):
        await made[2].commit()
    assert runtime.copies == frozenset()
    assert directories(runtime, box) == 0


@pytest.mark.parametrize("what", ["dry_run", "checkpoint"])
async def test_whenever_it_is_cancelled_nothing_is_left(own_runtime: Runtime, what: str) -> None:
    """Also while a thread makes or opens something for it, of which nobody else knows."""
    runtime = own_runtime  # the pool of the shared one opens sockets meanwhile, and this one's none
    box = await runtime.create(narrower={"pool": {"max_idle": 0}})
    await (await box.dry_run("true")).discard()

    async def make() -> DryRun | Checkpoint:
        return await box.dry_run("true") if what == "dry_run" else await box.checkpoint()

    started: asyncio.Future[None]
    left = 0
    opened = await talk_of(box).opened()
    call = opened.call

    async def counted(act: Callable[[], object]) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            started.set_result(None)
        return await call(act)

    before = (directories(runtime, box), len(os.listdir("/proc/self/fd")))
    for number in range(1, 10):
        left = number
        started = asyncio.get_running_loop().create_future()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenFiles, "call", lambda _, act: counted(act))
            work = asyncio.create_task(make())
            work.add_done_callback(lambda _, one=started: one.done() or one.set_result(None))  # type: ignore[misc]
            await started
            if work.done():
                await work.result().discard()
                break
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
        await asyncio.gather(*opened.working, return_exceptions=True)
        assert (directories(runtime, box), len(os.listdir("/proc/self/fd"))) == before, number
    assert number > (2 if what == "dry_run" else 1)


async def test_a_stop_ends_a_dry_run_as_interrupted(box: AsyncSandbox) -> None:
    dry_run = asyncio.create_task(box.dry_run(HANG))
    await running(talk_of(box))
    await box.stop()
    assert (await dry_run).run.status is Status.INTERRUPTED


@pytest.mark.core
@pytest.mark.unprivileged
async def test_files_stay_the_jail_s_own_and_without_set_id_bits(
    runtime: Runtime, box: AsyncSandbox
) -> None:
    await box.shell("mkdir d; touch d/f; chmod 700 d; chmod 400 d/f; touch g")
    dry_run = await box.dry_run("chmod 640 d/f; echo x > d/new; mkdir e; ln -s x l; echo > g")
    await dry_run.commit()
    opened = await talk_of(box).opened()
    owners = {path.lstat().st_uid for path in opened.files_path.rglob("*")}
    assert owners == {opened.files_path.stat().st_uid}
    run = await box.shell("stat -c '%a %u' d d/f d/new e g; rm -r d e g l")
    assert run.stdout.split("\n")[:2] == ["700 1000", "640 1000"]
    assert run.exit_code == 0
    checkpoint = await box.checkpoint()
    for path in opened.files_path.parent.parent.rglob("*"):
        assert path.lstat().st_mode & 0o6000 == 0
    await checkpoint.discard()


async def test_a_workspace_that_is_too_large_is_refused_and_leaves_nothing(
    runtime: Runtime,
) -> None:
    default = load("default")
    limits = default.limits.model_copy(update={"workspace_max": 1 << 20})
    async with await runtime.create(default.model_copy(update={"limits": limits})) as box:
        inside = (await box._default.opened()).files_path  # as a run may leave it
        (inside / "large").write_bytes(bytes(2 << 20))
        with pytest.raises(TooLarge) as raised:
            await box.dry_run("true")
        assert raised.value.code == "workspace_too_large"
        assert copies(runtime) == 0
        await box.files.delete("large")
        dry_run = await box.dry_run("head -c 900000 /dev/zero > x; rm x; truncate -s 400M y")
        await dry_run.commit()
        assert (await box.files.stat("y")).size == 400 << 20


async def test_a_fifo_is_not_copied_and_stands_in_no_way(box: AsyncSandbox) -> None:
    await box.shell("mkdir -p old/below; mkfifo stays old/below/fifo; touch old/below/file")
    checkpoint = await box.checkpoint()
    dry_run = await box.dry_run("rm -r old; mkfifo new; test ! -e stays")
    assert dry_run.run.exit_code == 0
    assert {one.path for one in dry_run.changes} == {
        "/workspace/old/below/fifo",
        "/workspace/old/below/file",
    }
    assert {*dry_run.left_out} == {
        *("/workspace/new", "/workspace/old/below/fifo", "/workspace/stays")
    }
    await dry_run.commit()
    await box.shell("mkdir made; mkfifo made/fifo")
    assert (await box.shell("find made old stays 2>&1 | wc -l")).stdout == "4\n"
    await checkpoint.restore()
    assert (await box.shell("find made old stays 2>/dev/null")).stdout.split() == [
        *("old", "old/below", "old/below/file", "stays")
    ]


async def test_what_is_left_out_is_told_in_bounds(box: AsyncSandbox) -> None:
    made = "import os; [os.mkfifo(str(n)) for n in range(300)]"
    dry_run = await box.dry_run(f'python3 -c "{made}"')
    assert (len(dry_run.left_out), dry_run.truncated) == (CHANGES_MAX, True)
    assert not dry_run.changes


async def test_what_is_shared_can_be_read_and_there_is_no_way_out(runtime: Runtime) -> None:
    default = load("default")
    policy = load("networked").model_copy(
        update={"shared": True, "pool": default.pool.model_copy(update={"min_idle": 0})}
    )
    async with await runtime.create(policy) as box:
        await box.files.write("shared/a", "seen")
        dry_run = await box.dry_run(
            "cat shared/a; touch shared/b; echo; ls /run/sbx; env | grep -ci proxy; echo x > c"
        )
        assert dry_run.run.stdout == "seen\n0\n"
        assert "Read-only" in dry_run.run.stderr
        assert [one.path for one in dry_run.changes] == ["/workspace/c"]
        await dry_run.commit()
        assert (await box.shell("ls; env | grep -ci proxy")).stdout.split()[0] == "c"


# -- a directory of the host -----------------------------------------------------------------------


@pytest.fixture
async def project(runtime: Runtime, tmp_path: Path) -> AsyncIterator[tuple[AsyncSandbox, Path]]:
    top = tmp_path / "project"
    (top / ".git" / "hooks").mkdir(parents=True)
    (top / ".git" / "config").write_text("[core]")
    (top / "main.py").write_text("print(1)\n")
    if os.geteuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, 1234, 1234)
        (top / "of-root").write_text("secret")
        (top / "of-root").chmod(0o600)
        (top / "foreign").mkdir()
    async with await runtime.create(workspace=top) as box:
        yield box, top


async def test_in_a_directory_of_the_host_only_what_is_shown_is_changed(
    project: tuple[AsyncSandbox, Path],
) -> None:
    box, top = project
    before = sorted(top.rglob("*"))
    dry_run = await box.dry_run(
        "echo 'print(2)' > main.py; echo $HOME; touch other; echo x >> .git/config;"
        " touch .git/config; ls /uploads"
    )
    assert dry_run.run.stdout.startswith("/home/sandbox\n")
    assert "Read-only" in dry_run.run.stderr
    assert sorted(top.rglob("*")) == before
    assert [one.path for one in dry_run.changes] == [
        "/workspace/main.py",
        "/workspace/other",
    ]
    checkpoint = await box.checkpoint()
    await dry_run.commit()
    assert sorted(top.rglob("*")) == sorted([*before, top / "other"])
    assert (top / "main.py").read_text() == "print(2)\n"
    assert (top / "main.py").stat().st_uid == top.stat().st_uid
    (top / ".git" / "config").write_text("[core] # the person's own")
    await checkpoint.restore()
    assert (top / "main.py").read_text() == "print(1)\n"
    assert "own" in (top / ".git" / "config").read_text()


async def test_a_dry_run_puts_host_executables_into_the_quarantine(
    runtime: Runtime, tmp_path: Path
) -> None:
    top = tmp_path / "project"
    top.mkdir()
    if os.geteuid() == 0:
        os.chown(top, 1234, 1234)
    async with await runtime.create(workspace=top) as box:
        dry_run = await box.dry_run("mkdir .vscode; echo x > .vscode/tasks.json; echo 1 > a")
        assert [item.path for item in dry_run.run.quarantined] == [".vscode"]
        assert [one.path for one in dry_run.changes] == ["/workspace/a"]
        await dry_run.commit()
    assert sorted(path.name for path in top.iterdir()) == ["a"]


@pytest.mark.needs("root")
async def test_the_host_s_rights_are_not_lent(project: tuple[AsyncSandbox, Path]) -> None:
    box, top = project
    dry_run = await box.dry_run("cat of-root; ls; echo x > foreign/x; true")
    assert "secret" not in dry_run.run.stdout
    assert "of-root" not in dry_run.run.stdout
    with pytest.raises(Denied) as raised:
        await dry_run.commit()
    assert raised.value.code == "file_not_permitted"
    assert list((top / "foreign").iterdir()) == []
    assert (top / "of-root").read_text() == "secret"


@pytest.mark.needs("root")
async def test_what_could_not_be_read_when_a_checkpoint_was_made_is_never_removed(
    project: tuple[AsyncSandbox, Path],
) -> None:
    box, top = project
    (top / "closed").mkdir(0o700)
    (top / "closed" / "file").write_text("kept")
    checkpoint = await box.checkpoint()
    for path in (top / "of-root", top / "closed", top / "closed" / "file"):
        os.chown(path, 1234, 1234)
    await box.shell("touch made")
    assert [one.path for one in await checkpoint.restore()] == ["/workspace/made"]
    assert (top / "of-root").read_text() == "secret"
    assert (top / "closed" / "file").read_text() == "kept"


# -- a service -------------------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_a_collection_leaves_copies_and_a_start_removes_them(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data") as service:
        made = await service.sandboxes.create(ME)
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            talk = use.conversation()
            dry_run = await talk.dry_run("echo x > made")
            events = (await service.events.page(ME, made.id)).items
            assert events[-1].details.get("context") == f"dry_run/{dry_run.id}"
            assert await service.garbage.clear_unknown() == 0
            copy = dry_run._copy
            await dry_run.commit()
            assert await talk.files.read("made") == "x\n"
        name = service.runtime.data.new_name()
        [sandbox] = [one for one in service.runtime.data.sandboxes() if one in str(copy.path)]
        service.runtime.data.frozen(sandbox, name).close()  # as a killed service leaves it
        (service.runtime.data.frozen_path(sandbox, name) / "files" / "copied").write_text("x")
    async with open_service(tmp_path / "data") as service:
        assert name not in service.runtime.data.conversations(sandbox)
        assert not (tmp_path / "data" / "unclaimed").exists()


@pytest.mark.full_tier
async def test_who_may_see_and_commit_it_over_http(tmp_path: Path) -> None:
    with short_directory() as directory:
        async with live(directory) as served, Client(served.socket) as client:
            box = await client.create()
            dry_run = await box.dry_run("echo x > made")
            base = f"/v1/sandboxes/{box.id}/conversations/default"
            async with served.client(await served.key_of("other")) as other:
                for method, path in (
                    ("POST", "/dry_runs"),
                    ("POST", f"/dry_runs/{dry_run.id}/commit"),
                    ("DELETE", f"/dry_runs/{dry_run.id}"),
                    ("POST", "/checkpoints"),
                    ("POST", "/checkpoints/x/restore"),
                ):
                    reply = await other.request(method, base + path, json={"command": "true"})
                    assert reply.status_code == 404, path
            _, token = await served.service.access.make_token(
                f"uid:{os.geteuid()}", user_id="u", scopes=["execute"], ttl_s=60
            )
            async with served.client(token) as runs_only:
                session = await client.ensure_session("u", "a")
                path = f"/v1/sandboxes/{session.session_id}/conversations/default/dry_runs"
                made = await runs_only.post(path, json={"command": "echo x > made"})
                assert made.status_code == 201
                refused = await runs_only.post(f"{path}/{made.json()['id']}/commit")
                assert refused.json()["error"]["code"] == "not_found"
                assert (await runs_only.delete(f"{path}/{made.json()['id']}")).status_code == 204
            async with served.client() as mine:
                path = f"{base}/dry_runs/{dry_run.id}"
                assert (await mine.post(f"{path}x/commit")).status_code == 404
                assert (await mine.post(f"{path}/commit")).json() == {"status": "ok"}
                reply = await mine.post(f"{path}/commit")
                assert (reply.status_code, reply.json()["error"]["code"]) == (
                    404,
                    "dry_run_not_found",
                )
                made = await mine.post(f"{base}/dry_runs", json={"command": "rm made"})
                assert made.status_code == 201
                assert set(made.json()) == {
                    *("id", "run", "changes", "truncated", "left_out", "expires_at")
                }
                path = f"{base}/dry_runs/{made.json()['id']}"
                assert (await mine.delete(path)).status_code == 204
                assert (await mine.delete(path)).status_code == 404


async def test_a_caller_of_the_service_that_goes_ends_its_dry_run(tmp_path: Path) -> None:
    with short_directory() as directory:
        async with live(directory) as served, Client(served.socket) as client:
            box = await client.create()
            await box.start()
            runtime = served.service.runtime
            gone = asyncio.create_task(box.dry_run(HANG))
            await eventually(lambda: len(runtime.copies) == 1)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            await eventually(lambda: not runtime.copies)
            made = [await box.dry_run("true") for _ in range(DRY_RUNS_MAX)]
            with pytest.raises(Conflict):
                await box.dry_run("true")
            await box.close()
            await eventually(lambda: not runtime.copies)
            assert len(made) == DRY_RUNS_MAX


@pytest.mark.full_tier
@pytest.mark.needs("root", "landlock", "seccomp")
async def test_a_broker_that_is_confined_lets_it_be() -> None:
    with open_directory() as top:
        top.chmod(0o755)
        (top / "data").mkdir()
        settings = ServiceSettings(data_dir=top / "data", socket=top / "run" / "s")
        broker = start_broker(uids=settings.uid_range)
        privileges.confine(
            broker, settings, privileges.account_of(settings), writable=[top / "data"]
        )
        async with Runtime(settings, broker=broker) as runtime, await runtime.create() as box:
            await box.shell("echo 1 > a")
            dry_run: DryRun = await box.dry_run("echo 2 >> a; cat a")
            assert dry_run.run.stdout == "1\n2\n"
            await dry_run.commit()
            assert await box.files.read("a") == "1\n2\n"
            policy = load("default").model_copy(update={"shared": True})
            async with await runtime.create(policy) as sharing:
                await sharing.files.write("shared/a", "seen")
                dry_run = await sharing.dry_run("cat shared/a")
                assert dry_run.run.stdout == "seen"
