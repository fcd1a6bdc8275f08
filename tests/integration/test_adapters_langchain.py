"""LangChain tools, called as LangChain's agents call them."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

import sbx
from sbx import AsyncSandbox, Sandbox
from sbx.adapters.langchain import python_tool, sandbox_tools
from sbx.agent.tools.tool import ToolResult
from sbx.errors import BadRequest

pytestmark = pytest.mark.full_tier
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
PLOT = f"from IPython.display import display\ndisplay({{'image/png': '{PNG}'}}, raw=True)"


@pytest.fixture(scope="module")
def sync_box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box
    sbx.close()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """As a model's message carries it."""
    return {"type": "tool_call", "id": "call-1", "name": name, "args": arguments}


@pytest.mark.ci_tier
def test_python_keeps_its_state(sync_box: Sandbox) -> None:
    tool = python_tool(sync_box)
    tool.invoke({"code": "x = 20"})
    assert "21" in tool.invoke({"code": "x + 1"})


async def test_both_worlds_share_one_sandbox(sync_box: Sandbox) -> None:
    tool = python_tool(sync_box)
    await tool.ainvoke({"code": "y = 1"})
    assert "2" in await tool.ainvoke({"code": "y + 1"})


async def test_an_asynchronous_sandbox_does_as_well(box: AsyncSandbox) -> None:
    tool = python_tool(box)
    assert "42" in await tool.ainvoke({"code": "print(6 * 7)"})
    with pytest.raises(BadRequest, match="asyncio"):
        tool.invoke({"code": "1"})


def test_a_call_gives_a_message_with_the_result_beside(sync_box: Sandbox) -> None:
    tools = {tool.name: tool for tool in sandbox_tools(sync_box)}
    assert set(tools) >= {"run_code", "execute_command", "read_file", "write_file"}
    tools["write_file"].invoke(call("write_file", path="a.txt", content="hello"))
    message = tools["read_file"].invoke(call("read_file", path="a.txt"))
    assert isinstance(message, ToolMessage)
    assert (message.status, message.tool_call_id) == ("success", "call-1")
    assert "hello" in message.text
    assert isinstance(message.artifact, ToolResult)


@pytest.mark.parametrize(
    ("arguments", "answer"), [({"code": "1/0"}, "ZeroDivisionError"), ({"cod": "1"}, "code")]
)
@pytest.mark.ci_tier
def test_what_goes_wrong_is_told_to_the_model(
    sync_box: Sandbox, arguments: dict[str, str], answer: str
) -> None:
    message = python_tool(sync_box).invoke(call("run_code", **arguments))
    assert message.status == "error"
    assert answer in message.text


def test_figures_come_as_images(sync_box: Sandbox) -> None:
    message = python_tool(sync_box).invoke(call("run_code", code=PLOT))
    kinds = [block["type"] for block in message.content_blocks]
    assert kinds == ["text", "image"]


@pytest.mark.ci_tier
def test_models_are_told_the_schema(sync_box: Sandbox) -> None:
    function = convert_to_openai_tool(python_tool(sync_box))["function"]
    assert function["name"] == "run_code"
    assert function["parameters"]["required"] == ["code"]
