"""Calls that a person is asked about: events, denials, and commands approved by their effect."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from sbx.agent.agent import Agent
from sbx.agent.approvals import Approvals
from sbx.agent.calls import HERE
from sbx.agent.changing import needs_network
from sbx.agent.messages import Response, ToolCall
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.approval_rules import Permissions
from sbx.errors import BadRequest, Conflict, TooLarge, Unavailable
from sbx.protocol.agent import (
    AgentEvent,
    AgentRunEnd,
    ToolApproval,
    ToolEnd,
    ToolPending,
    ToolStart,
)
from sbx.protocol.approvals import Approval, ApprovalDecision, ApprovalScope
from sbx.protocol.changes import ChangesSetting
from tests.fake_clock import FakeClock
from tests.fake_sandbox import ChangingSandbox, DryRunSandbox, FakeSandbox

ME = ApprovalScope("local")
PROJECT = Permissions("project")


def command(text: str) -> ToolCall:
    return ToolCall("x", "execute_command", f'{{"command": "{text}"}}')


def agent_for(
    box: FakeSandbox,
    *calls: ToolCall,
    approvals: Approvals | None,
    permissions: Permissions = PROJECT,
) -> Agent:
    model = ReplayModel([Response("", calls, stop="tools"), "ok"])
    return Agent(box, model, approvals=approvals, permissions=permissions)


async def followed(
    agent: Agent, act: Callable[[AgentEvent], object] = lambda _: None
) -> list[AgentEvent]:
    """All events; `act` sees each as it comes, and may be a coroutine function."""
    events = []
    async with asyncio.timeout(20), aclosing(agent.stream("go")) as stream:
        async for event in stream:
            events.append(event)
            if asyncio.iscoroutine(acted := act(event)):
                await acted
    return events


def of_kind(events: Sequence[AgentEvent], kind: type) -> list[AgentEvent]:
    return [event for event in events if isinstance(event, kind)]


async def test_the_call_is_pending_before_its_start_is_told_and_runs_after_the_yes() -> None:
    box, approvals = FakeSandbox(), Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolStart):
            assert event.approval_required
            assert event.expires_at is not None
            assert box.ran == []
            await approvals.decide(ME, event.tool_call_id, True, by="ann")

    events = await followed(agent_for(box, command("make"), approvals=approvals), decide)
    kinds = [event.type for event in events]
    assert kinds[1:5] == ["tool_start", "tool_approval", "tool_output", "tool_end"]
    assert box.ran == ["make"]
    (approval,) = of_kind(events, ToolApproval)
    assert isinstance(approval, ToolApproval)
    assert (approval.approved, approval.by, approval.remembered) == (True, "ann", None)


async def test_the_other_calls_of_the_answer_run_while_one_waits() -> None:
    box, approvals = FakeSandbox(), Approvals()
    waiting = []

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolStart) and event.approval_required:
            waiting.append(event.tool_call_id)
        if isinstance(event, ToolEnd) and not waiting[1:]:
            waiting.append("decided")
            assert box.ran == []
            await approvals.decide(ME, waiting[0], False)

    listing = ToolCall("y", "list_files", "{}")
    agent = agent_for(box, command("make"), listing, approvals=approvals)
    events = await followed(agent, decide)
    starts = [event.tool_name for event in events if isinstance(event, ToolStart)]
    assert starts == ["execute_command", "list_files"]
    results = [one.message for one in await agent.history.messages() if one.message.role == "tool"]
    assert [result.is_error for result in results] == [True, False]
    assert "denied" in results[0].content
    assert box.ran == []


async def test_nobody_answers_and_the_call_is_denied() -> None:
    clock = FakeClock()
    box, approvals = FakeSandbox(), Approvals(clock=clock, timeout_s=60)

    def expire(event: AgentEvent) -> None:
        if isinstance(event, ToolStart):
            asyncio.get_running_loop().call_soon(clock.advance, 61)

    events = await followed(agent_for(box, command("make"), approvals=approvals), expire)
    (approval,) = of_kind(events, ToolApproval)
    assert isinstance(approval, ToolApproval)
    assert (approval.approved, approval.by, box.ran) == (False, "timeout", [])
    assert isinstance(events[-1], AgentRunEnd)
    assert events[-1].reason == "done"


async def test_abort_denies_what_is_pending_and_ends_the_run() -> None:
    box, approvals = FakeSandbox(), Approvals()
    agent = agent_for(box, command("a"), command("b"), approvals=approvals)
    seen: list[str] = []

    def abort(event: AgentEvent) -> None:
        if isinstance(event, ToolStart):
            seen.append(event.tool_call_id)
            if len(seen) == 2:
                agent.abort()

    events = await followed(agent, abort)
    answer = [event for event in events if isinstance(event, ToolApproval)]
    assert {(one.tool_call_id, one.approved, one.by) for one in answer} == {
        (call, False, "abort") for call in seen
    }
    assert len(of_kind(events, ToolEnd)) == 2
    assert events[-1].type == "run_end"
    assert (await approvals.pending(ME))[0] == []
    assert box.ran == []
    kept = [one.message.role for one in await agent.history.messages()]
    assert kept == ["user", "assistant", "tool", "tool"]


async def test_a_yes_that_comes_with_an_abort_is_told_as_it_was_recorded() -> None:
    """Whoever had said yes, and was told that it counts, saw it denied by the abort."""

    class YesJustBefore(Approvals):
        async def deny(self, approval: Approval, by: str) -> ApprovalDecision:
            await self.decide(ME, approval.tool_call_id, True, by="ann", remember="exact")
            return await super().deny(approval, by)

    box = FakeSandbox()
    agent = agent_for(box, command("make"), approvals=YesJustBefore())

    def abort(event: AgentEvent) -> None:
        if isinstance(event, ToolStart):
            agent.abort()

    events = await followed(agent, abort)
    (approval,) = of_kind(events, ToolApproval)
    assert isinstance(approval, ToolApproval)
    assert (approval.approved, approval.by, approval.remembered) == (True, "ann", "exact")
    assert len(of_kind(events, ToolEnd)) == 1
    assert box.ran == []


async def test_what_is_remembered_is_not_asked_again() -> None:
    box, approvals = FakeSandbox(), Approvals()

    async def always(event: AgentEvent) -> None:
        if isinstance(event, ToolStart):
            await approvals.decide(ME, event.tool_call_id, True, remember="exact")

    await followed(agent_for(box, command("make"), approvals=approvals), always)
    events = await followed(agent_for(box, command("make"), approvals=approvals))
    assert not of_kind(events, ToolApproval)
    assert box.ran == ["make", "make"]


@pytest.mark.parametrize(
    ("permissions", "approvals"),
    [(PROJECT, None), (Permissions(overrides={"execute_command": "deny"}), Approvals())],
)
async def test_what_is_denied_or_can_be_asked_of_nobody_is_an_error_for_the_model(
    permissions: Permissions, approvals: Approvals | None
) -> None:
    box = FakeSandbox()
    agent = agent_for(box, command("make"), approvals=approvals, permissions=permissions)
    (end,) = of_kind(await followed(agent), ToolEnd)
    assert isinstance(end, ToolEnd)
    assert end.is_error
    assert "denied" in end.result
    assert box.ran == []


# -- approve the effect ----------------------------------------------------------------------------


async def test_a_dry_run_is_shown_for_approval_and_runs_once() -> None:
    box, approvals = DryRunSandbox(), Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            assert event.dry_run is not None
            assert event.dry_run["exit_code"] == 0
            assert event.dry_run["output"] == "tried make"
            assert event.dry_run["changes"][0]["path"] == "/workspace/a"
            assert [one.state for one in box.dry_runs] == ["open"]
            await approvals.decide(ME, event.tool_call_id, True)

    agent = agent_for(box, command("make"), approvals=approvals)
    (end,) = of_kind(await followed(agent, decide), ToolEnd)
    assert isinstance(end, ToolEnd)
    assert "tried make" in end.result
    assert (box.ran, [one.state for one in box.dry_runs]) == ([], ["committed"])


async def test_a_no_discards_the_dry_run() -> None:
    box, approvals = DryRunSandbox(), Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            await approvals.decide(ME, event.tool_call_id, False)

    await followed(agent_for(box, command("make"), approvals=approvals), decide)
    assert (box.ran, [one.state for one in box.dry_runs]) == ([], ["discarded"])


async def test_an_abort_discards_the_dry_run() -> None:
    box, approvals = DryRunSandbox(), Approvals()
    agent = agent_for(box, command("make"), approvals=approvals)

    def abort(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            agent.abort()

    await followed(agent, abort)
    assert [one.state for one in box.dry_runs] == ["discarded"]


async def test_a_second_yes_is_no_yes_to_what_the_command_would_do_by_now() -> None:
    """What had changed meanwhile was dry-run and asked anew under the same id: a yes that was
    sent twice, or by another person a moment later, allowed an effect that nobody had seen."""
    box, approvals = DryRunSandbox(1), Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            await approvals.decide(ME, event.tool_call_id, True)
            for _ in range(20):  # whatever follows this yes is there by then
                await asyncio.sleep(0)
            with pytest.raises(Conflict):
                await approvals.decide(ME, event.tool_call_id, True)

    events = await followed(agent_for(box, command("make"), approvals=approvals), decide)
    assert len(of_kind(events, ToolPending)) == 1
    assert [one.state for one in box.dry_runs] == ["discarded"]
    (end,) = of_kind(events, ToolEnd)
    assert isinstance(end, ToolEnd)
    assert end.is_error
    assert "workspace_changed" in end.result
    assert box.ran == []


@pytest.mark.parametrize("kind", [DryRunSandbox, ChangingSandbox])
@pytest.mark.parametrize("error", [Unavailable("no reflink"), TooLarge("too large")])
async def test_what_cannot_be_tried_is_plainly_asked(
    error: Exception, kind: type[DryRunSandbox]
) -> None:
    box, approvals = kind(), Approvals()
    box.refuses = lambda: error

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            assert event.dry_run is None
            await approvals.decide(ME, event.tool_call_id, True)

    await followed(agent_for(box, command("make"), approvals=approvals), decide)
    assert box.ran == ["make"]


# -- a project: every call is tried ----------------------------------------------------------------


def code(text: str) -> ToolCall:
    return ToolCall("x", "run_code", f'{{"code": "{text}"}}')


WRITES = ToolCall("x", "write_file", '{"path": "a", "content": "x"}')


async def decided(
    box: ChangingSandbox, call: ToolCall, approved: bool, **how: Any
) -> tuple[ToolPending | None, ToolEnd]:
    """Make a call, answer if a person is asked, and give the question and how it ended."""
    approvals = Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            assert [one.state for one in box.begun] == ["open"]
            await approvals.decide(ME, event.tool_call_id, approved)

    model = ReplayModel([Response("", (call,), stop="tools"), "ok"])
    agent = Agent(box, model, approvals=approvals, permissions=PROJECT, **how)
    events = await followed(agent, decide)
    (end,) = of_kind(events, ToolEnd)
    assert isinstance(end, ToolEnd)
    return next((event for event in events if isinstance(event, ToolPending)), None), end


@pytest.mark.parametrize("call", [code("change"), command("change"), WRITES])
@pytest.mark.parametrize("approved", [True, False])
async def test_every_tool_is_asked_about_by_its_changes(call: ToolCall, approved: bool) -> None:
    box = ChangingSandbox()
    question, end = await decided(box, call, approved)
    assert question is not None
    assert question.dry_run is not None
    assert [one["kind"] for one in question.dry_run["changes"]] == ["added"]
    assert [one.state for one in box.begun] == ["committed" if approved else "dropped"]
    assert end.is_error is not approved
    assert (box.ran, box.files.content) == ([], {})


@pytest.mark.parametrize("call", [code("change"), WRITES])
async def test_changes_of_code_and_files_are_asked_about_each_time(call: ToolCall) -> None:
    """A rule for `run_code` made whatever changes the same text led to, in all conversations of
    the project."""
    approvals = Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            with pytest.raises(BadRequest) as refused:
                await approvals.decide(ME, event.tool_call_id, True, remember="exact")
            assert refused.value.code == "not_remembered"
            await approvals.decide(ME, event.tool_call_id, True)

    # As a rule of an earlier version would.
    await approvals.ask(
        HERE,
        run_id="r",
        tool_call_id="old",
        tool_name=call.name,
        tool_args=json.loads(call.arguments),
    )
    await approvals.decide(ME, "old", True, remember="exact")
    for refuses in (None, lambda: TooLarge("too large")):
        box = ChangingSandbox()
        box.refuses = refuses
        events = await followed(agent_for(box, call, approvals=approvals), decide)
        (question,) = of_kind(events, ToolPending)
        assert isinstance(question, ToolPending)
        assert question.remember_as == ()


@pytest.mark.parametrize("approved", [True, False])
async def test_no_setting_answers_for_a_new_host_executable(approved: bool) -> None:
    async def allows() -> ChangesSetting:
        return ChangesSetting("allow")

    box = ChangingSandbox()
    box.host_executables = {"/workspace/.envrc": "direnv"}
    question, end = await decided(box, WRITES, approved, changes=allows)
    assert question is not None
    assert question.dry_run is not None
    assert question.dry_run["host_executables"] == [
        {"path": "/workspace/.envrc", "program": "direnv"}
    ]
    assert [one.state for one in box.begun] == ["committed" if approved else "dropped"]
    assert end.is_error is not approved


@pytest.mark.parametrize("call", [code("1"), command("ls")])
async def test_a_call_without_changes_is_not_asked_about(call: ToolCall) -> None:
    question, end = await decided(ChangingSandbox(), call, False)
    assert (question, end.is_error) == (None, False)


@pytest.mark.parametrize(
    ("setting", "asks"),
    [
        (ChangesSetting(), True),
        (ChangesSetting("allow"), False),
        (ChangesSetting("ask", ("a",)), False),
        (ChangesSetting("ask", ("b",)), True),
    ],
)
async def test_the_setting_of_the_conversation_decides(setting: ChangesSetting, asks: bool) -> None:
    async def read() -> ChangesSetting:
        return setting

    box = ChangingSandbox()
    question, _ = await decided(box, WRITES, True, changes=read)
    assert (question is not None) is asks
    assert [one.state for one in box.begun] == ["committed"]


async def test_a_change_that_came_in_between_is_told_to_the_model() -> None:
    box = ChangingSandbox(changes_meanwhile=1)
    _, end = await decided(box, code("change"), True)
    assert (end.is_error, "workspace_changed" in end.result) == (True, True)
    assert [one.state for one in box.begun] == ["dropped"]


async def test_a_tool_that_a_person_wants_to_be_asked_about_is_asked_about_without_changes() -> (
    None
):
    box, approvals = ChangingSandbox(), Approvals()

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolPending):
            assert event.dry_run is not None
            await approvals.decide(ME, event.tool_call_id, False)

    ask = Permissions("project", overrides={"run_code": "ask"})
    agent = agent_for(box, code("1"), approvals=approvals, permissions=ask)
    (end,) = of_kind(await followed(agent, decide), ToolEnd)
    assert isinstance(end, ToolEnd)
    assert end.is_error


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("curl https://example.org", True),
        ("cd x && git -C y pull", True),
        ("pip3 install requests", True),
        ("python -m pip install requests", True),
        ("npm ci", True),
        ("git status", False),
        ("ls curl.txt", False),
        ("./configure && make install", False),
        ("grep -r pip .", False),
    ],
)
def test_commands_that_reach_out_are_told_by_their_words(text: str, needs: bool) -> None:
    assert needs_network(text) is needs


def test_a_long_command_is_looked_at_in_no_time() -> None:
    assert not needs_network("git pip " * 100_000)


# -- the check of a task ---------------------------------------------------------------------------


async def checked(
    box: FakeSandbox, approvals: Approvals | None, check: str, act: Any = lambda _: None
) -> tuple[AgentRunEnd, list[AgentEvent]]:
    agent = Agent(box, ReplayModel(["done"]), approvals=approvals, permissions=PROJECT)
    events = []
    async with asyncio.timeout(20), aclosing(agent.stream("go", check_command=check)) as stream:
        async for event in stream:
            events.append(event)
            if asyncio.iscoroutine(acted := act(event)):
                await acted
    (end,) = (event for event in events if isinstance(event, AgentRunEnd))
    return end, events


async def test_a_check_in_a_project_runs_on_a_copy_that_is_dropped() -> None:
    """It ran in the user's directory: the commands of a check were never asked about."""
    box = ChangingSandbox()
    end, events = await checked(box, Approvals(), "change pwned.txt")
    assert end.reason == "done"
    assert box.ran == []
    assert [(trial.sandbox.ran, trial.state) for trial in box.begun] == [
        (["change pwned.txt"], "dropped")
    ]
    (start,) = of_kind(events, ToolStart)
    assert isinstance(start, ToolStart)
    assert (start.tool_name, start.approval_required) == ("completion_check", False)


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("why", ["network", "too large"])
async def test_a_check_that_cannot_be_tried_needs_an_approval(approved: bool, why: str) -> None:
    box, approvals = ChangingSandbox(), Approvals()
    command = "curl example.com" if why == "network" else "make test"
    if why == "too large":
        box.refuses = lambda: TooLarge("too large")

    async def decide(event: AgentEvent) -> None:
        if isinstance(event, ToolStart):
            assert box.ran == []
            assert event.tool_args == {"command": command}
            await approvals.decide(ME, event.tool_call_id, approved=approved, by="ann")

    end, _ = await checked(box, approvals, command, decide)
    assert box.ran == ([command] if approved else [])
    assert end.reason == ("done" if approved else "error")
    assert approved or (end.error or {})["code"] == "check_denied"


async def test_a_check_that_is_denied_does_not_run() -> None:
    box = FakeSandbox()
    never = Permissions(overrides={"execute_command": "deny"})
    agent = Agent(box, ReplayModel(["done"]), permissions=never)
    end = await agent.run("go", check_command="true")
    assert (end.reason, (end.error or {})["code"], box.ran) == ("error", "check_denied", [])
