"""The loop over real kernels: a whole task, an abort, and a hundred conversations at once."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing

import pytest

from sbx import AsyncSandbox, Runtime, Settings
from sbx.agent.agent import Agent
from sbx.agent.approvals import Approvals
from sbx.agent.handing import hand
from sbx.agent.messages import Response, ToolCall
from sbx.agent.models.replay import Answer, Asked, ReplayModel
from sbx.agent.tools.permissions import Permissions
from sbx.protocol.agent import ToolEnd, ToolOutput, ToolStart
from sbx.protocol.approvals import Reach

MANY = 100
DEADLINE_S = 90.0
CSV = b"region,amount\nnorth,10\nsouth,32\n"


def calling(name: str, **arguments: str) -> Response:
    return Response("", (ToolCall("call_0", name, json.dumps(arguments)),), stop="tools")


def after(check: Callable[[Asked], bool], answer: Answer) -> Answer:
    """The answer of a model that has seen what it should; one that has not says so."""
    return lambda asked: answer if check(asked) else f"unexpected: {asked.messages[-1]}"  # type: ignore[return-value]


def last(asked: Asked) -> str:
    return asked.messages[-1].content


async def test_a_whole_task_with_a_mistake_that_is_read_and_mended(runtime: Runtime) -> None:
    load = "import pandas as pd\nsales = pd.read_csv('/workspace/uploads/temparea/sales.csv')\n"
    figure = "sales.plot.bar(x='region', y='amount')\nimport matplotlib.pyplot as plt\nplt.show()"
    model = ReplayModel(
        [
            after(
                lambda asked: "/workspace/uploads/temparea/sales.csv" in asked.system,
                calling("run_code", code=load + "sales['total'].sum()"),
            ),
            after(
                lambda asked: asked.messages[-1].is_error and "KeyError: 'total'" in last(asked),
                calling("run_code", code="int(sales['amount'].sum())"),
            ),
            after(lambda asked: "42" in last(asked), calling("run_code", code=figure)),
            after(
                lambda asked: (
                    "/workspace/uploads/generated/" in last(asked)
                    and asked.messages[-1].images[0].media_type == "image/png"
                ),
                calling("write_file", path="/workspace/result.txt", content="total: 42\n"),
            ),
            after(lambda asked: not asked.messages[-1].is_error, "The total is 42."),
        ]
    )
    async with await runtime.create("data-science") as box:
        await box.uploads.put_bytes("sales.csv", CSV)
        end = await Agent(box, model).run("What is the total? Draw it.")
        assert (end.reason, end.content) == ("done", "The total is 42.")
        assert await box.files.read_bytes("/workspace/result.txt") == b"total: 42\n"
        (picture,) = await box.files.find("*.png", "/workspace/uploads/generated")
        assert (await box.files.read_bytes(picture.path)).startswith(b"\x89PNG")


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


async def test_the_effect_of_a_command_is_approved_and_nothing_runs_twice(
    box: AsyncSandbox,
) -> None:
    """It is rehearsed, the workspace changes under it, and another call is rehearsed anew."""
    call = calling("execute_command", command="echo once >> log.txt; echo said")
    model = ReplayModel([call, call, "ok"])
    approvals = Approvals()
    agent = Agent(box, model, approvals=approvals, permissions=Permissions("project"))
    asked: list[ToolStart] = []
    results: list[str] = []
    async with asyncio.timeout(DEADLINE_S), aclosing(agent.stream("go")) as events:
        async for event in events:
            if isinstance(event, ToolStart):
                asked.append(event)
                assert event.rehearsal is not None
                assert event.rehearsal["output"] == "said\n"
                if len(asked) == 1:
                    await box.files.write("/workspace/log.txt", "from elsewhere\n")
                await approvals.decide(Reach("local"), event.tool_call_id, True)
            if isinstance(event, ToolEnd):
                results.append("workspace_changed" if event.is_error else event.result[:13])
    assert results == ["workspace_changed", "[stdout]\nsaid"]
    kinds = [start.rehearsal["changes"][0]["kind"] for start in asked if start.rehearsal]
    assert kinds == ["added", "changed"]
    assert await box.files.read_bytes("/workspace/log.txt") == b"from elsewhere\nonce\n"


async def test_a_file_is_handed_from_one_sandbox_to_another(runtime: Runtime) -> None:
    async with await runtime.create() as one, await runtime.create() as other:
        await one.files.write("/workspace/part.bin", b"\x00\xff")
        path = await hand(one, "/workspace/part.bin", other)
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
        async def look(_: Asked) -> Response:
            await everybody.wait()  # by now each has a live kernel with its marker
            return calling("run_code", code="marker + ' ' + open('marker.txt').read()")

        leave = f"marker = '{marker}'\nopen('marker.txt', 'w').write(marker)"
        model = ReplayModel(
            [calling("run_code", code=leave), look, calling("list_files"), "done"], name=marker
        )
        box = await held.enter_async_context(await runtime.create())
        agent = Agent(box, model)
        end = await agent.run(f"I am {marker}")
        assert (end.reason, len(model.asked)) == ("done", 4)
        told = [message.content for message in model.asked[-1].messages]
        assert f"{marker} {marker}" in told[4]
        for number in range(MANY):
            other = f"m-{number:03}"
            assert other == marker or not any(other in text for text in told)

    async with (
        asyncio.timeout(DEADLINE_S),
        Runtime(Settings(kernels_max=MANY + 10)) as runtime,
        AsyncExitStack() as held,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(MANY):
            tasks.create_task(converse(runtime, held, f"m-{number:03}"))
