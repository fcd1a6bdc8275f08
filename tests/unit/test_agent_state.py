"""The state of an agent: before, during and after a run."""

from contextlib import aclosing

import pytest

from sbx.agent import AgentState
from sbx.agent.agent import Agent, Budget
from sbx.agent.messages import Price, Response, TokenUsage, ToolCall
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.registry import Tools, builtin, optional
from sbx.protocol.agent import StepEnd, ToolEnd, ToolStart
from tests.fake_sandbox import FakeSandbox

PLAN = '{"steps": [{"text": "print", "state": "active"}]}'
CALLS = (ToolCall("a", "plan", PLAN), ToolCall("b", "run_code", '{"code": "print(1)"}'))


def agent() -> Agent:
    model = ReplayModel([Response("", CALLS, TokenUsage(100, 10), "tools"), "all done"])
    tools = Tools((*builtin(), *optional()))
    budget = Budget(cost=1.0, price=Price(1.0, 2.0))
    return Agent(FakeSandbox(), model, tools=tools, budget=budget)


async def test_the_state_follows_a_run() -> None:
    worker = agent()
    assert worker.state == AgentState()
    pending: list[int] = []
    kept: AgentState | None = None
    async with aclosing(worker.stream("do it", max_steps=7, run_id="run-1")) as events:
        async for event in events:
            state = worker.state
            assert (state.status, state.run_id, state.max_steps) in {
                ("running", "run-1", 7),
                ("ended", "run-1", 7),  # with the last event
            }
            if isinstance(event, ToolStart | ToolEnd):
                pending.append(len(state.pending_calls))
            if isinstance(event, StepEnd) and event.step == 1:
                kept = state
    assert kept is not None
    assert [call.tool_name for call in kept.tool_call_history] == ["plan", "run_code"]
    assert {each.tool_call_id for each in kept.result_history} == {
        call.tool_call_id for call in kept.tool_call_history
    }
    assert kept.plan == ({"text": "print", "state": "active"},)
    assert kept.usage == {"input_tokens": 100, "output_tokens": 10}
    assert kept.cost == pytest.approx(100e-6 + 20e-6)
    assert pending
    ended = worker.state
    assert (ended.status, ended.reason, ended.current_step) == ("ended", "done", None)
    assert ended.pending_calls == ()
    assert ended.tool_call_history == kept.tool_call_history


async def test_a_run_that_is_closed_early_is_not_running() -> None:
    worker = agent()
    async with aclosing(worker.stream("do it")) as events:
        async for event in events:
            if isinstance(event, ToolStart):
                assert worker.state.current_step == 1
                break
    state = worker.state
    assert (state.status, state.reason, state.current_step) == ("ended", None, None)
    assert state.pending_calls == ()
