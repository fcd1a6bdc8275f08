"""Background commands that are many, hostile, or older than their sandbox's kernel."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bay_calls import made, refused
from live_app import live
from places import short_directory

from sbx import AsyncSandbox, Runtime, Settings, errors
from sbx.client import Client
from sbx.protocol.commands import CommandCause, CommandState
from sbx.runtime.processes import command_log, commands
from tests.made_tasks import made_tasks

MIB = 1 << 20


async def started(command: Any, text: str = "up") -> None:
    async with asyncio.timeout(60):
        async for piece in command.follow():
            if text in piece.text:
                return


def inside(box: AsyncSandbox) -> tuple[int, int]:
    """Processes of its kernel's jail, and descriptors of PID 1."""
    pids = box._default.processes
    return len(pids), len(os.listdir(f"/proc/{pids[0]}/fd"))


def directory(box: AsyncSandbox) -> Path:
    opened = box._default._opened
    assert opened is not None
    return opened.own.path / "commands"


def found(data: Path, pattern: str) -> list[Path]:
    return list(data.rglob(pattern))


def on_disk(box: AsyncSandbox) -> int:
    """Bytes that the logs of its commands take."""
    return sum(path.stat().st_blocks * 512 for path in directory(box).glob("*.log"))


@pytest.mark.full_tier
@pytest.mark.core
@pytest.mark.timeout(60)
async def test_a_thousand_commands_leave_nothing_behind() -> None:
    async with Runtime(Settings(fast_path=False)) as runtime, await runtime.create() as box:
        await start_a_thousand(box)


async def start_a_thousand(box: AsyncSandbox) -> None:
    await (await box.commands.start("echo warm")).wait(60)
    before = inside(box), len(os.listdir("/proc/self/fd"))
    room = asyncio.Semaphore(50)

    async def one(number: int) -> CommandState:
        async with room:
            command = await box.commands.start(f"echo {number}; exit {number % 2}")
            if number % 10 == 0:
                return (await command.stop(grace_s=0)).state
            ended = await command.wait(60)
            assert ended.exit_code == number % 2
            assert (await command.logs()).text == f"{number}\n"
            return ended.state

    with made_tasks() as made:
        states = await asyncio.gather(*map(one, range(1000)))
    assert set(states) <= {CommandState.EXITED, CommandState.STOPPED}
    async with asyncio.timeout(60):
        while (now := inside(box)) != before[0]:  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.05)
    assert (now, len(os.listdir("/proc/self/fd"))) == before
    assert [task for task in made if not task.done()] == []
    kept = await box.commands.list()
    assert len(kept) == command_log.RECORDS_MAX
    assert len(list(directory(box).iterdir())) == 2 * command_log.RECORDS_MAX
    assert box.commands.running == 0


@pytest.mark.core
async def test_a_flood_is_bounded_everywhere_and_cells_go_on(box: AsyncSandbox) -> None:
    await box.run("1")
    floods = [await box.commands.start("yes 'a longer line of it'") for _ in range(4)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with asyncio.timeout(60):  # and the floods never end
        for _ in range(20):
            assert (await box.run("1 + 1")).ok
        while min([(await flood.status()).log_end for flood in floods]) <= MIB:
            assert (await box.run("1 + 1")).ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10  # KiB
    written = 0
    for flood in floods:
        answer = await flood.status()
        assert answer.log_end > MIB
        assert answer.log_end - answer.log_begin <= command_log.LOG_MAX
        piece = await flood.logs(0, limit=1000)
        assert piece.offset >= answer.log_begin > 0 or answer.log_end <= command_log.LOG_MAX
        assert "a longer line of it\n" in piece.text
        written += (await flood.stop(grace_s=0)).log_end
    assert written < 5 * command_log.RATE
    assert on_disk(box) <= len(floods) * (command_log.LOG_MAX + 64 * 1024)


async def test_a_follower_of_a_flood_sees_gaps_and_no_torn_text(box: AsyncSandbox) -> None:
    flood = await box.commands.start("i=0; while true; do echo ${i}é-${i}; i=$((i+1)); done")
    await asyncio.sleep(0.2)
    at, seen = 0, 0
    async with asyncio.timeout(60):
        async for piece in flood.follow():
            assert piece.offset >= at
            assert piece.next_offset - piece.offset == len(piece.text.encode())
            for line in piece.text.split("\n")[1:-1]:
                first, second = line.split("é-")
                assert first == second
                seen += 1
            at = piece.next_offset
            if seen > 20_000:
                break
    await flood.stop(grace_s=0)


async def test_all_logs_together_are_bounded_the_oldest_text_goes_first(
    box: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_log, "LOGS_MAX", MIB)
    write = "head -c 400000 /dev/zero | tr '\\0' "
    first = await box.commands.start(f"{write} a")
    await first.wait(60)  # before the next begins, so that its text is the oldest
    second = await box.commands.start(f"{write} b")
    await second.wait(60)
    third = await box.commands.start(f"{write} c; sleep 100")
    await started(third, "c")
    async with asyncio.timeout(60):
        while (await third.status()).log_end < 400_000:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        while (gone := await first.status()).log_begin == 0:  # noqa: ASYNC110  # as the disk goes
            await asyncio.sleep(0.02)
    assert (gone.log_begin, gone.log_end) == (400_000, 400_000)
    piece = await first.logs(0)
    assert (piece.offset, piece.next_offset, piece.text) == (400_000, 400_000, "")
    assert (await second.logs(0, limit=10)).text == "b" * 10
    assert (await third.logs(0, limit=10)).text == "c" * 10
    assert on_disk(box) < MIB + 64 * 1024


async def test_so_many_run_at_once_and_no_more(
    box: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RUNNING_MAX", 3)
    starts = (box.commands.start("sleep 100") for _ in range(6))
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    failed = [one for one in outcomes if isinstance(one, errors.Conflict)]
    assert [one.code for one in failed] == ["too_many_commands"] * 3
    running = [one for one in outcomes if isinstance(one, commands.BackgroundCommand)]
    await running[0].stop(grace_s=0)
    assert (await (await box.commands.start("true")).wait(60)).exit_code == 0


@pytest.mark.core
async def test_what_a_command_leaves_in_the_background_neither_blocks_nor_outlives_the_jail(
    box: AsyncSandbox,
) -> None:
    code = "(trap '' TERM HUP; setsid sh -c 'while true; do echo more; done') & echo started"
    command = await box.commands.start(code)
    ended = await command.wait(60)
    assert (ended.state, ended.exit_code) == (CommandState.EXITED, 0)
    assert (await command.stop()).state is CommandState.EXITED
    assert (await box.run("1 + 1")).ok
    assert (await command.status()).log_end < MIB
    await box.stop()
    assert box._default.processes == []


@pytest.mark.core
async def test_no_log_is_seen_from_inside(box: AsyncSandbox) -> None:
    first = await box.commands.start("echo up; sleep 100")
    await started(first)
    look = (
        "find / -name site-packages -prune -o -name 'cmd-????????????.*' -print"
        " -o -path '*sandboxes*' -print 2>/dev/null; echo end"
    )
    second = await box.commands.start(look)
    await second.wait(60)
    assert (await second.logs()).text == "end\n"


@pytest.mark.needs("memory")
async def test_a_command_that_takes_all_memory_is_told_so(runtime: Runtime) -> None:
    async with await runtime.create(narrower={"limits": {"memory_max": "128MiB"}}) as box:
        await box.run("kept = 1")
        command = await box.commands.start("exec python3 -c 'x = bytearray(1 << 30)'")
        answer = await command.wait(60)
        assert (answer.state, answer.cause) == (CommandState.KILLED, CommandCause.MEMORY)
        async with asyncio.timeout(60):
            while box.receipt is not None:  # noqa: ASYNC110  # the jail ends as a whole
                await asyncio.sleep(0.02)
        assert (await box.run("1")).state_lost


async def test_a_policy_without_a_shell_has_no_background_commands(runtime: Runtime) -> None:
    async with await runtime.create(narrower={"processes": False}) as box:
        with pytest.raises(errors.Denied) as refusal:
            await box.commands.start("true")
        assert refusal.value.code == "capability_not_supported"
    async with await runtime.create() as box:
        with pytest.raises(errors.BadRequest):
            await box.commands.start("a\0b")


async def test_a_command_counts_once_against_the_limit_while_it_starts(
    box: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A started command counted twice until its caller ran again: of 50 at once, some were refused
    as the 65th."""
    counts, track = list[int](), box.commands._track

    def counted(work: Any) -> Any:
        counts.append(box.commands._running + len(box.commands._starting))
        return track(work)

    monkeypatch.setattr(box.commands, "_track", counted)
    await (await box.commands.start("true")).wait(60)
    assert counts == [1, 1]


async def test_a_call_that_is_cancelled_leaves_a_command_that_is_known(box: AsyncSandbox) -> None:
    await box.start()
    for delay in (0, 0.001, 0.003):
        starting = asyncio.create_task(box.commands.start("sleep 100"))
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    known = [one for one in await box.commands.list() if one.running]
    assert box.commands.running == len(known)
    assert not box.commands._starting
    for one in known:
        await (await box.commands.get(one.id)).stop(grace_s=0)


async def test_a_closed_sandbox_still_says_why_its_commands_ended(runtime: Runtime) -> None:
    async with await runtime.create() as box:
        command = await box.commands.start("echo up; sleep 100")
        await started(command)
        waiting = asyncio.create_task(command.wait())
    answer = await asyncio.wait_for(waiting, 60)
    assert (answer.state, answer.cause) == (CommandState.KILLED, CommandCause.CLOSED)
    assert await command.status() == answer
    with pytest.raises(errors.Closed):
        await box.commands.start("true")
    with pytest.raises(errors.Closed):
        await command.logs()


# -- in a service ----------------------------------------------------------------------------------


@pytest.fixture
async def data() -> AsyncIterator[Path]:
    with short_directory() as place:
        yield place


@pytest.mark.core
async def test_commands_are_remembered_over_a_stop_and_a_restart_of_the_service(
    data: Path,
) -> None:
    async with live(data) as served, Client(served.socket) as client:
        box = await client.create()
        done = await box.commands.start("echo done")
        await done.wait(60)
        stopped = await box.commands.start("echo up; sleep 100")
        await started(stopped)
        await client.stop(box.id)
        assert (await stopped.status()).cause is CommandCause.STOPPED
        assert (await done.logs()).text == "done\n"
        running = await box.commands.start("echo again; sleep 100")
        await started(running, "again")
    async with live(data) as served, Client(served.socket) as client:
        again = client.sandbox(box.id)
        answer = {one.id: one for one in await again.commands.list()}
        assert answer[done.id].exit_code == 0
        assert answer[stopped.id].cause is CommandCause.STOPPED
        assert (answer[running.id].state, answer[running.id].cause) == (
            CommandState.KILLED,
            CommandCause.CLOSED,
        )
        assert (await (await again.commands.get(running.id)).logs()).text == "again\n"
        await client.delete(box.id)
        assert found(data, "cmd-*") == []


async def test_after_a_crash_of_the_service_its_commands_have_ended(data: Path) -> None:
    async with live(data) as served, Client(served.socket) as client:
        box = await client.create()
        command = await box.commands.start("echo up; sleep 100")
        await started(command)
        (record,) = found(data, f"{command.id}.json")
        as_it_ran = record.read_bytes()
        (record.parent / "cmd-ffffffffffff.log").write_bytes(b"half")
    record.write_bytes(as_it_ran)  # a killed service writes no more
    async with live(data) as served, Client(served.socket) as client:
        (answer,) = await client.sandbox(box.id).commands.list()
        assert (answer.state, answer.cause) == (CommandState.KILLED, CommandCause.CLOSED)
        assert (answer.log_begin, answer.log_end) == (0, 3)
        assert found(data, "cmd-ffffffffffff.*") == []


async def test_ids_of_others_are_404_whatever_is_asked_of_them(data: Path) -> None:
    async with live(data) as served, served.client() as client:
        box = await made(client)
        at = f"/v1/sandboxes/{box['id']}/conversations/default"
        answer = await client.post(f"{at}/commands", json={"command": "sleep 100"})
        name = answer.json()["id"]
        asked = (
            ("GET", "/commands"),
            ("POST", "/commands"),
            ("GET", f"/commands/{name}"),
            ("GET", f"/commands/{name}/logs"),
            ("GET", f"/commands/{name}/follow"),
            ("GET", f"/commands/{name}/wait"),
            ("POST", f"/commands/{name}/stdin"),
            ("POST", f"/commands/{name}/stop"),
            ("GET", "/usage"),
        )
        bodies = {"/commands": {"command": "true"}, f"/commands/{name}/stdin": {"text": "x"}}
        async with served.client(await served.key_of("somebody-else")) as stranger:
            for method, path in asked:
                body = bodies.get(path) if method == "POST" else None
                refused(await stranger.request(method, at + path, json=body), 404, "not_found")
            live_on = {"accept": "text/event-stream"}
            refused(await stranger.get(f"{at}/usage", headers=live_on), 404, "not_found")
        for path in (f"/commands/{name}", f"/commands/{name}/logs", f"/commands/{name}/follow"):
            other = at.replace("default", "other")
            refused(await client.get(other + path), 404, "not_found")
        assert (await client.get(f"{at}/commands/{name}")).json()["state"] == "running"


async def test_a_token_reaches_the_commands_of_its_own_conversation_only(data: Path) -> None:
    async with live(data) as served, served.client() as client:
        session = await client.post("/api/v1/sessions", json={"user_id": "u", "agent_id": "a"})
        sandbox = session.json()["session_id"]
        at = f"/v1/sandboxes/{sandbox}/conversations"
        made_there = await client.post(f"{at}/c1/commands", json={"command": "sleep 100"})
        name = made_there.json()["id"]
        tokens = []
        for more in ({"conversation_id": "c2"}, {"scopes": ["files:read"]}):
            asked = {"user_id": "u", "agent_id": "a", "owner": f"uid:{os.getuid()}", **more}
            answer = await client.post("/v1/admin/tokens", json={**asked, "ttl_s": 60})
            tokens.append(answer.json()["token"])
        for token in tokens:
            async with served.client(token) as other:
                for path in (f"/commands/{name}", f"/commands/{name}/follow", "/usage"):
                    refused(await other.get(f"{at}/c1{path}"), 404, "not_found")
                asked = {"command": "true"}
                refused(await other.post(f"{at}/c1/commands", json=asked), 404, "not_found")
        async with served.client(tokens[0]) as own:
            assert (await own.post(f"{at}/c2/commands", json={"command": "true"})).is_success
            refused(await own.get(f"{at}/c2/commands/{name}"), 404, "not_found")


async def test_a_follower_who_comes_back_gets_what_it_missed(data: Path) -> None:
    async with live(data) as served, served.client() as client:
        box = await made(client)
        at = f"/v1/sandboxes/{box['id']}/conversations/default/commands"
        name = (await client.post(at, json={"command": "echo one; echo two"})).json()["id"]
        await client.get(f"{at}/{name}/wait")
        whole = (await client.get(f"{at}/{name}/follow")).text
        assert whole.count("event: log") >= 1
        assert whole.rstrip().split("event: ")[-1].startswith("command_end")
        rest = await client.get(f"{at}/{name}/follow", headers={"last-event-id": "4"})
        assert '"offset":4' in rest.text
        assert "one" not in rest.text.split("command_end")[0]
        refused(await client.get(f"{at}/{name}/follow?offset=999"), 400, "invalid_offset")
