"""What only the embedded API has: runtimes, and runs that nobody has begun. What it shares with the
client is in both_faces/."""

import asyncio
from pathlib import Path

import pytest

import sbx
from sbx import AsyncSandbox, Runtime
from sbx.errors import Closed, Conflict


@pytest.mark.full_tier
async def test_everything_after_the_runtime_s_close_is_refused() -> None:
    async with Runtime() as runtime:
        box = await runtime.create()
        waiting = asyncio.create_task(box.run("import time; time.sleep(600)"))
        await asyncio.sleep(0.2)  # at any moment it must do
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await runtime.create()
    with pytest.raises(Closed):
        await box.run("1")
    await box.close()
    await runtime.close()


async def test_a_run_that_had_not_begun_when_its_conversation_was_closed_is_told_so(
    box: AsyncSandbox,
) -> None:
    """Once, its caller waited for ever: the task was cancelled before its first step."""
    live = box.conversation("default").start_run("1")
    await box.conversation("default").close()
    with pytest.raises(Closed):
        async with asyncio.timeout(60):
            await live.result()


async def test_a_runtime_that_was_not_started_says_how() -> None:
    with pytest.raises(Closed) as raised:
        await Runtime().create()
    assert "async with" in (raised.value.hint or "")


@pytest.mark.full_tier
async def test_two_runtimes_do_not_share_a_data_directory(tmp_path: Path) -> None:
    settings = sbx.Settings(data_dir=tmp_path / "data")
    async with Runtime(settings):
        with pytest.raises(Conflict) as raised:
            await Runtime(settings).start()
        assert (raised.value.code, bool(raised.value.hint)) == ("data_dir_in_use", True)
    async with Runtime(settings) as runtime, await runtime.create() as box:
        assert (await box.run("1")).ok
