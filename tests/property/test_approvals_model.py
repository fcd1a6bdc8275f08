"""Approvals in any order of ask, decide, expire, abort, cancel and restart, against a model that
knows only what was decided first. Over records in memory, and over a store that is opened again at
each restart."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sbx.agent.approvals import AgentContext, Approvals, Pending
from sbx.errors import Conflict
from sbx.protocol.approvals import ApprovalDecision, ApprovalScope
from sbx.store import Store, chats
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatRow
from tests.fake_clock import FakeClock
from tests.tiers import examples

T = TypeVar("T")
TIMEOUT_S = 600.0
RUNS = ("run-1", "run-2")


class World:
    """A loop, a clock, and records that outlive their process; `path` None: in memory."""

    def __init__(self, path: Path | None) -> None:
        self._runner = asyncio.Runner()
        self._path = path
        self.clock = FakeClock()
        self.store: Store | None = None
        self.records = ApprovalStore()

    def do(self, act: Callable[[], Awaitable[T]]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await act()

        return self._runner.run(bounded())

    async def open(self) -> None:
        if self._path is not None:
            self.store = await Store.open(self._path)
            self.records = ApprovalStore(self.store)

    async def shut(self) -> None:
        if self.store is not None:
            await self.store.close()

    def close(self) -> None:
        self.do(self.shut)
        self._runner.close()


@dataclass(eq=False)
class Modelled:
    """A call that was asked about: until when it waits, and what was decided first."""

    id: str
    run: str
    expires_at: float
    pending: Pending
    waiting: "asyncio.Task[ApprovalDecision]"
    decided: tuple[bool, str] | None = None
    lost: bool = False  # whoever waited died with the service, or was cancelled


class Deciding(RuleBasedStateMachine):
    world: ClassVar[World]
    examples: ClassVar[int] = 0
    calls: Bundle[Modelled] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        Deciding.examples += 1
        self.me = f"owner-{Deciding.examples}"
        self.known: list[Modelled] = []
        self.approvals = self.anew()
        self.world.do(self.chat)

    async def chat(self) -> None:
        if self.world.store is not None:
            row = ChatRow(f"chat-{self.me}", self.me, "talk", "ann", "coder", 1.0, 1.0)
            await chats.ensure(self.world.store, row)

    def anew(self) -> Approvals:
        return Approvals(self.world.records, self.world.clock, timeout_s=TIMEOUT_S)

    @property
    def now(self) -> float:
        return self.world.clock.now()

    def open_ones(self) -> list[Modelled]:
        return [one for one in self.known if one.decided is None and one.expires_at > self.now]

    # -- rules -------------------------------------------------------------------------------------

    @rule(target=calls, run=st.sampled_from(RUNS))
    def ask(self, run: str) -> Modelled:
        async def act() -> Modelled:
            call = f"{self.me}-{len(self.known)}"
            pending = await self.approvals.ask(
                AgentContext(self.me, "talk", "ann", "coder"),
                run_id=f"{self.me}-{run}",
                tool_call_id=call,
                tool_name="execute_command",
                tool_args={"command": "make"},
            )
            waiting = asyncio.ensure_future(pending.decision())
            return Modelled(call, run, self.now + TIMEOUT_S, pending, waiting)

        one = self.world.do(act)
        self.known.append(one)
        return one

    @rule(call=calls, answers=st.lists(st.booleans(), min_size=1, max_size=3))
    def decide(self, call: Modelled, answers: list[bool]) -> None:
        """By several people at once."""

        async def act() -> list[object]:
            return await asyncio.gather(
                *(
                    self.approvals.decide(
                        ApprovalScope(self.me), call.id, yes, by=f"person-{number}"
                    )
                    for number, yes in enumerate(answers)
                ),
                return_exceptions=True,
            )

        answer = self.world.do(act)
        refused = [one for one in answer if isinstance(one, BaseException)]
        assert all(isinstance(one, Conflict) for one in refused), refused
        if call in self.open_ones():
            assert len(refused) == len(answers) - 1
            (winner,) = (number for number, one in enumerate(answer) if one not in refused)
            call.decided = (answers[winner], f"person-{winner}")
        else:
            assert len(refused) == len(answers)
            call.decided = call.decided or (False, "timeout")
        for one in refused:
            assert isinstance(one, Conflict)
            assert (one.details["approved"], one.details["by"]) == call.decided

    @rule(seconds=st.sampled_from([1.0, 100.0, 300.0, 599.0, 600.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        over = [one for one in self.known if one.decided is None and one.expires_at <= self.now]
        if over:
            self.world.do(lambda: asyncio.wait([one.waiting for one in over]))
        for one in over:
            one.decided = (False, "timeout")

    @rule(run=st.sampled_from(RUNS))
    def abort(self, run: str) -> None:
        denied = self.world.do(lambda: self.approvals.abort(f"{self.me}-{run}"))
        mine = [one for one in self.known if one.run == run and one.decided is None]
        assert {one.tool_call_id for one in denied} <= {one.id for one in mine}
        for one in mine:
            one.decided = (False, "abort")

    @rule(call=calls)
    def cancel(self, call: Modelled) -> None:
        """Whoever waits is gone."""

        async def act() -> None:
            call.waiting.cancel()
            await asyncio.wait([call.waiting])

        self.world.do(act)
        call.lost = True
        call.decided = call.decided or (False, "abort")

    @rule()
    def restart(self) -> None:
        """The process dies: its store is closed before anybody who waits can write a word."""

        async def die() -> None:
            await self.world.shut()
            if self.world.store is not None:
                await self.give_up()
            await self.world.open()
            self.approvals = self.anew()
            for one in await self.approvals.recover():
                assert one.decision is not None
                assert one.decision.by == "restart"
            await self.give_up()

        self.world.do(die)
        for one in self.known:
            one.lost = True
            one.decided = one.decided or (False, "restart")

    async def give_up(self) -> None:
        waiting = [one.waiting for one in self.known]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def what_waits_is_listed(self) -> None:
        found, _ = self.world.do(lambda: self.approvals.pending(ApprovalScope(self.me), limit=200))
        assert [one.tool_call_id for one in found] == [one.id for one in self.open_ones()]

    @invariant()
    def whoever_waits_is_told_what_was_decided_first(self) -> None:
        for one in self.known:
            if one.lost:
                continue
            if one.decided is None:
                assert not one.waiting.done()
            else:
                decision = self.world.do(lambda one=one: asyncio.shield(one.waiting))  # type: ignore[misc]
                assert (decision.approved, decision.by) == one.decided

    @invariant()
    def what_is_kept_is_what_was_decided_first(self) -> None:
        for one in self.known:
            kept = self.world.do(lambda one=one: self.world.records.get(one.id))  # type: ignore[misc]
            assert kept is not None
            if kept.decision is not None:
                assert (kept.decision.approved, kept.decision.by) == one.decided
            else:
                assert one.decided is None

    def teardown(self) -> None:
        self.world.do(self.give_up)


@pytest.fixture(params=["memory", "store"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="approvals-") as directory:
        world = World(Path(directory) / "sbx.db" if request.param == "store" else None)
        world.do(world.open)
        yield world
        world.close()


def test_what_is_decided_first_stands(world: World) -> None:
    Deciding.world = world
    run_state_machine_as_test(
        Deciding,
        settings=settings(
            max_examples=examples(25),
            stateful_step_count=15,
            suppress_health_check=list(HealthCheck),
        ),
    )
