"""What `AsyncSandbox` promises, and a sandbox of `sbx.client` as well: each test runs on both."""

import asyncio

import pytest

from both_faces.faces import Box, says
from sbx import AsyncSandbox, Status
from sbx.protocol.runs import RunEnd, RunStart

STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True: time.sleep(1)
"""


@pytest.mark.full_tier
async def test_code_that_ignores_the_interrupt_is_killed_and_the_next_call_works(
    box: Box,
) -> None:
    await box.run("kept = 1")
    run = await box.run(STUBBORN, timeout=0.3)
    assert (run.status, run.state_lost) == (Status.TIMEOUT, True)
    after = await box.run("'kept' in globals()")
    assert (after.result, after.status) == ("False", "ok")
    assert after.state_lost
    assert not (await box.run("1")).state_lost


async def test_code_that_catches_the_interrupt_can_be_interrupted_again(box: Box) -> None:
    code = """
import time
for _ in range(2):
    try:
        print('waiting\\n', end='', flush=True); time.sleep(50)
    except KeyboardInterrupt: print('caught', flush=True)
"""
    async for event in box.stream(code, timeout=55):
        if says(event, "waiting"):
            assert await box.interrupt()
    assert isinstance(event, RunEnd)
    assert event.run.stdout == "waiting\ncaught\n" * 2


@pytest.mark.full_tier
async def test_conversations_have_state_and_files_of_their_own(box: Box) -> None:
    other = box.conversation("other")
    assert box.conversation("other") is other
    await asyncio.gather(box.run("x = 1; open('mine', 'w')"), other.run("x = 2"))
    assert (await box.run("x")).result == "1"
    assert (await other.run("x")).result == "2"
    assert [entry.name for entry in await other.files.list()] == ["uploads"]
    await other.uploads.put_bytes("u", b"")
    assert await box.uploads.list() == ()
    run = await other.run("import glob; glob.glob('/workspace/*')")
    assert run.result == "['/workspace/uploads']"


async def test_a_conversation_that_is_killed_leaves_another_one_alone(box: Box) -> None:
    other = box.conversation("other")
    await other.run("x = 2")
    await box.run("import os; os._exit(1)")
    run = await other.run("x")
    assert (run.result, run.state_lost) == ("2", False)


@pytest.mark.full_tier
async def test_cells_run_one_after_the_other(box: Box) -> None:
    runs = await asyncio.gather(*(box.run(f"print({number})") for number in range(20)))
    counts = [run.execution_count or 0 for run in runs]
    if isinstance(box, AsyncSandbox):
        assert counts == list(range(1, 21))
    else:  # each call has its own connection, and the service reads them in any order
        assert sorted(counts) == list(range(1, 21))
    assert [run.stdout for run in runs] == [f"{number}\n" for number in range(20)]


async def test_stop_keeps_files_and_says_nothing_of_lost_state(box: Box) -> None:
    await box.run("x = 1; open('kept', 'w').close()")
    await box.stop()
    run = await box.run("import os; ('x' in globals(), os.path.exists('kept'))")
    assert (run.result, run.state_lost) == ("(False, True)", False)


async def test_stop_ends_a_busy_cell(box: Box) -> None:
    async for event in box.stream("import time\nprint('busy')\ntime.sleep(50)"):
        if says(event, "busy"):
            await box.stop()
    assert isinstance(event, RunEnd)
    assert (event.run.status, event.run.state_lost) == ("interrupted", True)


async def test_a_cancelled_call_interrupts_its_own_cell_and_no_other(box: Box) -> None:
    """Once, cancelling a call that still waited in the queue interrupted the cell before it."""
    code = "import os, time\nopen('begun', 'w').close()\n"
    code += "while not os.path.exists('over'): time.sleep(0.01)\n'whole'"
    running = asyncio.create_task(box.run(code))
    await box.shell("until [ -e begun ]; do sleep 0.01; done")
    queued = asyncio.create_task(box.run("open('ran', 'w')"))
    beside = asyncio.create_task(box.shell("sleep 30"))
    await asyncio.sleep(0.2)  # at any moment it must do
    queued.cancel()
    beside.cancel()
    await asyncio.wait([queued, beside])
    await box.files.write("over", "")
    assert (await running).result == "'whole'"
    assert "ran" not in [entry.name for entry in await box.files.list()]


@pytest.mark.full_tier
async def test_a_cancelled_cell_is_interrupted(box: Box) -> None:
    await box.run("x = 1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await box.run("import time; time.sleep(50)")
    assert (await box.run("x", timeout=55)).result == "1"


@pytest.mark.full_tier
async def test_a_stream_that_nobody_follows_any_more_goes_on(box: Box) -> None:
    async for event in box.stream("import time; time.sleep(0.3); open('done', 'w').close()"):
        assert isinstance(event, RunStart)
        break
    assert (await box.run("import os; os.path.exists('done')")).result == "True"
