"""Several kernels over the files of one conversation: each test runs embedded and connected."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from both_faces.faces import Box, Make, says
from sbx import Sandbox
from sbx.errors import BadRequest, Closed, Conflict, NotFound
from sbx.protocol.contexts import CONTEXTS_MAX
from sbx.protocol.runs import Cause, RunEnd, Stdout

HANG = "import time; print('on', flush=True); time.sleep(50)"


async def hangs(box: Box, name: str) -> "asyncio.Task[RunEnd]":
    """A cell that runs in this context, and will until it is ended."""
    context = await box.contexts.get(name)
    began = asyncio.Event()

    async def follow() -> RunEnd:
        async for event in context.stream(HANG, timeout=55):
            if says(event, "on"):
                began.set()
        assert isinstance(event, RunEnd)
        return event

    task = asyncio.create_task(follow())
    async with asyncio.timeout(60):
        await began.wait()
    return task


@pytest.mark.core
async def test_contexts_share_files_and_uploads_and_no_variables(box: Box) -> None:
    await box.run("x = 'first'; open('made', 'w').write('by the first')")
    await box.uploads.put_bytes("a.csv", b"1,2\n")
    other = await box.contexts.create("other")
    run = await other.run("'x' in globals(), open('made').read()")
    assert run.result == "(False, 'by the first')"
    assert (await other.run("open('uploads/temparea/a.csv').read()")).result == r"'1,2\n'"
    await other.run("x = 'other'; open('made', 'w').write('by the other')")
    assert (await box.run("x, open('made').read()")).result == "('first', 'by the other')"
    assert (await other.run("x")).result == "'other'"
    run = await other.shell("cat made; ls /proc | grep -c '^[0-9]'")
    assert run.stdout.startswith("by the other")


@pytest.mark.core
async def test_contexts_are_listed_found_and_deleted_by_name(box: Box) -> None:
    assert [one.name for one in await box.contexts.list()] == ["default"]
    made = await box.contexts.create("b")
    assert (made.name, made.receipt is not None) == ("b", True)
    await box.contexts.create("a ü")
    assert [one.name for one in await box.contexts.list()] == ["default", "a ü", "b"]
    assert (await box.contexts.get("a ü")).name == "a ü"
    await box.contexts.delete("b")
    assert [one.name for one in await box.contexts.list()] == ["default", "a ü"]
    for call in (box.contexts.get, box.contexts.delete):
        with pytest.raises(NotFound, match="context 'b' does not exist"):
            await call("b")
    with pytest.raises((Closed, NotFound)):
        await made.run("1")
    again = await box.contexts.create("b")
    assert not (await again.run("1")).state_lost


@pytest.mark.full_tier
@pytest.mark.core
@pytest.mark.parametrize("name", ["other", "default"])
async def test_a_restart_gives_a_clean_namespace_and_ends_what_runs(box: Box, name: str) -> None:
    await box.contexts.create("other")
    beside = await box.contexts.get("default" if name == "other" else "other")
    await beside.run("kept = 1")
    context = await box.contexts.get(name)
    await context.run("x = 1; open('kept', 'w')")
    busy = await hangs(box, name)
    queued = context.start_run("open('ran', 'w')", timeout=50)
    waiting = asyncio.create_task(queued.result())
    async with asyncio.timeout(60):
        while not queued.run_id:  # noqa: ASYNC110  # it waits as soon as it has one
            await asyncio.sleep(0.02)
    await context.restart()
    ended = (await busy).run
    assert ended.status == "interrupted"
    assert ended.error is not None
    assert ended.error.name == "ContextRestarted"
    assert (await waiting).status == "interrupted"
    run = await context.run(
        "import os; 'x' in globals(), os.path.exists('kept'), os.path.exists('ran')"
    )
    assert (run.result, run.state_lost, run.execution_count) == ("(False, True, False)", False, 1)
    assert (await beside.run("kept")).result == "1"


@pytest.mark.core
async def test_one_that_is_deleted_while_it_runs_ends_its_runs_and_no_others(box: Box) -> None:
    await box.contexts.create("other")
    first, other = await hangs(box, "default"), await hangs(box, "other")
    await box.contexts.delete("other")
    ended = (await other).run
    assert (ended.status, ended.state_lost) == ("interrupted", True)
    assert ended.error is not None
    assert ended.error.name == "ContextDeleted"
    assert not first.done()
    assert await box.interrupt()
    run = (await first).run
    assert run.error is not None
    assert run.error.name == "KeyboardInterrupt"
    assert not (await box.run("1")).state_lost


@pytest.mark.full_tier
async def test_an_interrupt_reaches_its_own_context_only(box: Box) -> None:
    other = await box.contexts.create("other")
    assert not await other.interrupt()
    first, second = await hangs(box, "default"), await hangs(box, "other")
    assert await other.interrupt()
    assert (await second).run.status == "interrupted"
    assert not first.done()
    assert await box.interrupt()
    assert (await first).run.status == "interrupted"


@pytest.mark.core
async def test_the_crash_of_one_leaves_the_others(box: Box) -> None:
    other = await box.contexts.create("other")
    await box.run("x = 1")
    await other.run("x = 2")
    run = await other.run("import os; os._exit(3)")
    assert (run.status, run.cause, run.state_lost) == ("killed", Cause.CRASHED, True)
    assert (await box.run("x")).result == "1"
    run = await other.run("'x' in globals()")
    assert (run.result, run.state_lost) == ("False", True)
    run = await box.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run.cause is Cause.CRASHED
    assert not (await other.run("1")).state_lost


async def test_a_stop_ends_all_of_them_and_keeps_their_names(box: Box) -> None:
    other = await box.contexts.create("other")
    await other.run("x = 1")
    await box.stop()
    run = await (await box.contexts.get("other")).run("'x' in globals()")
    assert (run.result, run.state_lost) == ("False", False)


async def test_input_is_answered_in_a_context(box: Box) -> None:
    other = await box.contexts.create("other")
    run = await other.run("input('name? ')", on_input=lambda prompt: prompt.upper())
    assert run.result == "'NAME? '"


@pytest.mark.parametrize("name", ["", "..", "a/b"])
async def test_what_is_no_name_is_refused(box: Box, name: str) -> None:
    calls: tuple[Callable[[str], Awaitable[object]], ...] = (
        box.contexts.create,
        box.contexts.get,
        box.contexts.delete,
    )
    for call in calls:
        with pytest.raises(BadRequest) as refused:
            await call(name)
        assert refused.value.details["field"] == "context"


async def test_names_are_taken_once_and_default_is_there_for_good(box: Box) -> None:
    made = await asyncio.gather(
        *(box.contexts.create("same") for _ in range(3)), return_exceptions=True
    )
    refused = [one for one in made if isinstance(one, Conflict)]
    assert [one.code for one in refused] == ["context_exists"] * 2
    for call, code in (
        (box.contexts.create("default"), "context_exists"),
        (box.contexts.delete("default"), "default_context"),
    ):
        with pytest.raises(Conflict) as caught:
            await call
        assert caught.value.code == code


@pytest.mark.core
async def test_there_are_so_many_and_no_more(box: Box) -> None:
    names = [f"c{number}" for number in range(1, CONTEXTS_MAX)]
    await asyncio.gather(*(box.contexts.create(name) for name in names))
    with pytest.raises(Conflict) as full:
        await box.contexts.create("more")
    assert (full.value.code, full.value.details["limit"]) == ("too_many_contexts", CONTEXTS_MAX)
    await box.contexts.delete("c1")
    assert (await (await box.contexts.create("more")).run("1")).result == "1"
    other = box.conversation("other")
    await other.run("1")
    assert [one.name for one in await other.contexts.list()] == ["default"]


def test_the_synchronous_ones_do_the_same(make: Make) -> None:
    with make() as box:
        box.run("x = 1; open('shared', 'w').write('!')")
        other = box.contexts.create("other")
        assert other.run("'x' in globals(), open('shared').read()").result == "(False, '!')"
        assert (
            "".join(
                event.text for event in other.stream("print('live')") if isinstance(event, Stdout)
            )
            == "live\n"
        )
        other.run("y = 1")
        assert other.restart() == other.receipt
        assert other.run("'y' in globals()").result == "False"
        assert not other.interrupt()
        assert [one.name for one in box.contexts.list()] == ["default", "other"]
        assert box.contexts.get("other").shell("cat shared").stdout == "!"
        other.stop()
        assert other.receipt is None
        box.contexts.delete("other")
        with pytest.raises(NotFound):
            box.contexts.get("other")
        assert isinstance(box, Sandbox)
