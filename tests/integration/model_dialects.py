"""How model servers write an answer, whole and as events, and what they refuse to read.

Written from what the two wire formats say, beside and independent of sbx/agent/models.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal

from sbx.agent.messages import Response, ToolCall

Dialect = Literal["openai", "anthropic"]
Json = dict[str, Any]
Event = tuple[str | None, Json | str]  # its name, and its data

_numbers = count(1)
_OPENAI_STOPS = {"end": "stop", "tools": "tool_calls", "length": "length", "refusal": "stop"}
_ANTHROPIC_STOPS = {
    "end": "end_turn",
    "tools": "tool_use",
    "length": "max_tokens",
    "refusal": "refusal",
}


def whole(dialect: Dialect, response: Response, model: str) -> Json:
    return _openai(response, model) if dialect == "openai" else _anthropic(response, model)


def events(dialect: Dialect, response: Response, model: str) -> list[Event]:
    """A text comes in pieces of 7 characters, the arguments of a call in pieces of 5."""
    write = _openai_events if dialect == "openai" else _anthropic_events
    return list(write(response, model))


def error(dialect: Dialect, kind: str, message: str) -> Json:
    answer = {"type": kind, "message": message}
    return {"error": answer} if dialect == "openai" else {"type": "error", "error": answer}


def fault_in(dialect: Dialect, asked: Any) -> str | None:
    """Why a provider would refuse this request; None if it would not."""
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
        return "messages: a list is required"
    if not isinstance(asked.get("model"), str) or not asked["model"]:
        return "model: a name is required"
    check = _openai_fault if dialect == "openai" else _anthropic_fault
    return check(asked)


def pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


# -- chat completions ------------------------------------------------------------------------------


def _openai(response: Response, model: str) -> Json:
    refused = response.stop == "refusal"
    message: Json = {
        "role": "assistant",
        "content": None if refused else response.content or None,
        "refusal": response.content if refused else None,
    }
    if response.tool_calls:
        message["tool_calls"] = [_openai_call(call) for call in response.tool_calls]
    return {
        **_openai_frame("chat.completion", model),
        "choices": [{"index": 0, "message": message, "finish_reason": _openai_stop(response)}],
        "usage": _openai_usage(response),
    }


def _openai_events(response: Response, model: str) -> Iterator[Event]:
    frame = _openai_frame("chat.completion.chunk", model)

    def chunk(delta: Json, finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return None, {**frame, "choices": [choice], "usage": None}

    said = "refusal" if response.stop == "refusal" else "content"
    yield chunk({"role": "assistant", "content": "" if said == "content" else None})
    for piece in pieces(response.content, 7):
        yield chunk({said: piece})
    for index, call in enumerate(response.tool_calls):
        start = _openai_call(call)
        start["function"]["arguments"] = ""
        yield chunk({"tool_calls": [{"index": index, **start}]})
        for piece in pieces(call.arguments, 5):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _openai_stop(response))
    yield None, {**frame, "choices": [], "usage": _openai_usage(response)}
    yield None, "[DONE]"


def _openai_frame(kind: str, model: str) -> Json:
    return {"id": f"chatcmpl-{next(_numbers)}", "object": kind, "created": 1, "model": model}


def _openai_call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _openai_stop(response: Response) -> str:
    return _OPENAI_STOPS[response.stop if not response.tool_calls else "tools"]


def _openai_usage(response: Response) -> Json:
    answer, said = response.usage.input_tokens, response.usage.output_tokens
    return {"prompt_tokens": answer, "completion_tokens": said, "total_tokens": answer + said}


def _openai_fault(asked: Json) -> str | None:
    open_calls: set[str] = set()
    for at, message in enumerate(asked["messages"]):
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                return f"messages.{at}: a tool message must answer a call of the message before"
            open_calls.remove(message["tool_call_id"])
            if not isinstance(message.get("content"), str):
                return f"messages.{at}: the content of a tool message is text"
            continue
        if open_calls:
            return f"messages.{at}: these calls have no answer: {sorted(open_calls)}"
        if role not in ("system", "user", "assistant"):
            return f"messages.{at}: no such role: {role!r}"
        open_calls = {call["id"] for call in message.get("tool_calls") or ()}
        if not open_calls and not message.get("content"):
            return f"messages.{at}: content is required"
    return f"these calls have no answer: {sorted(open_calls)}" if open_calls else None


# -- messages --------------------------------------------------------------------------------------


def _anthropic(response: Response, model: str) -> Json:
    content: list[Json] = [{"type": "text", "text": response.content}] if response.content else []
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}
        for call in response.tool_calls
    ]
    return {
        **_anthropic_frame(model),
        "content": content,
        "stop_reason": _anthropic_stop(response),
        "stop_sequence": None,
        "usage": {
            "input_tokens": response.usage.input_tokens,
            "output_tokens": response.usage.output_tokens,
        },
    }


def _anthropic_events(response: Response, model: str) -> Iterator[Event]:
    answer, said = response.usage.input_tokens, response.usage.output_tokens
    message = {
        **_anthropic_frame(model),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer, "output_tokens": 1},
    }
    yield _named("message_start", message=message)
    yield _named("ping")
    if response.content:
        yield _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for piece in pieces(response.content, 7):
            yield _delta(0, type="text_delta", text=piece)
        yield _named("content_block_stop", index=0)
    for index, call in enumerate(response.tool_calls, 1 if response.content else 0):
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield _named("content_block_start", index=index, content_block=block)
        for piece in pieces(call.arguments, 5):
            yield _delta(index, type="input_json_delta", partial_json=piece)
        yield _named("content_block_stop", index=index)
    stop = {"stop_reason": _anthropic_stop(response), "stop_sequence": None}
    yield _named("message_delta", delta=stop, usage={"output_tokens": said})
    yield _named("message_stop")


def _named(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _delta(index: int, **delta: Any) -> Event:
    return _named("content_block_delta", index=index, delta=delta)


def _anthropic_frame(model: str) -> Json:
    return {"id": f"msg_{next(_numbers)}", "type": "message", "role": "assistant", "model": model}


def _anthropic_stop(response: Response) -> str:
    return _ANTHROPIC_STOPS[response.stop if not response.tool_calls else "tools"]


def _input(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments  # no provider sends such a thing whole; streamed fragments may be it


def _anthropic_fault(asked: Json) -> str | None:
    if not isinstance(asked.get("max_tokens"), int):
        return "max_tokens: field required"
    open_calls: set[str] = set()
    before = "assistant"
    for at, message in enumerate(asked["messages"]):
        role, blocks = message.get("role"), _blocks(message)
        if role not in ("user", "assistant") or role == before:
            return f"messages.{at}: roles must be user and assistant by turns"
        if not blocks or any(block["type"] == "text" and not block["text"] for block in blocks):
            return f"messages.{at}: text content blocks must be non-empty"
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if set(results) != open_calls or len(results) != len(open_calls):
            return f"messages.{at}: tool_result blocks {results} for the calls {sorted(open_calls)}"
        if results and any(block["type"] != "tool_result" for block in blocks[: len(results)]):
            return f"messages.{at}: tool_result blocks come first"
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if any(not isinstance(call["input"], dict) for call in calls):
            return f"messages.{at}: input should be a valid dictionary"
        open_calls, before = {call["id"] for call in calls}, role
    if open_calls:
        return f"these calls have no tool_result: {sorted(open_calls)}"
    return None if asked["messages"] else "messages: at least one message is required"


def _blocks(message: Json) -> Sequence[Json]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []
