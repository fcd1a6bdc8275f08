"""AnthropicModel: the messages API, by the real SDK over real HTTP."""

import json
from typing import Any

import pytest
from asked_models import HELLO, asked_model, streamed
from model_server import KEY, Raw

from sbx.agent.messages import Image, Message, Response, TokenUsage, ToolCall
from sbx.agent.models.anthropic import encode_messages
from sbx.agent.tools.tool import ToolDefinition

CALLS = (ToolCall("call-1", "run_code", '{"code":"1+1"}'), ToolCall("call-2", "list_files", "{}"))
SAID = Response("Ich schaue nach … 🎉", CALLS, TokenUsage(11, 7), "tools")
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
DOT = Image("image/png", "iVBORw0KGgo=")
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}


def raw_events(*events: dict[str, Any]) -> Raw:
    lines = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events]
    return Raw("".join(lines).encode(), "text/event-stream")


async def test_an_answer_comes_whole() -> None:
    async with asked_model("anthropic", SAID) as (model, _):
        assert await model.complete("", HELLO, ()) == SAID


async def test_a_streamed_answer_is_told_in_pieces_and_ends_with_the_whole() -> None:
    async with asked_model("anthropic", SAID) as (model, _):
        texts, last = await streamed(model)
    assert len(texts) > 1
    assert ("".join(texts), last) == (SAID.content, SAID)


async def test_a_request_names_model_key_tools_and_options() -> None:
    tool = ToolDefinition("run_code", "Runs it.", SCHEMA)
    options = {"temperature": 0, "max_tokens": 50}
    async with asked_model("anthropic", SAID, options=options) as (model, server):
        await model.complete("Be brief.", HELLO, [tool])
    (request,) = server.requests
    assert request.key == KEY
    assert request.body == {
        "model": "scripted",
        "max_tokens": 50,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "tools": [{"name": "run_code", "description": "Runs it.", "input_schema": SCHEMA}],
        "stream": False,
        "temperature": 0,
    }


async def test_all_results_of_an_answer_are_in_the_one_message_after_it() -> None:
    history = [
        Message("summary", "They greeted."),
        Message("user", "look", images=(DOT,)),
        SAID.message(),
        Message("tool", "2", tool_call_id="call-1", name="run_code", images=(DOT,)),
        Message("tool", "bad", tool_call_id="call-2", is_error=True, images=(DOT,)),
        Message("user", "go on"),
    ]
    async with asked_model("anthropic", Response("ok")) as (model, server):
        await model.complete("", history, ())
    asked, said, answered = server.requests[0].messages
    assert asked["content"] == [_text("They greeted."), _text("look"), PICTURE]
    assert said["content"][1]["input"] == {"code": "1+1"}
    assert answered["content"] == [
        {
            "type": "tool_result",
            "tool_use_id": "call-1",
            "content": [_text("2"), PICTURE],
            "is_error": False,
        },
        {
            "type": "tool_result",
            "tool_use_id": "call-2",
            "content": [_text("bad")],
            "is_error": True,
        },
        PICTURE,
        _text("go on"),
    ]


async def test_empty_messages_do_not_end_a_conversation() -> None:
    history = [
        Message("user", " "),
        Message("assistant", ""),
        Message("user", "and?"),
        Message("assistant", "", tool_calls=CALLS[:1]),
        Message("tool", "", tool_call_id="call-1"),
    ]
    async with asked_model("anthropic", Response("ok")) as (model, server):
        assert (await model.complete("", history, ())).content == "ok"
    first, _, last = server.requests[0].messages
    assert first["content"] == [_text("[nothing]"), _text("and?")]
    assert last["content"][0]["content"] == []


def test_arguments_that_are_no_object_go_back_as_one() -> None:
    calls = tuple(
        ToolCall("x", "run code!", text) for text in ('{"code": "1', "[1]", "", '{"a":1}')
    )
    (message,) = encode_messages([Message("assistant", tool_calls=calls)], True)
    assert [(call["name"], call["input"]) for call in message["content"]] == [
        ("run_code_", {"malformed": '{"code": "1'}),
        ("run_code_", {"malformed": "[1]"}),
        ("run_code_", {}),
        ("run_code_", {"a": 1}),
    ]


async def test_malformed_arguments_come_as_the_text_they_are() -> None:
    call = ToolCall("call-1", "run_code", '{"code": "print(1)')
    cut = Response("", (call,), TokenUsage(1, 1), "tools")
    async with asked_model("anthropic", cut) as (model, _):
        assert (await streamed(model))[1] == cut


async def test_stop_reasons() -> None:
    cut = Response("once upon", stop="length")
    refusal = Response("I would rather not.", stop="refusal")
    answers = (cut, refusal, cut, refusal, Response())
    async with asked_model("anthropic", *answers) as (model, _):
        assert [await model.complete("", HELLO, ()) for _ in range(2)] == [cut, refusal]
        assert [(await streamed(model))[1] for _ in range(3)] == [cut, refusal, Response()]


async def test_blocks_that_are_no_answer_are_left_aside_and_cached_tokens_are_counted() -> None:
    usage = {"input_tokens": 1, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 300}
    message = {"id": "x", "type": "message", "role": "assistant", "model": "m", "content": []}
    body = raw_events(
        {"type": "message_start", "message": {**message, "usage": {**usage, "output_tokens": 1}}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "hm"},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": _text("o")},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "k"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "novelty", "index": 9},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 4},
        },
        {"type": "message_stop"},
    )
    async with asked_model("anthropic", body) as (model, _):
        assert await streamed(model) == (["o", "k"], Response("ok", usage=TokenUsage(321, 4)))


@pytest.mark.parametrize("name", ["ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY"])
async def test_the_environment_names_no_other_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "another-key")
    async with asked_model("anthropic", SAID) as (model, server):
        await model.complete("", HELLO, ())
    assert server.requests[0].key == KEY
    assert "another-key" not in str(server.requests[0].headers)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
