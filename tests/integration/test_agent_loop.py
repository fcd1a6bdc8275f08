"""The loop over real kernels: an abort, a file handed over, a hundred conversations at once."""

import asyncio
import json
from contextlib import AsyncExitStack, aclosing

import pytest

from sbx import AsyncSandbox, Runtime, Settings
from sbx.agent.agent import Agent
from sbx.agent.messages import Response, ToolCall
from sbx.agent.models.replay import RecordedRequest, ReplayModel
from sbx.agent.sandbox import copy_file
from sbx.protocol.agent import ToolEnd, ToolOutput

MANY = 100
DEADLINE_S = 90.0


def calling(name: str, **arguments: str) -> Response:
    return Response("", (ToolCall("call_0", name, json.dumps(arguments)),), stop="tools")


async def test_abort_interrupts_the_cell_and_the_kernel_goes_on(box: AsyncSandbox) -> None:
    code = "kept = 7\nprint('busy', flush=True)\nimport time\ntime.sleep(600)"
    model = ReplayModel([calling("run_code", code=code), calling("run_code", code="kept"), "ok"])
    agent = Agent(box, model)
    async with asyncio.timeout(DEADLINE_S):
        async with aclosing(agent.stream("go")) as events:
            async for event in events:
                if isinstance(event, ToolOutput):
                    agent.abort()
        assert event.type == "run_end"
        assert event.reason == "aborted"
        async with aclosing(agent.stream("go on")) as events:
            ends = [event async for event in events if isinstance(event, ToolEnd)]
    assert "7" in ends[0].result


@pytest.mark.full_tier
async def test_a_file_is_handed_from_one_sandbox_to_another(runtime: Runtime) -> None:
    async with await runtime.create() as one, await runtime.create() as other:
        await one.files.write("/workspace/part.bin", b"\x00\xff")
        path = await copy_file(one, "/workspace/part.bin", other)
        assert (await other.run(f"open({path!r}, 'rb').read()")).result == repr(b"\x00\xff")


class Everybody:
    """Lets all go on when the last is here."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._here = asyncio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._here.set()
        await self._here.wait()


@pytest.mark.full_tier
async def test_a_hundred_conversations_at_once_see_only_their_own_markers() -> None:
    everybody = Everybody(MANY)

    async def converse(runtime: Runtime, held: AsyncExitStack, marker: str) -> None:
        async def look(_: RecordedRequest) -> Response:
            await everybody.wait()  # by now each has a live kernel with its marker
            return calling("run_code", code="marker + ' ' + open('marker.txt').read()")

        leave = f"marker = '{marker}'\nopen('marker.txt', 'w').write(marker)"
        model = ReplayModel(
            [calling("run_code", code=leave), look, calling("list_files"), "done"], name=marker
        )
        box = await held.enter_async_context(await runtime.create())
        agent = Agent(box, model)
        end = await agent.run(f"I am {marker}")
        assert (end.reason, len(model.requests)) == ("done", 4)
        answer = [message.content for message in model.requests[-1].messages]
        assert f"{marker} {marker}" in answer[4]
        for number in range(MANY):
            other = f"m-{number:03}"
            assert other == marker or not any(other in text for text in answer)

    async with (
        asyncio.timeout(DEADLINE_S),
        Runtime(Settings(kernels_max=MANY + 10)) as runtime,
        AsyncExitStack() as held,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(MANY):
            tasks.create_task(converse(runtime, held, f"m-{number:03}"))
