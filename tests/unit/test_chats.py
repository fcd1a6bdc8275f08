"""Chats: one run of an agent a conversation, numbered, replayed, bounded, ended."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

import pytest

from sbx.agent.agent import Agent, AgentOptions
from sbx.agent.chats import ChatAsk, ChatRun, Chats
from sbx.agent.messages import Message
from sbx.errors import Conflict, NotFound, SbxError, Unavailable
from sbx.protocol.agent import AgentEvent, AgentRunEnd, AgentRunStart, AgentTextDelta, ToolStart
from tests.fake_clock import FakeClock

PATIENCE_S = 60.0


class Scripted(Agent):
    """An agent that says its words, then waits until it is let go or aborted."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.go_on = asyncio.Event()
        self.aborted = False
        self.closed = False
        self.asks = False  # a call of a tool waits for an approval

    async def stream(
        self, message: str | Message | None, **how: Unpack[AgentOptions]
    ) -> AsyncGenerator[AgentEvent, None]:
        yield AgentRunStart("scripted", how["max_steps"])
        for word in self._words:
            yield AgentTextDelta(word)
        if self.asks:
            yield ToolStart("call", "pay", {}, approval_required=True)
        await self.go_on.wait()
        yield AgentRunEnd("aborted" if self.aborted else "done", str(message or ""), {})

    def abort(self) -> None:
        self.aborted = True
        self.go_on.set()


class Desk:
    """What Chats is handed: it opens agents, and sees them closed."""

    def __init__(self) -> None:
        self.agents: list[Scripted] = []
        self.ends: list[AgentRunEnd | None] = []
        self.words: tuple[str, ...] = ("a", "b")
        self.refusal: SbxError | None = None
        self.asks = False

    def open(self, run: ChatRun) -> AbstractAsyncContextManager[Scripted]:
        return self._opened(run)

    @asynccontextmanager
    async def _opened(self, run: ChatRun) -> AsyncIterator[Scripted]:
        if self.refusal is not None:
            raise self.refusal
        agent = Scripted(*self.words)
        agent.asks = self.asks
        self.agents.append(agent)
        yield agent
        self.ends.append(run.end)
        agent.closed = True


def asked(conversation: str = "c1", owner: str = "me") -> ChatAsk:
    return ChatAsk(owner, conversation, "hello", max_steps=3)


async def events_of(run: ChatRun, after: int = 0) -> list[tuple[int, str]]:
    async with asyncio.timeout(PATIENCE_S):
        return [(number, event["type"]) async for number, event in run.events(after)]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def at() -> Desk:
    return Desk()


@pytest.fixture
async def chats(at: Desk, clock: FakeClock) -> AsyncIterator[Chats]:
    chats = Chats(at.open, clock, most=3, per_owner=2)
    yield chats
    await chats.close()


async def test_events_are_numbered_and_name_their_run(at: Desk, chats: Chats) -> None:
    run = await chats.start(asked())
    at.agents[0].go_on.set()
    events: list[dict[str, Any]] = [event async for _, event in run.events()]
    assert [event["seq"] for event in events] == [1, 2, 3, 4]
    assert {(event["run_id"], event["conversation_id"]) for event in events} == {(run.run_id, "c1")}
    assert (events[0]["max_steps"], events[-1]["content"]) == (3, "hello")


async def test_who_comes_later_gets_what_was_missed_and_what_comes(at: Desk, chats: Chats) -> None:
    run = await chats.start(asked())
    async for number, _ in run.events():
        if number == 3:
            break
    late = asyncio.create_task(events_of(run, after=1))
    at.agents[0].go_on.set()
    assert await late == [(2, "text_delta"), (3, "text_delta"), (4, "run_end")]


async def test_the_end_is_told_once_all_is_closed_and_the_next_may_begin(
    at: Desk, chats: Chats
) -> None:
    run = await chats.start(asked())
    with pytest.raises(Conflict) as refused:
        await chats.start(asked())
    assert (refused.value.code, refused.value.details) == (
        "run_in_progress",
        {"run_id": run.run_id},
    )
    at.agents[0].go_on.set()
    async for _, event in run.events():
        if event["type"] == "run_end":
            assert at.agents[0].closed
            assert at.ends == [run.end]
            await chats.start(asked())
    assert len(at.agents) == 2


async def test_a_run_is_found_until_a_minute_after_its_end(
    at: Desk, chats: Chats, clock: FakeClock
) -> None:
    run = await chats.start(asked())
    assert chats.find(("me", "c1")) is run
    at.agents[0].go_on.set()
    await run.ended()
    clock.advance(59.5)
    assert chats.find(("me", "c1"), run.run_id) is run
    for owner, run_id in (("me", "chat-other"), ("you", None)):
        with pytest.raises(NotFound):
            chats.find((owner, "c1"), run_id)
    clock.advance(1)
    with pytest.raises(NotFound) as gone:
        chats.find(("me", "c1"))
    assert gone.value.code == "no_chat"


async def test_an_abort_waits_for_the_end(at: Desk, chats: Chats) -> None:
    run = await chats.start(asked())
    assert await chats.abort(("me", "c1"))
    assert run.log.closed
    assert run.end is not None
    assert run.end.reason == "aborted"
    assert not await chats.abort(("me", "c1"))
    assert not await run.abort()


async def test_an_abort_while_it_is_opened_ends_it_before_it_asks_anything(at: Desk) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def open_slowly(run: ChatRun) -> AsyncIterator[Scripted]:
        opening.set()
        await go_on.wait()
        yield Scripted("never said")

    chats = Chats(open_slowly, FakeClock())
    starting = asyncio.create_task(chats.start(asked()))
    await opening.wait()
    aborting = asyncio.create_task(chats.abort(("me", "c1")))
    await asyncio.sleep(0)
    go_on.set()
    assert await aborting
    assert await events_of(await starting) == [(1, "run_start"), (2, "run_end")]
    await chats.close()


async def test_limits_are_told_with_when_to_come_back(chats: Chats) -> None:
    for conversation in ("c1", "c2"):
        await chats.start(asked(conversation))
    with pytest.raises(Unavailable) as mine:
        await chats.start(asked("c3"))
    assert mine.value.code == "too_many_chats"
    assert mine.value.details == {"limit": 2, "retry_after_s": 5.0}
    await chats.start(asked("c1", "you"))
    with pytest.raises(Unavailable) as everybody:
        await chats.start(asked("c1", "they"))
    assert everybody.value.details["limit"] == 3


async def test_agents_that_wait_for_an_approval_keep_no_place_of_others() -> None:
    """200 calls of two owners that waited for an approval kept every agent of a third one from its
    start, for 10 minutes (holes 2.11)."""
    desk = Desk()
    desk.asks = True
    chats = Chats(desk.open, FakeClock(), most=3, per_owner=2)
    for owner in ("one", "two"):
        for conversation in ("c1", "c2"):
            run = await chats.start(asked(conversation, owner))
            await anext(run.events(2))  # the call has begun
    with pytest.raises(Unavailable, match="2 agents wait for an approval") as full:
        await chats.start(asked("c3", "one"))
    assert full.value.code == "too_many_chats"
    desk.asks = False
    for number in range(2):
        await chats.start(asked(f"c{number}", "three"))
    await chats.close()


async def test_what_cannot_be_opened_leaves_its_place_free(at: Desk, chats: Chats) -> None:
    at.refusal = Unavailable("there is no model", code="model_not_configured")
    with pytest.raises(Unavailable):
        await chats.start(asked())
    assert chats.running(("me", "c1")) is None
    at.refusal = None
    await chats.start(asked())


async def test_a_bug_of_an_agent_ends_its_run_and_tells_nothing_of_its_cause(
    at: Desk, chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Scripted):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[AgentEvent, None]:
            raise RuntimeError("a secret of ours")
            yield AgentRunStart("", 1)

    @asynccontextmanager
    async def open_failing(run: ChatRun) -> AsyncIterator[Scripted]:
        yield Failing()

    failing = Chats(open_failing, FakeClock())
    run = await failing.start(asked())
    assert await events_of(run) == [(1, "run_start"), (2, "run_end")]
    assert run.end is not None
    assert run.end.error is not None
    assert run.end.error["code"] == "internal_error"
    assert "secret" not in str(run.end)
    assert "a secret of ours" in caplog.text
    await failing.close()


async def test_close_tells_every_follower_and_takes_no_more(at: Desk, chats: Chats) -> None:
    runs = [await chats.start(asked(name)) for name in ("c1", "c2")]
    following = [asyncio.create_task(events_of(run)) for run in runs]
    await chats.close()
    assert [(await events)[-1] for events in following] == [(4, "run_end")] * 2
    with pytest.raises(Unavailable) as refused:
        await chats.start(asked())
    assert refused.value.code == "shutting_down"


async def test_what_has_ended_takes_no_more_room_than_it_may(at: Desk) -> None:
    chats = Chats(at.open, FakeClock(), ended_bytes=16_000)
    at.words = ("x" * 4000,)
    for name in ("c1", "c2", "c3"):
        run = await chats.start(asked(name))
        at.agents[-1].go_on.set()
        await run.ended()
    assert chats.find(("me", "c3"))
    with pytest.raises(NotFound):
        chats.find(("me", "c1"))
    await chats.close()


async def test_ended_runs_of_one_owner_leave_those_of_another(at: Desk) -> None:
    """The oldest run of all made room, also for an owner that filled all of it."""
    chats = Chats(at.open, FakeClock(), ended_bytes=32_000)
    at.words = ("x" * 4000,)
    for owner, name in (("other", "c"), *(("me", f"c{number}") for number in range(8))):
        run = await chats.start(asked(name, owner))
        at.agents[-1].go_on.set()
        await run.ended()
    assert chats.find(("other", "c"))
    assert chats.find(("me", "c7"))
    with pytest.raises(NotFound):
        chats.find(("me", "c0"))
    await chats.close()


async def test_an_ended_run_keeps_its_request_but_no_agent(at: Desk) -> None:
    """The agent kept the conversation of a deleted sandbox for a minute, and a request of 1 MiB did
    not count."""
    chats = Chats(at.open, FakeClock(), ended_bytes=3_000_000)
    runs = []
    for name in ("c1", "c2"):
        runs.append(await chats.start(ChatAsk("me", name, "x" * 1_000_000)))
        at.agents[-1].go_on.set()
        await runs[-1].ended()
    agent = weakref.ref(at.agents.pop())
    at.agents.clear()
    gc.collect()
    assert agent() is None
    assert chats.find(("me", "c2")) is runs[1]
    with pytest.raises(NotFound):
        chats.find(("me", "c1"))
    await chats.close()
