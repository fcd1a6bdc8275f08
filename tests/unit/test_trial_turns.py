"""The order of the trials of one answer, and projects that ask before each command."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from sbx.agent.agent import Agent
from sbx.agent.approvals import Approvals
from sbx.agent.changing import TrialTurns
from sbx.agent.messages import Response, ToolCall
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.approval_rules import Permissions
from sbx.errors import TooLarge
from sbx.protocol.agent import ToolEnd, ToolPending, ToolStart, question_of
from sbx.protocol.approvals import ApprovalScope
from sbx.protocol.changes import TRIALS_MAX
from tests.fake_sandbox import ChangingSandbox, FakeSandbox


async def may_try(turns: Sequence[Any]) -> list[bool]:
    """Return which of these turns may try now."""
    tasks = [asyncio.ensure_future(turn.may_try()) for turn in turns]
    for _ in range(3 * len(tasks)):  # each task reaches its wait
        await asyncio.sleep(0)
    tried = [task.done() for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tried


async def test_parallel_calls_try_together_up_to_the_limit() -> None:
    order = TrialTurns()
    turns = [order.enter(parallel=True) for _ in range(TRIALS_MAX + 2)]
    assert await may_try(turns) == [True] * TRIALS_MAX + [False] * 2
    turns[0].leave()
    assert await may_try(turns) == [True] * (TRIALS_MAX + 1) + [False]
    turns[2].leave()  # a later end gives no copy to a call that waits for an earlier one
    assert await may_try(turns) == [True] * (TRIALS_MAX + 1) + [False]


async def test_any_other_call_waits_for_all_before_it_and_is_waited_for() -> None:
    order = TrialTurns()
    turns = [order.enter(parallel=True), order.enter(), order.enter(parallel=True)]
    assert await may_try(turns) == [True, False, False]
    turns[0].leave()
    assert await may_try(turns) == [True, True, False]
    turns[1].leave()
    assert await may_try(turns) == [True, True, True]


@pytest.mark.parametrize(
    ("mine", "conflicts"),
    [(["a"], True), (["b"], False), (["a/x"], True), (["ab"], False), ([], False)],
)
async def test_conflicts_are_with_changes_since_the_trial(mine: list[str], conflicts: bool) -> None:
    order = TrialTurns()
    first, second = order.enter(parallel=True), order.enter(parallel=True)
    await second.may_try()
    first.changed, first.applied = True, ["a"]
    assert second.missed_changes
    first.leave()
    assert second.conflicts(mine) is conflicts
    await second.may_try()  # again
    assert not second.conflicts(mine)
    assert not second.missed_changes


class OnHost(FakeSandbox):
    sandboxed = False


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("box", [ChangingSandbox, OnHost])
async def test_ask_commands_asks_before_each_command(
    box: type[FakeSandbox], approved: bool
) -> None:
    """Also with the sandbox off, where nothing else asks."""
    sandbox, approvals = box(), Approvals()
    asked = (
        ToolCall("1", "execute_command", '{"command": "change a"}'),
        ToolCall("2", "run_code", '{"code": "change b"}'),
        ToolCall("3", "list_files", "{}"),
    )
    agent = Agent(
        sandbox,
        ReplayModel([Response("", asked, stop="tools"), "ok"]),
        approvals=approvals,
        permissions=Permissions("ask_commands"),
    )
    starts, ends = [], []
    async with asyncio.timeout(20), aclosing(agent.stream("go")) as events:
        async for event in events:
            if isinstance(event, ToolStart):
                starts.append(event.approval_required)
            if isinstance(event, ToolEnd):
                ends.append(event.is_error)
            if (question := question_of(event)) is not None:
                assert not isinstance(event, ToolPending)
                await approvals.decide(ApprovalScope("local"), question.tool_call_id, approved)
    assert starts == [True, True, False]
    assert sorted(ends) == ([False] * 3 if approved else [False, True, True])
    ran = list(sandbox.ran)
    if isinstance(sandbox, ChangingSandbox):
        assert [trial.state for trial in sandbox.begun] == ["committed"] * approved
        ran += [code for trial in sandbox.begun for code in trial.sandbox.ran]
    assert sorted(ran) == (["change a", "change b"] if approved else [])


async def test_ask_commands_runs_an_approved_cell_in_a_project_that_cannot_be_copied() -> None:
    sandbox, approvals = ChangingSandbox(), Approvals()
    sandbox.refuses = lambda: TooLarge("too large")
    call = ToolCall("1", "run_code", '{"code": "change b"}')
    agent = Agent(
        sandbox,
        ReplayModel([Response("", (call,), stop="tools"), "ok"]),
        approvals=approvals,
        permissions=Permissions("ask_commands"),
    )
    questions = 0
    async with asyncio.timeout(20), aclosing(agent.stream("go")) as events:
        async for event in events:
            if (question := question_of(event)) is not None:
                questions += 1
                await approvals.decide(ApprovalScope("local"), question.tool_call_id, True)
    assert (questions, sandbox.ran) == (1, ["change b"])
