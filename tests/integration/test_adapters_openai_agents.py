"""Function tools in the OpenAI Agents SDK's own loop, with its scripted model.

The SDK is imported by whoever needs it: that takes seconds, and each process of a run collects all.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import sbx
from sbx import AsyncSandbox, Sandbox

pytestmark = pytest.mark.full_tier
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
PLOT = f"from IPython.display import display\ndisplay({{'image/png': '{PNG}'}}, raw=True)"


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    from agents import set_tracing_disabled

    set_tracing_disabled(True)  # it would be sent to OpenAI
    yield
    set_tracing_disabled(False)


@pytest.fixture(scope="module")
def function_tools() -> Any:
    from sbx.adapters.openai_agents import function_tools

    return function_tools


@pytest.fixture(scope="module")
def sync_box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box
    sbx.close()


def written_call(name: str, arguments: Any, *, call_id: str) -> Any:
    from agents.testing import function_call

    return function_call(name, arguments, call_id=call_id)


def called(name: str, call_id: str, **arguments: Any) -> list[Any]:
    return [written_call(name, arguments, call_id=call_id)]


async def outputs(tools: list[Any], *steps: list[Any]) -> list[Any]:
    """What the model was told that its calls came to, in the end."""
    from agents import Agent, Runner
    from agents.testing import ScriptedModel, assistant_message

    model = ScriptedModel([*steps, [assistant_message("done")]])
    result = await Runner.run(Agent(name="a", tools=tools, model=model), "go")
    assert result.final_output == "done"
    assert model.last_call is not None
    items: Any = model.last_call.input
    return [item["output"] for item in items if item.get("type") == "function_call_output"]


@pytest.mark.ci_tier
async def test_an_agent_works_in_a_sandbox_and_state_stays(
    sync_box: Sandbox, function_tools: Any
) -> None:
    set_x, show_x, written, read, shell = await outputs(
        function_tools(sync_box),
        called("run_code", "1", code="x = 20"),
        called("run_code", "2", code="x + 1"),
        called("write_file", "3", path="a.txt", content="hello"),
        called("read_file", "4", path="a.txt"),
        called("execute_command", "5", command="cat a.txt; exit 3"),
    )
    assert "no output" in set_x
    assert "21" in show_x
    assert "a.txt" in written
    assert "hello" in read
    assert "hello" in shell
    assert "Exit code: 3" in shell


async def test_an_asynchronous_sandbox_does_as_well(box: AsyncSandbox, function_tools: Any) -> None:
    (said,) = await outputs(function_tools(box), called("run_code", "1", code="print(6 * 7)"))
    assert "42" in said


@pytest.mark.ci_tier
async def test_what_goes_wrong_is_told_to_the_model(sync_box: Sandbox, function_tools: Any) -> None:
    raised, wrong, garbled = await outputs(
        function_tools(sync_box),
        called("run_code", "1", code="1/0"),
        called("run_code", "2", cod="1"),
        [written_call("run_code", '{"code": ', call_id="3")],
    )
    assert "ZeroDivisionError" in raised
    assert "code" in wrong
    assert "JSON" in garbled


async def test_figures_come_as_images(sync_box: Sandbox, function_tools: Any) -> None:
    ((text, image),) = await outputs(function_tools(sync_box), called("run_code", "1", code=PLOT))
    assert text["type"] == "input_text"
    assert image["image_url"] == f"data:image/png;base64,{PNG}"


async def test_a_cancelled_call_interrupts_its_run(sync_box: Sandbox, function_tools: Any) -> None:
    tools = {tool.name: tool for tool in function_tools(sync_box)}
    sleeping: Any = tools["run_code"]
    code = "open('/tmp/began', 'w').close()\nimport time\ntime.sleep(600)"
    task = asyncio.ensure_future(sleeping.on_invoke_tool(None, json.dumps({"code": code})))
    await asyncio.to_thread(_wait_for, sync_box)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asyncio.to_thread(sync_box.run, "1 + 1")).result == "2"


def _wait_for(box: Sandbox) -> None:
    while not box.shell("test -e /tmp/began", timeout=10).ok:
        pass
