"""The whole loop with each SDK against a server as strict as a provider: whatever a model calls and
whatever comes of it, the next request is one that is accepted."""

import json

import pytest
from asked_models import DIALECTS, asked_model
from model_dialects import Dialect

from sbx import AsyncSandbox
from sbx.agent.agent import Agent
from sbx.agent.messages import Response, TokenUsage, ToolCall

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
PLOT = f"from IPython.display import display\ndisplay({{'image/png': '{PNG}'}}, raw=True)"


def calls(*answer: tuple[str, str]) -> Response:
    """With ids as a provider gives them: the same in each answer."""
    made = tuple(ToolCall(f"toolu_{n}", name, text) for n, (name, text) in enumerate(answer))
    return Response("", made, TokenUsage(10, 5), "tools")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_conversation_goes_on_whatever_a_model_calls(
    dialect: Dialect, box: AsyncSandbox
) -> None:
    answers = (
        calls(("run_code", json.dumps({"code": PLOT})), ("run_code", '{"code": "1/0"}')),
        calls(("run_code", '{"code": "1'), ("no such tool!", "{}"), ("list_files", "")),
        Response(),
        Response("all done", usage=TokenUsage(10, 5)),
    )
    async with asked_model(dialect, *answers) as (model, server):
        agent = Agent(box.conversation("default"), model)
        ended = await agent.run("go")
        last = server.requests[-1]
    assert (ended.reason, ended.content, ended.error) == ("done", "all done", None)
    assert PNG in last.text
    assert "ZeroDivisionError" in last.text
    assert "no_such_tool_" in last.text
