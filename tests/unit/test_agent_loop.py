"""The loop: the order of its events, and all the ways in which it ends."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import groupby

import pytest

from sbx.agent import models
from sbx.agent.agent import Agent, Budget
from sbx.agent.history import ENDED, INTERRUPTED, MemoryHistory
from sbx.agent.messages import Image, Message, Response, TokenUsage, ToolCall
from sbx.agent.models.replay import RecordedRequest, ReplayModel
from sbx.agent.step import BROKEN_OFF, GO_ON, Step
from sbx.agent.tools.function_tool import tool
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolDefinition
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.protocol.agent import (
    AgentEvent,
    AgentRunEnd,
    AgentRunStart,
    AgentTextDelta,
    StepEnd,
    ToolEnd,
    ToolStart,
)
from tests.fake_sandbox import FakeSandbox

DEADLINE_S = 60.0


class Telling(ReplayModel):
    """Tells a text, and then does what a test wants, instead of coming to its end."""

    def __init__(self, text: str, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__([text])
        self._then = then

    async def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[models.TextDelta | Response, None]:
        async for piece in super().stream(system, messages, tools):
            if isinstance(piece, models.TextDelta):
                yield piece
        await self._then()


def code(text: str, name: str = "x") -> ToolCall:
    return ToolCall(name, "run_code", f'{{"code": "{text}"}}')


def calling(*calls: ToolCall, content: str = "", tokens: int = 0) -> Response:
    return Response(content, calls, TokenUsage(tokens, tokens), "tools")


async def events_of(agent: Agent, message: str | None = "do it") -> list[AgentEvent]:
    async with asyncio.timeout(DEADLINE_S), aclosing(agent.stream(message)) as events:
        return [event async for event in events]


async def messages(agent: Agent) -> list[Message]:
    return [one.message for one in await agent.history.messages()]


def roles(kept: Sequence[Message]) -> list[str]:
    return [message.role for message in kept]


def end_of(events: Sequence[AgentEvent]) -> AgentRunEnd:
    assert isinstance(events[-1], AgentRunEnd)
    assert not any(isinstance(event, AgentRunEnd) for event in events[:-1])
    return events[-1]


def error_code(end: AgentRunEnd) -> str | None:
    return None if end.error is None else end.error["code"]


# -- the order -------------------------------------------------------------------------------------


async def test_a_run_tells_its_start_its_text_its_step_and_its_end() -> None:
    agent = Agent(FakeSandbox(), ReplayModel([["Four", "teen.", Response(usage=TokenUsage(5, 2))]]))
    events = await events_of(agent)
    assert events == [
        AgentRunStart("replay", 10),
        AgentTextDelta("Four"),
        AgentTextDelta("teen."),
        StepEnd(1, {"input_tokens": 5, "output_tokens": 2}),
        AgentRunEnd("done", "Fourteen.", {"input_tokens": 5, "output_tokens": 2}),
    ]
    assert await messages(agent) == [Message("user", "do it"), Message("assistant", "Fourteen.")]


async def test_parallel_calls_all_start_before_one_ends_and_results_are_in_call_order() -> None:
    met = asyncio.Event()
    met_by = []

    @tool
    async def meet(name: str) -> str:
        """Wait until both are here."""
        met_by.append(name)
        if len(met_by) == 2:
            met.set()
        await met.wait()
        if name == "first":
            await asyncio.sleep(0)  # it ends after the other
            await asyncio.sleep(0)
        return f"{name} met"

    calls = [ToolCall("same", "meet", f'{{"name": "{name}"}}') for name in ("first", "second")]
    agent = Agent(FakeSandbox(), ReplayModel([calling(*calls), "ok"]), tools=Tools([meet]))
    events = await events_of(agent)
    kinds = [kind for kind, _ in groupby(event.type for event in events)]
    assert kinds == [
        *("run_start", "tool_start", "tool_end", "step_end", "text_delta", "step_end", "run_end")
    ]
    results = [message for message in await messages(agent) if message.role == "tool"]
    assert [result.content for result in results] == ["first met", "second met"]
    starts = [event for event in events if isinstance(event, ToolStart)]
    assert [start.tool_args["name"] for start in starts] == ["first", "second"]
    ids = [start.tool_call_id for start in starts]
    assert len({*ids, "same"}) == 3, "ids are ours: the model repeated its own"
    assert [result.tool_call_id for result in results] == ids


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (ToolCall("x", "no_such", "{}"), "no_such"),
        (ToolCall("x", "run_code", "{"), "JSON"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_to_the_model_and_the_loop_goes_on(
    call: ToolCall, says: str
) -> None:
    model = ReplayModel([calling(call), "I see"])
    events = await events_of(Agent(FakeSandbox(), model))
    end = next(event for event in events if isinstance(event, ToolEnd))
    assert end.is_error
    assert says in end.result
    assert model.requests[1].messages[-1].content == end.result
    assert end_of(events).reason == "done"


async def test_the_files_are_told_afresh_before_each_answer() -> None:
    box = FakeSandbox()

    async def uploads(_: RecordedRequest) -> Response:
        await box.uploads.put_bytes("late.csv", b"1")
        return calling(code("1"))

    model = ReplayModel([uploads, "ok"])
    await events_of(Agent(box, model, system="Be brief."))
    assert model.requests[0].system.startswith("Be brief.\n\nThe files that the user uploaded")
    assert "late.csv" not in model.requests[0].system
    assert "- /workspace/uploads/temparea/late.csv (1 bytes)" in model.requests[1].system


async def test_a_model_without_eyes_is_sent_no_images() -> None:
    history = MemoryHistory([Message("user", "see", images=(Image("image/png", "AA=="),))])
    for model in (ReplayModel(["ok"]), ReplayModel(["ok"], takes_images=False)):
        await events_of(Agent(FakeSandbox(), model, history=history), "and now?")
        assert bool(model.requests[0].messages[0].images) is model.takes_images


# -- its ends --------------------------------------------------------------------------------------


async def test_max_steps_end_it_after_the_calls_of_the_last_step_were_made() -> None:
    box = FakeSandbox()
    agent = Agent(box, ReplayModel([calling(code(str(step))) for step in range(9)]))
    end = await agent.run("go", max_steps=3)
    assert (end.reason, box.ran) == ("max_steps", ["0", "1", "2"])
    assert roles(await messages(agent)) == ["user", *["assistant", "tool"] * 3]


@pytest.mark.parametrize("coroutine", [False, True])
async def test_a_completion_check_ends_it_and_the_calls_are_made_before(coroutine: bool) -> None:
    async def later(response: Response) -> bool:
        return check(response)

    def check(response: Response) -> bool:
        return "DONE" in response.content

    box = FakeSandbox()
    model = ReplayModel([calling(code("1")), calling(code("2"), content="DONE")])
    end = await Agent(box, model).run("go", completion_check=later if coroutine else check)
    assert (end.reason, end.content, box.ran) == ("done", "DONE", ["1", "2"])


async def test_on_step_is_told_of_each_step() -> None:
    steps: list[Step] = []
    await Agent(FakeSandbox(), ReplayModel([calling(code("1")), "ok"])).run(
        "go", on_step=steps.append
    )
    assert [(step.number, len(step.results)) for step in steps] == [(1, 1), (2, 0)]


async def test_what_on_step_raises_is_raised_and_the_history_stays_whole() -> None:
    def fails(_: Step) -> None:
        raise ZeroDivisionError

    agent = Agent(FakeSandbox(), ReplayModel([calling(code("1")), "ok"]))
    with pytest.raises(ZeroDivisionError):
        await agent.run("go", on_step=fails)
    assert roles(await messages(agent)) == ["user", "assistant", "tool"]
    assert (await agent.resume()).content == "ok"


async def test_spent_tokens_end_it_at_the_next_step() -> None:
    model = ReplayModel([calling(code("1"), tokens=30), calling(code("2"), tokens=30)])
    end = await Agent(FakeSandbox(), model, budget=Budget(tokens=60)).run("go")
    assert (end.reason, end.usage) == ("budget", {"input_tokens": 30, "output_tokens": 30})
    assert len(model.requests) == 1


async def test_spent_seconds_end_what_runs_and_the_history_says_so() -> None:
    box = FakeSandbox()
    agent = Agent(box, ReplayModel([calling(code("wait"))]), budget=Budget(seconds=0.2))
    end = await agent.run("go")
    assert (end.reason, box.given_up) == ("budget", ["wait"])
    assert (await messages(agent))[-1].content == ENDED


async def test_an_error_of_the_model_ends_it_and_the_history_is_kept() -> None:
    failure = Unavailable("it does not answer", code="model_unavailable")
    agent = Agent(FakeSandbox(), ReplayModel([calling(code("1")), failure, "There."]))
    end = await agent.run("go")
    assert (end.reason, error_code(end)) == ("error", "model_unavailable")
    assert roles(await messages(agent)) == ["user", "assistant", "tool"]
    assert (await agent.resume()).content == "There."


async def test_text_that_was_told_before_an_answer_broke_off_is_kept() -> None:
    async def breaks() -> None:
        raise Unavailable("cut", code="model_unavailable")

    agent = Agent(FakeSandbox(), Telling("The answer is", breaks))
    end = await agent.run("go")
    assert (end.reason, end.content) == ("error", "The answer is")
    assert (await messages(agent))[-1].content == "The answer is" + BROKEN_OFF


async def test_empty_answers_are_asked_for_again_and_then_are_an_error() -> None:
    assert (await Agent(FakeSandbox(), ReplayModel(["", " \n", "yes"])).run("go")).content == "yes"
    agent = Agent(FakeSandbox(), ReplayModel([""] * 3))
    end = await agent.run("go")
    assert error_code(end) == "model_empty_answer"
    assert roles(await messages(agent)) == ["user"]


async def test_a_refusal_is_an_error_that_keeps_its_words() -> None:
    refusal = Response("I will not.", (code("1"),), stop="refusal")
    box = FakeSandbox()
    end = await Agent(box, ReplayModel([refusal])).run("go")
    assert (error_code(end), end.content, box.ran) == ("model_refused", "I will not.", [])


async def test_an_answer_that_was_cut_off_goes_on() -> None:
    model = ReplayModel([Response("One, two", stop="length"), ", three."])
    agent = Agent(FakeSandbox(), model)
    assert (await agent.run("count")).content == "One, two, three."
    assert model.requests[1].messages[-1] == Message("user", GO_ON)
    assert roles(await messages(agent)) == ["user", "assistant", "assistant"]


# -- abort -----------------------------------------------------------------------------------------


async def test_abort_during_a_call_gives_its_run_up_and_keeps_what_the_others_gave() -> None:
    box = FakeSandbox()
    agent = Agent(box, ReplayModel([calling(code("quick"), code("wait")), "and again"]))
    events = []
    async with asyncio.timeout(DEADLINE_S), aclosing(agent.stream("go")) as stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, ToolEnd) and not event.is_error:
                agent.abort()
                agent.abort()
    assert (end_of(events).reason, box.given_up) == ("aborted", ["wait"])
    starts = [event.tool_call_id for event in events if isinstance(event, ToolStart)]
    ends = [event.tool_call_id for event in events if isinstance(event, ToolEnd)]
    assert sorted(starts) == sorted(ends)
    kept = await messages(agent)
    assert [message.is_error for message in kept if message.role == "tool"] == [False, True]
    assert (await agent.run("go on")).content == "and again"


async def test_abort_while_the_model_answers_ends_its_request_and_keeps_what_was_told() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    agent = Agent(FakeSandbox(), Telling("I think", wait))
    async with asyncio.timeout(DEADLINE_S), aclosing(agent.stream("go")) as events:
        async for event in events:
            if isinstance(event, AgentTextDelta):
                agent.abort()
    assert event == AgentRunEnd("aborted", "I think", {"input_tokens": 0, "output_tokens": 0})
    assert ended.is_set()
    assert (await messages(agent))[-1].content == "I think" + BROKEN_OFF


async def test_abort_before_anything_was_asked_keeps_the_message() -> None:
    model = ReplayModel(["never"])
    agent = Agent(FakeSandbox(), model)
    stream = agent.stream("go")
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    agent.abort()
    assert isinstance(await waiting, AgentRunStart)
    assert [event.type async for event in stream] == ["run_end"]
    assert (model.requests, roles(await messages(agent))) == ([], ["user"])


async def test_abort_of_nothing_does_nothing() -> None:
    agent = Agent(FakeSandbox(), ReplayModel(["ok"]))
    agent.abort()
    assert (await agent.run("go")).reason == "done"


async def test_closing_the_stream_ends_what_runs() -> None:
    box = FakeSandbox()
    agent = Agent(box, ReplayModel([calling(code("wait")), "ok"]))
    async with asyncio.timeout(DEADLINE_S), aclosing(agent.stream("go")) as events:
        async for event in events:
            if event.type == "tool_output":
                break
    assert box.given_up == ["wait"]
    assert roles(await messages(agent)) == ["user", "assistant", "tool"]


async def test_cancelling_who_follows_ends_what_runs() -> None:
    box = FakeSandbox()
    agent = Agent(box, ReplayModel([calling(code("wait"))]))
    running = asyncio.create_task(agent.run("go"))
    async with asyncio.timeout(DEADLINE_S):
        await box.started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert box.given_up == ["wait"]
    assert roles(await messages(agent)) == ["user", "assistant", "tool"]


async def test_only_one_run_at_a_time() -> None:
    agent = Agent(FakeSandbox(), ReplayModel([calling(code("1")), "ok"]))
    async with aclosing(agent.stream("go")) as events:
        await anext(events)
        with pytest.raises(Conflict) as refused:
            await agent.run("and this")
    assert refused.value.code == "run_in_progress"


# -- resume ----------------------------------------------------------------------------------------


async def test_a_crash_between_answer_and_results_is_told_and_nothing_is_done_twice() -> None:
    call = code("rm precious", "call-1")
    history = MemoryHistory([Message("user", "go"), calling(call).message()])
    box, model = FakeSandbox(), ReplayModel(["I look first"])
    end = await Agent(box, model, history=history).resume()
    assert (end.reason, box.ran) == ("done", [])
    assert model.requests[0].messages[-1] == Message(
        "tool", INTERRUPTED, tool_call_id="call-1", name="run_code", is_error=True
    )


async def test_nothing_is_left_to_resume_after_an_answer() -> None:
    agent = Agent(FakeSandbox(), ReplayModel(["ok"]))
    assert error_code(await agent.resume()) == "nothing_to_resume"
    await agent.run("go")
    assert error_code(await agent.resume()) == "nothing_to_resume"


async def test_a_history_that_cannot_be_kept_ends_the_run() -> None:
    class Gone(MemoryHistory):
        async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
            raise NotFound("the conversation was deleted", code="conversation_not_found")

    end = await Agent(FakeSandbox(), ReplayModel(["ok"]), history=Gone()).run("go")
    assert (end.reason, error_code(end)) == ("error", "conversation_not_found")


@pytest.mark.parametrize(
    ("message", "steps"), [("", 1), (Message("assistant", "hi"), 1), ("go", 0)]
)
async def test_a_wrong_call_of_the_agent_is_refused(message: str | Message, steps: int) -> None:
    with pytest.raises(BadRequest):
        await Agent(FakeSandbox(), ReplayModel([])).run(message, max_steps=steps)
