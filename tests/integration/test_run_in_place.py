"""A run on a warm kernel, which its caller's own task drives: the same as any other run."""

import asyncio
import contextlib
from typing import Any, NoReturn

import pytest

from sbx import AsyncSandbox
from sbx.errors import Broken, Closed
from sbx.kernels.kernel import Kernel
from tests.made_tasks import made_tasks

FOREVER = "begun = True\nopen('begun', 'w').close()\nwhile True: pass"


@pytest.fixture
async def warm(box: AsyncSandbox) -> AsyncSandbox:
    await box.run("kept = 1")
    return box


async def begun(box: AsyncSandbox) -> None:
    """Wait until FOREVER runs, and for the next time forget that it did."""
    async with asyncio.timeout(60):
        while "begun" not in [entry.name for entry in await box.files.list()]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await box.files.delete("begun")


async def test_it_makes_no_task(warm: AsyncSandbox) -> None:
    with made_tasks() as made:
        assert (await warm.run("kept")).result == "1"
    assert made == []


@pytest.mark.full_tier
async def test_a_cancelled_caller_s_cell_ends_before_the_next_begins(warm: AsyncSandbox) -> None:
    caller = asyncio.create_task(warm.run(FOREVER))
    await begun(warm)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    run = await warm.run("kept, begun")
    assert (run.result, run.state_lost) == ("(1, True)", False)


@pytest.mark.full_tier
async def test_a_caller_s_own_time_out_interrupts_it(warm: AsyncSandbox) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await warm.run(FOREVER)
    assert (await warm.run("kept")).result == "1"


@pytest.mark.full_tier
async def test_a_cancelled_caller_s_cell_that_ignores_it_has_its_deadline(
    warm: AsyncSandbox,
) -> None:
    ignoring = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{FOREVER}"
    caller = asyncio.create_task(warm.run(ignoring, timeout=3))
    await begun(warm)
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    assert (await warm.run("1")).state_lost


async def test_it_can_be_interrupted(warm: AsyncSandbox) -> None:
    caller = asyncio.create_task(warm.run(FOREVER))
    await begun(warm)
    assert await warm.interrupt()
    assert (await caller).status == "interrupted"
    assert not await warm.interrupt()


async def test_stop_ends_it(warm: AsyncSandbox) -> None:
    caller = asyncio.create_task(warm.run(FOREVER))
    await begun(warm)
    await warm.stop()
    assert caller.done() or (await caller).state_lost
    assert (await caller).status == "interrupted"
    assert (await warm.run("1")).result == "1"


async def test_close_ends_it_and_says_so(warm: AsyncSandbox) -> None:
    caller = asyncio.create_task(warm.run(FOREVER))
    await begun(warm)
    await warm.close()
    with pytest.raises(Closed):
        await caller


async def test_others_wait_for_their_turn(warm: AsyncSandbox) -> None:
    runs = await asyncio.gather(*(warm.run(f"order = {n}; order") for n in range(10)))
    assert [run.result for run in runs] == [str(n) for n in range(10)]
    assert [run.execution_count for run in runs] == list(range(2, 12))


@pytest.mark.parametrize("part", ["begin", "next", "counters"])
async def test_what_fails_in_sbx_itself_is_broken_and_ends_the_turn(
    warm: AsyncSandbox, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async def fail(*_: Any, **__: Any) -> NoReturn:
        raise TimeoutError("a part of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, part, fail)
        with pytest.raises(Broken, match="a part of ours"):
            await warm.run("1/0")
    async with asyncio.timeout(60):
        await warm.stop()  # with whatever is left of that cell
        assert (await warm.run("1")).result == "1"


async def test_a_cell_that_is_followed_no_further_lets_go_of_the_turn(warm: AsyncSandbox) -> None:
    """Also where the task that took it over is cancelled before its first step."""

    def cancel_the_new_task() -> None:
        for task in warm.conversation("default").contexts.default._tasks.values():
            task.cancel()

    caller = asyncio.create_task(warm.run(FOREVER))
    await begun(warm)
    caller.cancel()
    asyncio.get_running_loop().call_soon(cancel_the_new_task)
    with pytest.raises(asyncio.CancelledError):
        await caller
    await warm.stop()  # with what is left of that cell
    async with asyncio.timeout(60):
        assert (await warm.run("1")).result == "1"
