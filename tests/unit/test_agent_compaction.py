"""Long histories told shorter: when, what stays whole, and what becomes of it."""

from sbx.agent.agent import Agent
from sbx.agent.compaction import INSTRUCTIONS, Compaction, estimated, to_cover, view
from sbx.agent.export import export_history, import_history
from sbx.agent.history import Kept, MemoryHistory
from sbx.agent.messages import Message, Response, TokenUsage, ToolCall
from sbx.agent.models.replay import RecordedRequest, ReplayModel
from sbx.errors import BadRequest
from tests.fake_sandbox import FakeSandbox

SMALL = Compaction(above_tokens=700, keep_steps=2)  # a step has about 200


def call(step: int) -> Response:
    return Response("", (ToolCall("x", "run_code", f'{{"code": "{step} {"x" * 400}"}}'),))


async def worked(*answers: object, message: str = "the task") -> tuple[Agent, ReplayModel]:
    model = ReplayModel(answers)  # type: ignore[arg-type]
    agent = Agent(FakeSandbox(), model, compaction=SMALL)
    await agent.run(message, max_steps=20)
    return agent, model


async def test_older_steps_are_summarised_by_the_model_and_the_last_stay_whole() -> None:
    summaries: list[RecordedRequest] = []

    def summary(asked: RecordedRequest) -> Response:
        summaries.append(asked)
        return Response("steps 0 and 1 are done", usage=TokenUsage(7, 7))

    agent, model = await worked(*(call(step) for step in range(4)), summary, "ok")
    (asked,) = summaries
    assert (asked.system, asked.tools) == (INSTRUCTIONS, ())
    record = asked.messages[0].content
    assert "[user] the task" in record
    assert '"0 xxx' in record
    assert '"2 xxx' not in record
    reported = model.requests[-1].messages
    assert [one.role for one in reported] == ["user", "summary", *["assistant", "tool"] * 2]
    assert (reported[0].content, reported[1].content) == ("the task", "steps 0 and 1 are done")
    kept = await agent.history.messages()
    assert [one.covers for one in kept if one.message.role == "summary"] == [5]
    assert len([one for one in kept if one.message.role == "assistant"]) == 5, "nothing is lost"


async def test_a_second_summary_is_made_of_the_first_and_of_what_came_since() -> None:
    records = []

    def summary(asked: RecordedRequest) -> str:
        records.append(asked.messages[0].content)
        return f"summary {len(records)}"

    def answer(asked: RecordedRequest) -> Response | str:
        return summary(asked) if asked.system == INSTRUCTIONS else call(len(model.requests))

    model = ReplayModel([answer] * 30)
    await Agent(FakeSandbox(), model, compaction=SMALL).run("the task", max_steps=8)
    assert len(records) >= 2
    assert "[summary of what was before]\nsummary 1" in records[1]
    assert "the task" not in records[1]
    last = model.requests[-1].messages
    assert [one.content for one in last if one.role == "summary"] == [f"summary {len(records)}"]
    assert last[0].content == "the task"


async def test_what_is_too_long_for_a_provider_is_told_shorter() -> None:
    """A provider with a smaller window than what may be told refused the conversation for good."""
    too_long = BadRequest("HTTP 400: maximum context length is 9", code="model_bad_request")
    steps = [call(step) for step in range(3)]
    model = ReplayModel([*steps, too_long, "in short", "ok"])
    agent = Agent(FakeSandbox(), model)
    ended = await agent.run("the task")
    assert (ended.reason, ended.content) == ("done", "ok")
    assert [one.role for one in model.requests[-1].messages[:2]] == ["user", "summary"]
    other = BadRequest("HTTP 400: no such model", code="model_bad_request")
    for refusals in ([too_long, "in short", too_long], [other]):
        model = ReplayModel([*steps, *refusals])
        ended = await Agent(FakeSandbox(), model).run("the task")
        assert (ended.reason, len(model.requests)) == ("error", 3 + len(refusals))


async def test_the_message_that_is_being_worked_on_stays_whole() -> None:
    answers = [call(step) for step in range(4)]
    model = ReplayModel(["hello", *answers, "in short", "ok"])
    agent = Agent(FakeSandbox(), model, compaction=SMALL)
    await agent.run("hi")
    await agent.run("the second task", max_steps=9)
    assert [one.content for one in model.requests[-1].messages[:3]] == [
        *("hi", "in short", "the second task")
    ]


async def test_without_a_summary_all_is_told_as_before() -> None:
    agent, model = await worked(*(call(step) for step in range(4)), "", "ok")
    assert len(model.requests[-1].messages) == 9
    assert not any(one.message.role == "summary" for one in await agent.history.messages())


def test_what_the_provider_counted_goes_before_what_is_estimated() -> None:
    kept = [Kept(1, Message("user", "x" * 800), 0.0)]
    kept += [Kept(seq, Message("assistant", "y" * 400), 0.0) for seq in range(2, 6)]
    how = Compaction(above_tokens=1000, keep_steps=1)
    assert estimated(view(kept)) < 1000
    assert to_cover(kept, how) is None
    assert to_cover(kept, how, tokens=2000) == 4


async def test_a_history_comes_back_from_its_export_with_its_summaries() -> None:
    agent, _ = await worked(*(call(step) for step in range(4)), "in short", "ok")
    text = await export_history(agent.history)
    again = MemoryHistory()
    count = await import_history(again, text)
    there, here = await agent.history.messages(), await again.messages()
    assert count == len(there)
    assert [(one.seq, one.message, one.covers) for one in here] == [
        (one.seq, one.message, one.covers) for one in there
    ]
    assert view(here) == view(there)


async def test_fewer_steps_stay_whole_where_so_many_are_too_long_to_be_told() -> None:
    """A conversation of a few long steps was refused by its provider for good."""
    agent, model = await worked(
        *(
            Response("", (ToolCall("x", "run_code", f'{{"code": "{n} {"x" * 1400}"}}'),))
            for n in "ab"
        ),
        "in short",
        "ok",
    )
    last = model.requests[-1].messages
    assert [one.role for one in last] == ["user", "summary", "assistant", "tool"]
    assert '"b xxx' in last[2].tool_calls[0].arguments
    assert (await agent.history.messages())[-1].message.content == "ok"
