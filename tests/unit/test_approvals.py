"""Waiting for a person: who answers first, what runs out, and what nobody waits for any more."""

import asyncio

import pytest

from sbx.agent.approvals import AgentContext, Approvals, Pending
from sbx.errors import Broken, Conflict
from sbx.protocol.approvals import Approval, ApprovalDecision, ApprovalScope, StoredApprovalRule
from sbx.store.approvals import ApprovalStore
from tests.fake_clock import FakeClock
from tests.made_tasks import made_tasks

ME = ApprovalScope("me")
HERE = AgentContext("me", "talk")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def approvals(clock: FakeClock) -> Approvals:
    return Approvals(clock=clock, timeout_s=600)


async def ask(approvals: Approvals, call: str = "call-1", run: str = "run-1") -> Pending:
    return await approvals.ask(
        HERE,
        run_id=run,
        tool_call_id=call,
        tool_name="execute_command",
        tool_args={"command": "make test"},
    )


async def waits_for(clock: FakeClock, sleepers: int = 1) -> None:
    """Until so many wait for the clock."""
    async with asyncio.timeout(60):
        while len(clock._sleepers) < sleepers:  # noqa: ASYNC110  # the clock tells nobody
            await asyncio.sleep(0)


async def test_an_answer_that_came_before_anybody_waited_counts(approvals: Approvals) -> None:
    pending = await ask(approvals)
    await approvals.decide(ME, "call-1", False)
    decision = await pending.decision()
    assert not decision.approved
    assert decision.why == "The call was denied: me said no. It was not made."


async def test_without_an_answer_in_time_it_is_denied(
    approvals: Approvals, clock: FakeClock
) -> None:
    pending = await ask(approvals)
    assert pending.approval.expires_at == clock.now() + 600
    waiting = asyncio.create_task(pending.decision())
    await waits_for(clock)
    clock.advance(599)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1)
    decision = await waiting
    assert (decision.approved, decision.by, decision.at) == (False, "timeout", clock.now())
    assert "no answer came" in decision.why
    with pytest.raises(Conflict) as late:
        await approvals.decide(ME, "call-1", True)
    assert late.value.details["by"] == "timeout"


async def test_one_that_is_cancelled_while_it_waits_is_denied(
    approvals: Approvals, clock: FakeClock
) -> None:
    pending = await ask(approvals)
    waiting = asyncio.create_task(pending.decision())
    await waits_for(clock)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(Conflict) as late:
        await approvals.decide(ME, "call-1", True)
    assert late.value.details["by"] == "abort"


async def test_answer_is_given_to_whoever_waits_and_nothing_sleeps_on(
    approvals: Approvals, clock: FakeClock
) -> None:
    with made_tasks() as made:
        pending = await ask(approvals)
        waiting = asyncio.create_task(pending.decision())
        await waits_for(clock)
        await approvals.decide(ME, "call-1", True)
        decision = await waiting
    assert (decision.approved, decision.by) == (True, "me")
    await asyncio.sleep(0)
    assert [task for task in made if not task.done()] == []
    assert await pending.decision() == decision  # asked again, the same


class SlowRecords(ApprovalStore):
    """They write down what is asked, and say so when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()
        self.received = asyncio.Event()

    async def add(self, approval: Approval) -> Approval:
        kept = await super().add(approval)
        self.written.set()
        await self.received.wait()
        return kept


async def test_an_answer_between_the_record_and_its_return_is_not_lost(clock: FakeClock) -> None:
    records = SlowRecords()
    approvals = Approvals(records, clock)
    asking = asyncio.create_task(ask(approvals))
    await records.written.wait()
    await approvals.decide(ME, "call-1", True)
    records.received.set()
    assert (await (await asking).decision()).approved


async def test_a_question_that_is_cancelled_while_it_is_written_down_is_denied(
    clock: FakeClock,
) -> None:
    records = SlowRecords()
    approvals = Approvals(records, clock)
    asking = asyncio.create_task(ask(approvals))
    await records.written.wait()
    asking.cancel()
    records.received.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    kept = await records.get("call-1")
    assert kept is not None
    assert kept.decision == ApprovalDecision(False, "abort", clock.now())


async def test_a_run_aborted_while_its_question_is_written_down_leaves_nothing_pending(
    clock: FakeClock,
) -> None:
    class LateRecords(SlowRecords):
        async def add(self, approval: Approval) -> Approval:
            self.written.set()
            await self.received.wait()
            return await ApprovalStore.add(self, approval)

    records = LateRecords()
    approvals = Approvals(records, clock)
    asking = asyncio.create_task(ask(approvals))
    await records.written.wait()
    assert await approvals.abort("run-1") == []
    records.received.set()
    assert (await (await asking).decision()).by == "abort"
    assert await approvals.pending(ME) == ([], None)


class BrokenRecords(ApprovalStore):
    broken = False

    async def add(self, approval: Approval) -> Approval:
        if self.broken:
            raise Broken("the disk is gone")
        return await super().add(approval)

    async def settle(
        self, tool_call_id: str, decision: ApprovalDecision, rule: StoredApprovalRule | None = None
    ) -> tuple[Approval | None, bool]:
        if self.broken:
            raise Broken("the disk is gone")
        return await super().settle(tool_call_id, decision, rule)

    async def settle_all(
        self, decision: ApprovalDecision, run_id: str | None = None
    ) -> list[Approval]:
        if self.broken:
            raise Broken("the disk is gone")
        return await super().settle_all(decision, run_id)


async def test_what_cannot_be_written_down_is_never_a_yes(clock: FakeClock) -> None:
    records = BrokenRecords()
    approvals = Approvals(records, clock)
    first, second = await ask(approvals), await ask(approvals, "call-2")
    waiting = asyncio.create_task(first.decision())
    await waits_for(clock)
    records.broken = True
    with pytest.raises(Broken):
        await approvals.decide(ME, "call-1", True)
    clock.advance(600)
    with pytest.raises(Broken):
        await waiting
    with pytest.raises(Broken):
        await approvals.abort("run-1")
    assert (await second.decision()).by == "abort"  # denied without a record, all the same
    with pytest.raises(Broken):
        await ask(approvals, "call-3")
    records.broken = False
    await ask(approvals, "call-3")  # it is not taken for one that waits
