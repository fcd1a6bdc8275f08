"""At whatever moment a run is aborted, left, or loses its store: nothing stays open, and what is
kept fits together."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from sbx.agent.agent import Agent
from sbx.agent.approvals import Approvals
from sbx.agent.export import export_history, import_history
from sbx.agent.history import MemoryHistory, repair_history
from sbx.agent.messages import Message, Response, ToolCall
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.approval_rules import Permissions
from sbx.errors import Unavailable
from sbx.protocol.agent import AgentEvent, AgentRunEnd, ToolEnd, ToolPending, ToolStart, question_of
from sbx.protocol.approvals import ApprovalScope
from tests.fake_sandbox import ChangingSandbox, DryRunSandbox
from tests.made_tasks import made_tasks

ME = ApprovalScope("local")
CALLS = (
    ToolCall("x", "run_code", '{"code": "1"}'),
    ToolCall("x", "execute_command", '{"command": "curl example.org"}'),  # plainly asked
    ToolCall("x", "execute_command", '{"command": "make change"}'),  # tried first
    ToolCall("x", "nonsense", "{"),
)
KINDS = {DryRunSandbox: 20, ChangingSandbox: 20}  # events of the whole run
MOMENTS = [(kind, moment) for kind, count in KINDS.items() for moment in range(count)]


class Scene:
    """A run with calls of all kinds, of which `act` sees each event."""

    def __init__(
        self,
        kind: type[DryRunSandbox] = DryRunSandbox,
        history: MemoryHistory | None = None,
    ) -> None:
        self.box = kind()
        self.approvals = Approvals()
        self.history = history or MemoryHistory()
        self.agent = Agent(
            self.box,
            ReplayModel([Response("see", CALLS, stop="tools"), "all done"]),
            approvals=self.approvals,
            history=self.history,
            permissions=Permissions("project"),
        )

    async def played(self, *, abort_at: int = -1, leave_at: int = -1) -> list[AgentEvent]:
        events: list[AgentEvent] = []
        async with asyncio.timeout(60), aclosing(self.agent.stream("go")) as stream:
            async for event in stream:
                if len(events) == leave_at:
                    break
                if len(events) == abort_at:
                    self.agent.abort()
                elif (question := question_of(event)) is not None and abort_at < 0:
                    await self.approvals.decide(ME, question.tool_call_id, True)
                elif question is not None:
                    await self._decide(question)
                events.append(event)
        return events

    async def _decide(self, event: ToolPending) -> None:
        """Unless the abort was first."""
        waiting, _ = await self.approvals.pending(ME)
        if event.tool_call_id in [one.tool_call_id for one in waiting]:
            await self.approvals.decide(ME, event.tool_call_id, True)

    async def check(self) -> None:
        assert (await self.approvals.pending(ME))[0] == []
        assert all(one.state != "open" for one in self.box.dry_runs)
        if isinstance(self.box, ChangingSandbox):
            assert all(one.state != "open" for one in self.box.begun)
        kept = [one.message for one in await self.history.messages()]
        answers = [one for one in kept if one.tool_calls]
        results = [one for one in kept if one.role == "tool"]
        assert len(results) == sum(len(one.tool_calls) for one in answers)
        await import_history(MemoryHistory(), await export_history(self.history))


def balanced(events: Sequence[AgentEvent]) -> bool:
    starts = [event.tool_call_id for event in events if isinstance(event, ToolStart)]
    ends = [event.tool_call_id for event in events if isinstance(event, ToolEnd)]
    return sorted(starts) == sorted(ends)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_run_is_as_long_as_these_tests_think(kind: type[DryRunSandbox]) -> None:
    scene = Scene(kind)
    events = await scene.played()
    assert len(events) == KINDS[kind]
    assert balanced(events)
    if isinstance(scene.box, ChangingSandbox):
        assert scene.box.ran == ["curl example.org"]
        assert [one.sandbox.ran for one in scene.box.begun] == [["1"], ["make change"]]
        assert [one.state for one in scene.box.begun] == ["committed", "committed"]
    else:
        assert sorted(scene.box.ran) == ["1", "curl example.org"]
        assert [one.state for one in scene.box.dry_runs] == ["committed"]
    await scene.check()


@pytest.mark.parametrize(("kind", "moment"), MOMENTS)
async def test_an_abort_at_any_moment(kind: type[DryRunSandbox], moment: int) -> None:
    scene = Scene(kind)
    events = await scene.played(abort_at=moment)
    assert isinstance(events[-1], AgentRunEnd)
    assert events[-1].reason == "aborted" or moment >= KINDS[kind] - 3
    assert balanced(events)
    await scene.check()
    assert scene.agent._task is None


@pytest.mark.parametrize(("kind", "moment"), MOMENTS)
async def test_a_follower_that_leaves_at_any_moment(kind: type[DryRunSandbox], moment: int) -> None:
    with made_tasks() as made:
        scene = Scene(kind)
        await scene.played(leave_at=moment)
        await scene.check()
    assert [task for task in made if not task.done()] == []


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("appends", range(5))
async def test_a_store_that_fails_at_any_moment_ends_the_run(appends: int, stays: bool) -> None:
    class Failing(MemoryHistory):
        left = appends
        broken = True

        async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
            self.left -= 1
            if self.broken and (self.left == -1 or (stays and self.left < 0)):
                raise Unavailable("the disk is full", code="no_space")
            await super().append(messages, covers=covers)

    history = Failing()
    scene = Scene(history=history)
    events = await scene.played()
    assert isinstance(events[-1], AgentRunEnd)
    assert events[-1].reason == ("error" if appends < 4 else "done")
    assert balanced(events)
    history.broken = False
    await repair_history(history)
    await scene.check()
