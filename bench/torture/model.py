"""A model server on the loopback: it has a tool called once, then it answers.

The message of the user names the code to run and the answer to give: `RUN <code> SAY <answer>`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

KEY = "sk-torture-0123456789abcdef"
_ASKED = re.compile(r"RUN (?P<code>.*) SAY (?P<answer>\S+)", re.DOTALL)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
    b"cache-control: no-store\r\n\r\n"
)


def message(code: str, answer: str) -> str:
    """Return the words that make the model run `code` and then give `answer`."""
    return f"RUN {code} SAY {answer}"


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The base URL of a server that speaks chat completions, streamed."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        writer.write(_HEAD + b"".join(_chunks(json.loads(body)["messages"])))
        await writer.drain()
    writer.close()


def _chunks(messages: list[dict[str, Any]]) -> list[bytes]:
    last = messages[-1]
    request = next(
        (match for message in reversed(messages) if (match := _ASKED.search(_text(message)))), None
    )
    if last["role"] == "user" and request is not None:
        arguments = json.dumps({"code": request["code"]})
        call = {
            "index": 0,
            "id": f"call-{request['answer']}",
            "type": "function",
            "function": {"name": "run_code", "arguments": arguments},
        }
        return _stream({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls")
    content = request["answer"] if request is not None else "nothing"
    return _stream({"role": "assistant", "content": content}, "stop")


def _stream(delta: dict[str, Any], stop: str) -> list[bytes]:
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    chunks: list[dict[str, Any]] = [
        {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": stop}]},
        {**frame, "choices": [], "usage": usage},
    ]
    events = [json.dumps(chunk).encode() for chunk in chunks]
    return [b"data: %s\n\n" % event for event in (*events, b"[DONE]")]


def _text(message: dict[str, Any]) -> str:
    """Return the words of the user, which come as one text or in parts; "" of any other message."""
    content = message.get("content") if message.get("role") == "user" else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content)
