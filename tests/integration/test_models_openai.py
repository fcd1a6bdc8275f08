"""OpenAIModel: chat completions, by the real SDK over real HTTP."""

import json
from typing import Any

from asked_models import HELLO, asked_model, streamed
from model_server import KEY, Raw

from sbx.agent.messages import Image, Message, Response, TokenUsage, ToolCall
from sbx.agent.models.openai import encode_messages
from sbx.agent.tools.tool import ToolDefinition

CALLS = (ToolCall("call-1", "run_code", '{"code": "1+1"}'), ToolCall("call-2", "list_files", "{}"))
SAID = Response("Ich schaue nach … 🎉", CALLS, TokenUsage(11, 7), "tools")
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
DOT = Image("image/png", "iVBORw0KGgo=")


def chunks(*answer: Any, done: bool = True) -> Raw:
    """A stream of these chunks, as servers write them that are not OpenAI's own."""
    lines = [f"data: {json.dumps(one)}\n\n" for one in answer] + ["data: [DONE]\n\n"] * done
    return Raw("".join(lines).encode(), "text/event-stream")


def choice(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


async def test_an_answer_comes_whole() -> None:
    async with asked_model("openai", SAID) as (model, _):
        assert await model.complete("", HELLO, ()) == SAID


async def test_a_streamed_answer_is_told_in_pieces_and_ends_with_the_whole() -> None:
    async with asked_model("openai", SAID) as (model, _):
        texts, last = await streamed(model)
    assert len(texts) > 1
    assert ("".join(texts), last) == (SAID.content, SAID)


async def test_a_request_names_model_key_tools_and_options() -> None:
    tool = ToolDefinition("run_code", "Runs it.", SCHEMA)
    async with asked_model("openai", SAID, options={"temperature": 0}) as (model, server):
        await model.complete("Be brief.", HELLO, [tool])
    (request,) = server.requests
    assert request.key == KEY
    assert request.body == {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "run_code",
                    "description": "Runs it.",
                    "parameters": SCHEMA,
                },
            }
        ],
        "stream": False,
        "temperature": 0,
    }


async def test_a_history_with_calls_images_and_a_summary_is_accepted() -> None:
    history = [
        Message("summary", "They greeted."),
        Message("user", "look", images=(DOT,)),
        SAID.message(),
        Message("tool", "2", tool_call_id="call-1", name="run_code", images=(DOT,)),
        Message("tool", "no such tool", tool_call_id="call-2", name="list_files", is_error=True),
        Message("assistant", ""),
        Message("user", "go on"),
    ]
    async with asked_model("openai", Response("ok")) as (model, server):
        await model.complete("", history, ())
    url = {"url": "data:image/png;base64,iVBORw0KGgo="}
    picture = {"type": "image_url", "image_url": url}
    summary, look, said, *results, shown, on = server.requests[0].messages
    assert summary == {"role": "user", "content": "They greeted."}
    assert look["content"] == [{"type": "text", "text": "look"}, picture]
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [
        '{"code": "1+1"}',
        "{}",
    ]
    assert [result["content"] for result in results] == ["2", "Error: no such tool"]
    assert (shown["role"], shown["content"][1]) == ("user", picture)
    assert on["content"] == "go on"


def test_images_that_a_model_does_not_take_are_told_of() -> None:
    message = Message("user", "look", images=(DOT, Image("image/svg+xml", "PHN2Zz4=")))
    (without,) = encode_messages("", [message], takes_images=False)
    (one,) = encode_messages("", [message], takes_images=True)
    assert without["content"] == "look\n[images left out, which this model does not take: 2]"
    assert [part["type"] for part in one["content"]] == ["text", "image_url"]
    assert one["content"][0]["text"].endswith("does not take: 1]")


def test_arguments_that_are_no_object_go_back_as_one() -> None:
    """Some servers parse them when they write the prompt, and fail with the whole request."""
    calls = tuple(
        ToolCall(f"call-{n}", "run code!", text)
        for n, text in enumerate(('{"code": "1', "[1]", "", '{"a":NaN}', "[" * 100_000))
    )
    (message,) = encode_messages("", [Message("assistant", tool_calls=calls)], True)
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"run_code_"}
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"malformed": '{"code": "1'},
        {"malformed": "[1]"},
        {},
        {"malformed": '{"a":NaN}'},
        {"malformed": "[" * 100_000},
    ]


async def test_text_that_no_json_can_carry_is_sent_mended() -> None:
    async with asked_model("openai", Response("ok")) as (model, server):
        await model.complete("\ud800", [Message("user", "a\udcffb")], ())
    assert [one["content"] for one in server.requests[0].messages] == ["?", "a?b"]


async def test_malformed_arguments_come_as_the_text_they_are() -> None:
    call = ToolCall("call-1", "run_code", '{"code": "print(1)')
    cut = Response("", (call,), TokenUsage(1, 1), "length")
    body = chunks(
        choice(tool_calls=[_piece(call.arguments[:6], id=call.id, name=call.name)]),
        choice(tool_calls=[_piece(call.arguments[6:])]),
        choice("length"),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    )
    async with asked_model("openai", body) as (model, _):
        assert (await streamed(model))[1] == cut


async def test_calls_that_a_server_does_not_number_are_told_apart_by_id() -> None:
    body = chunks(
        choice(tool_calls=[_piece('{"a":', id="x", name="f", index=0)]),
        choice(tool_calls=[_piece("1}", index=0)]),
        choice(tool_calls=[_piece("{}", id="y", name="g", index=0)]),
        choice("stop"),
    )
    async with asked_model("openai", body) as (model, _):
        _, last = await streamed(model)
    assert last.tool_calls == (ToolCall("x", "f", '{"a":1}'), ToolCall("y", "g", "{}"))
    assert last.stop == "tools"


async def test_arguments_may_come_as_an_object() -> None:
    body = chunks(choice(tool_calls=[_piece({"a": 1}, id="x", name="f")]), choice("tool_calls"))
    async with asked_model("openai", body) as (model, _):
        assert (await streamed(model))[1].tool_calls == (ToolCall("x", "f", '{"a":1}'),)


async def test_stop_reasons() -> None:
    cut = Response("once upon", stop="length")
    refusal = Response("I would rather not.", stop="refusal")
    filtered = chunks(choice(content="I"), choice("content_filter"))
    answers = (cut, refusal, cut, refusal, filtered, Response())
    async with asked_model("openai", *answers) as (model, _):
        assert [await model.complete("", HELLO, ()) for _ in range(2)] == [cut, refusal]
        last = [(await streamed(model))[1] for _ in range(4)]
    assert last == [cut, refusal, Response("I", stop="refusal"), Response()]


def _piece(
    arguments: Any, *, id: str | None = None, name: str | None = None, index: int = 0
) -> Any:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": id, "type": "function"} if id else {})
