"""A model that writes whatever it likes: the conversation can go on, and so can this process."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing

from sbx.agent.agent import Agent
from sbx.agent.calls import AT_ONCE, CALLS_MAX
from sbx.agent.compaction import IMAGES_TOLD, IMAGES_TOLD_SIZE
from sbx.agent.messages import Image, Message, Response, ToolCall
from sbx.agent.models import anthropic, openai
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.function_tool import tool
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolResult
from sbx.errors import NotFound
from sbx.protocol.agent import AgentEvent, ToolEnd, to_json
from tests.fake_sandbox import FakeSandbox

HALF = "\ud83d"  # of a surrogate pair: half a character, which no UTF-8 can carry


async def events_of(agent: Agent) -> list[AgentEvent]:
    async with asyncio.timeout(60), aclosing(agent.stream(f"go {HALF}")) as events:
        return [event async for event in events]


async def messages(agent: Agent) -> list[Message]:
    return [one.message for one in await agent.history.messages()]


def calling(*calls: ToolCall) -> Response:
    return Response("", calls, stop="tools")


def texts(kept: Sequence[Message]) -> str:
    return "".join(
        part
        for one in kept
        for part in (one.content, one.name or "", *(c.name + c.arguments for c in one.tool_calls))
    )


async def test_half_a_character_is_in_no_event_and_in_no_history() -> None:
    """GET messages failed for good, and so did each request to a provider."""

    @tool
    async def fails() -> str:
        """Fails."""
        raise NotFound(f"there is no {HALF}")

    arguments = f'{{"code": "{HALF}"}}'
    wrong = ToolCall("x", f"run_{HALF}", arguments), ToolCall("y", "run_code", arguments)
    box = FakeSandbox()
    model = ReplayModel(
        [Response(f"a{HALF}b\0", (*wrong, ToolCall("z", "fails", "{}"))), f"ok{HALF}"]
    )
    agent = Agent(box, model, tools=Tools([*Tools(), fails]))
    events = await events_of(agent)
    json.dumps([to_json(event) for event in events], ensure_ascii=False).encode()
    texts(kept := await messages(agent)).encode()
    assert kept[1].content == "a?b\\x00"
    assert "half of a surrogate pair" in kept[3].content
    assert box.ran == [], "what it cannot mean is not guessed"


def test_arguments_with_half_a_character_are_told_to_a_provider() -> None:
    call = ToolCall("call-1", f"t{HALF}", f'{{"a": "{HALF}"}}')
    history = [Message("user", "x"), Message("assistant", "", (call,))]
    history.append(Message("tool", HALF, tool_call_id="call-1"))
    for request in (
        openai.encode_messages(HALF, history, True),
        anthropic.encode_messages(history, True),
    ):
        json.dumps(request, ensure_ascii=False).encode()


async def test_pictures_are_told_while_they_are_few_and_new() -> None:
    """Code that showed noise made requests larger than any provider takes, for good."""
    big = Image("image/png", "x" * (IMAGES_TOLD_SIZE // 3))
    small = Image("image/png", "x")
    for image, most in ((big, 3), (small, IMAGES_TOLD)):
        one = ToolCall("x", "looks", "{}")
        looks = tool(name="looks", description="Looks.", parameters={"type": "object"})(
            lambda image=image: ToolResult("seen", images=(image,) * 2)
        )
        model = ReplayModel([*([calling(one)] * 14), "ok"])
        agent = Agent(FakeSandbox(), model, tools=Tools([looks]), compaction=None)
        await agent.run("look", max_steps=20)
        last = model.requests[-1].messages
        assert sum(len(message.images) for message in last) == most
        assert last[-1].images == (image, image), "the newest"
        assert "images left out" in last[2].content
        kept = [message for message in await messages(agent) if message.images]
        assert len(kept) == 14, "the history has them all"


async def test_an_answer_with_a_thousand_calls_has_bounds() -> None:
    """As many as have room are made, a few at a time, and all of them together tell no more than
    models can take."""
    at_once, most, made = 0, 0, 0

    @tool
    async def speaks() -> str:
        """Speaks."""
        nonlocal at_once, most, made
        at_once, made = at_once + 1, made + 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return "word " * 6000

    model = ReplayModel([calling(*[ToolCall("x", "speaks", "{}")] * 1000), "ok"])
    agent = Agent(FakeSandbox(), model, tools=Tools([speaks]))
    events = await events_of(agent)
    assert (made, most) == (CALLS_MAX, AT_ONCE)
    ends = [event for event in events if isinstance(event, ToolEnd)]
    assert len(ends) == 1000
    assert sum(end.is_error for end in ends) == 1000 - CALLS_MAX
    results = [message for message in await messages(agent) if message.role == "tool"]
    assert len(results) == 1000
    assert sum(len(result.content) for result in results) < 400_000
    assert "the whole is in /workspace/uploads/generated/" in results[0].content


async def test_one_call_has_all_the_room_there_is() -> None:
    @tool
    async def speaks() -> str:
        """Speaks."""
        return "word " * 6000

    model = ReplayModel([calling(ToolCall("x", "speaks", "{}")), "ok"])
    agent = Agent(FakeSandbox(), model, tools=Tools([speaks]))
    await events_of(agent)
    assert (await messages(agent))[2].content == "word " * 6000


async def test_the_results_of_calls_that_wait_for_their_turn_are_told_in_order() -> None:
    asked = [ToolCall("x", "run_code", f'{{"code": "{n}"}}') for n in range(300)]
    agent = Agent(FakeSandbox(), ReplayModel([calling(*asked), "ok"]))
    await events_of(agent)
    results = [message for message in await messages(agent) if message.role == "tool"]
    for number, result in enumerate(results[:CALLS_MAX]):
        assert f"[stdout]\n{number}\n" in result.content
