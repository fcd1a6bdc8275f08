"""Background commands, standard input and usage: each test runs on both faces."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from both_faces.faces import FACES, Box, asynchronous
from sbx import errors
from sbx.protocol.commands import CommandCause, CommandState
from sbx.protocol.runs import RunEnd, RunStart, Stdout

pytestmark = pytest.mark.core
STUBBORN = "trap '' TERM INT HUP; echo ready; while true; do sleep 1; done"


@pytest_asyncio.fixture(scope="module", params=FACES)
async def whole(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    """One sandbox for the tests of this module, each of which has a conversation of its own."""
    async with asynchronous(request.param) as box:
        yield box


@pytest_asyncio.fixture
async def box(whole: Box) -> AsyncIterator[Any]:
    talk = whole.conversation(secrets.token_hex(4))
    yield talk
    await talk.stop()


async def text_of(command: Any, offset: int = 0) -> str:
    return "".join([piece.text async for piece in command.follow(offset)])


async def started(command: Any, text: str) -> None:
    """Wait until it has said this."""
    async with asyncio.timeout(60):
        async for piece in command.follow():
            if text in piece.text:
                return


async def test_a_command_outlives_the_call_and_tells_how_it_ended(box: Any) -> None:
    command = await box.commands.start(
        "echo one; sleep 0.1; echo two >&2; exit 3",
        env={"A": "b"},
        cwd="/tmp",
    )
    assert (await command.status()).running
    assert await text_of(command) == "one\ntwo\n"
    ended = await command.wait(60)
    assert (ended.state, ended.exit_code, ended.cause) == (CommandState.EXITED, 3, None)
    assert (ended.ended_at or 0) >= ended.started_at
    assert (ended.log_begin, ended.log_end) == (0, 8)
    piece = await command.logs(4)
    assert (piece.offset, piece.text, piece.next_offset) == (4, "two\n", 8)
    assert (await command.logs(8)).text == ""
    assert await text_of(command, 4) == "two\n"
    with pytest.raises(errors.BadRequest, match="no offset 9") as refused:
        await command.logs(9)
    assert refused.value.code == "invalid_offset"
    again = await box.commands.get(command.id)
    assert await again.status() == ended
    assert [one.id for one in await box.commands.list()] == [command.id]


async def test_env_cwd_and_the_kernels_files_are_those_of_the_sandbox(box: Any) -> None:
    await box.files.write("sub/a.txt", "content")
    command = await box.commands.start("pwd; cat a.txt; echo $A", cwd="sub", env={"A": "b"})
    assert await text_of(command) == "/workspace/sub\ncontentb\n"
    for wrong in ({"A=B": "c"}, {"": "c"}):
        with pytest.raises(errors.BadRequest):
            await box.commands.start("true", env=wrong)


async def test_what_it_writes_is_followed_live_beside_a_busy_cell(box: Any) -> None:
    until_told = "import os, time\nwhile not os.path.exists('over'): time.sleep(0.01)"
    busy = asyncio.create_task(box.run(until_told))
    command = await box.commands.start("for i in 1 2 3; do echo $i; sleep 0.1; done")
    assert await text_of(command) == "1\n2\n3\n"
    assert not busy.done()
    await box.files.write("over", "")
    assert (await busy).ok


async def test_a_command_that_ignores_its_signal_is_killed(box: Any) -> None:
    command = await box.commands.start(STUBBORN)
    await started(command, "ready")
    ended = await command.stop(grace_s=0.2)
    assert (ended.state, ended.exit_code) == (CommandState.STOPPED, 137)
    assert await command.stop() == ended


async def test_a_command_that_minds_its_signal_ends_in_its_own_way(box: Any) -> None:
    command = await box.commands.start("trap 'echo bye; exit 7' TERM; echo up; sleep 100 & wait")
    await started(command, "up")
    ended = await command.stop()
    assert (ended.state, ended.exit_code) == (CommandState.STOPPED, 7)
    assert await text_of(command) == "up\nbye\n"


async def test_stdin_that_was_left_open_is_fed(box: Any) -> None:
    command = await box.commands.start("while read line; do echo got $line; done", stdin_open=True)
    assert (await command.status()).stdin_open
    await command.write("eins\nzwéi\n")
    await started(command, "zwéi")
    await command.write(None)
    assert (await command.wait(60)).exit_code == 0
    assert (await command.logs()).text == "got eins\ngot zwéi\n"
    with pytest.raises(errors.Conflict) as refused:
        await command.write("more")
    assert refused.value.code == "stdin_closed"
    closed = await box.commands.start("cat; echo at once")
    assert await text_of(closed) == "at once\n"


async def test_stdin_that_is_not_read_is_bounded(box: Any) -> None:
    command = await box.commands.start("echo up; sleep 100", stdin_open=True)
    await started(command, "up")
    for _ in range(16):
        await command.write("x" * 65_536)
    with pytest.raises(errors.Conflict) as refused:
        await command.write("x" * 65_537)  # a pipe holds 65 536
    assert refused.value.code == "stdin_full"
    assert (await box.run("1 + 1")).result == "2"
    await command.stop()


async def test_a_command_that_closes_its_stdin_refuses_more(box: Any) -> None:
    command = await box.commands.start("exec 0<&-; echo closed; sleep 100", stdin_open=True)
    await started(command, "closed")
    await command.write("y")
    async with asyncio.timeout(60):
        while (await command.status()).stdin_open:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    with pytest.raises(errors.Conflict) as refused:
        await command.write("y")
    assert refused.value.code == "stdin_closed"
    await command.stop()


async def test_a_run_in_the_foreground_reads_what_it_is_given_meanwhile(box: Any) -> None:
    run_id, said = "", ""
    async for event in box.stream_shell("cat; echo end", stdin="first\n", stdin_open=True):
        if isinstance(event, RunStart):
            run_id = event.run_id
        if isinstance(event, Stdout):
            said += event.text
            if said == "first\n":
                await box.write_stdin(run_id, "second\n")
                await box.write_stdin(run_id, None)
    assert isinstance(event, RunEnd)
    assert (event.run.stdout, event.run.exit_code) == ("first\nsecond\nend\n", 0)
    with pytest.raises((errors.NotFound, errors.Conflict)):
        await box.write_stdin(run_id, "late")


async def test_the_end_of_the_kernel_is_the_end_of_its_commands_and_says_why(box: Any) -> None:
    stopped = await box.commands.start("echo up; sleep 100")
    await started(stopped, "up")
    await box.stop()
    answer = await stopped.wait(60)
    assert (answer.state, answer.cause) == (CommandState.KILLED, CommandCause.STOPPED)
    assert answer.reason
    assert await text_of(stopped) == "up\n"
    crashed = await box.commands.start("echo up; sleep 100")
    await started(crashed, "up")
    await box.run("import os; os._exit(1)")
    answer = await crashed.wait(60)
    assert (answer.state, answer.cause) == (CommandState.KILLED, CommandCause.CRASHED)
    killed = await box.commands.start("echo up; sleep 100")
    await started(killed, "up")
    await box.run("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", timeout=0.2)
    answer = await killed.wait(60)
    assert (answer.state, answer.cause) == (CommandState.KILLED, CommandCause.INTERRUPTED)


async def test_a_new_kernel_for_a_command_says_that_state_is_lost(box: Any) -> None:
    await box.run("kept = 1")
    await box.run("import os; os._exit(1)")
    command = await box.commands.start("true")
    assert (await command.wait(60)).state_lost


async def test_invalid_text_is_replaced_and_escapes_are_kept_as_they_are(box: Any) -> None:
    command = await box.commands.start(r"printf 'a\xff\xfe\xc3b\x00\x1b[31m\xf0\x9f\x98\x80'")
    assert await text_of(command) == "a\ufffd\ufffd\ufffdb\x00\x1b[31m😀"


async def test_unknown_ids_are_not_found(box: Any, whole: Box) -> None:
    await box.run("1")
    for name in ("cmd-000000000000", "nope", "a" * 300, "..%2f"):
        with pytest.raises(errors.NotFound):
            await box.commands.get(name)
    with pytest.raises(errors.NotFound):
        await box.write_stdin("run-000000000000", "x")
    command = await whole.conversation("other").commands.start("true")
    with pytest.raises(errors.NotFound):
        await box.commands.get(command.id)


async def test_usage_tells_what_a_busy_sandbox_takes(box: Any) -> None:
    await box.start()
    before = (await box.usage()).kernels - 1
    await box.run("data = bytearray(60 << 20)\nopen('file', 'wb').write(bytes(3 << 20))")
    command = await box.commands.start("while true; do :; done")
    looks = []
    async for usage in box.stream_usage(0.4):
        looks.append(usage)
        if len(looks) == 3:
            break
    await command.stop()
    first, last = looks[0], looks[-1]
    assert first.kernels == before + 1
    assert last.source in ("cgroup1", "cgroup2", "proc")
    assert (last.cpu_s or 0) - (first.cpu_s or 0) > 0.1
    assert 60 << 20 < (last.memory or 0) <= last.memory_max
    assert (last.memory_peak or 0) >= 60 << 20
    assert 3 <= (last.pids or 0) <= last.pids_max
    assert (last.disk or 0) >= 3 << 20
    assert (last.disk_files, last.disk_complete) == (1, True)
    assert (last.network_received, last.network_sent) == (0, 0)
    with pytest.raises(errors.BadRequest):
        async for _ in box.stream_usage(0.01):
            pass
