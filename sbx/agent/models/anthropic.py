"""The messages API, with the anthropic SDK."""

from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from sbx.agent.messages import Image, Message, Response, Stop, TokenUsage, ToolCall
from sbx.agent.models import sanitize
from sbx.agent.models.sdk_model import ResponseBuilder, SdkModel, read
from sbx.agent.tools import schema_formats
from sbx.agent.tools.tool import ToolDefinition

_OUTPUT_MAX = 8192  # tokens; the API requires a number, and all current models support this one
_STOPS: dict[str, Stop] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}
Json = dict[str, Any]


class AnthropicModel(SdkModel):
    """A model behind the messages API; see SdkModel."""

    sdk, client, error = "anthropic", "AsyncAnthropic", "AnthropicError"

    def _request(
        self,
        system: str,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        takes_images: bool,
    ) -> Json:
        request: Json = {
            "model": self.name,
            "max_tokens": _OUTPUT_MAX,
            "messages": encode_messages(messages, takes_images),
            "extra_body": self._options,
        }
        if system:
            request["system"] = sanitize.plain(system)
        if tools:
            request["tools"] = schema_formats.anthropic(tools)
        return request

    def _create(self, request: Json) -> Awaitable[Any]:
        created: Awaitable[Any] = self._client.messages.create(**request)
        return created

    def _building(self) -> ResponseBuilder:
        return _Message()


# -- the request -----------------------------------------------------------------------------------


def encode_messages(messages: Sequence[Message], takes_images: bool) -> list[Json]:
    """Return the messages of a request, alternating between user and assistant. All results of an
    answer are at the beginning of the message that follows it."""
    written: list[Json] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message, takes_images)
        if written and written[-1]["role"] == role:
            written[-1]["content"] += blocks
        elif blocks:
            written.append({"role": role, "content": blocks})
    for entry in written:
        entry["content"].sort(key=lambda block: block["type"] != "tool_result")
    return written


def _blocks(message: Message, takes_images: bool) -> list[Json]:
    """Return the content blocks of a message. An empty answer has none, because the API refuses an
    empty text."""
    text, images = sanitize.images(message, takes_images)
    texts = [{"type": "text", "text": text}] if text.strip() else []
    match message.role:
        case "assistant":
            return texts + [_call(call) for call in message.tool_calls]
        case "tool":
            return _result(message, texts, images)
    return [*texts, *map(_image, images)] or [{"type": "text", "text": "[nothing]"}]


def _result(message: Message, texts: list[Json], images: Sequence[Image]) -> list[Json]:
    """Place the images of an error after the result: an error may only contain text."""
    shown = [_image(image) for image in images]
    inside, after = (texts, shown) if message.is_error else (texts + shown, [])
    result = {
        "type": "tool_result",
        "tool_use_id": message.tool_call_id,
        "content": inside,
        "is_error": message.is_error,
    }
    return [result, *after]


def _call(call: ToolCall) -> Json:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": sanitize.tool_name(call),
        "input": sanitize.arguments(call),
    }


def _image(image: Image) -> Json:
    source = {"type": "base64", "media_type": image.media_type, "data": image.data}
    return {"type": "image", "source": source}


# -- the answer ------------------------------------------------------------------------------------


class _TokenCounts(msgspec.Struct):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None


class _Block(msgspec.Struct):
    """`text` belongs to a text block, the other fields to a call. Blocks of other types are
    ignored."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None


class _Whole(msgspec.Struct):
    content: list[_Block]
    stop_reason: str | None = None
    usage: _TokenCounts | None = None


class _Delta(msgspec.Struct):
    text: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _Start(msgspec.Struct):
    usage: _TokenCounts | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Start | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _TokenCounts | None = None


class _PartialCall(Struct):
    """A call, as far as it has arrived. `whole` is its input if that arrived at once."""

    id: str
    name: str
    whole: Any
    pieces: list[str] = field(default_factory=list)

    def call(self) -> ToolCall:
        fields = {} if self.whole is None else self.whole
        written = "".join(self.pieces) or msgspec.json.encode(fields).decode()
        return ToolCall(self.id, self.name, written)


class _Message(ResponseBuilder):
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: dict[int, _PartialCall] = {}
        self._stop_reason: str | None = None
        self._input_tokens = 0
        self._output_tokens = 0

    def whole(self, answer: object) -> None:
        message = read(answer, _Whole)
        for index, block in enumerate(message.content):
            self._start(index, block)
        self._stop_reason = message.stop_reason
        self._count(message.usage)

    def add(self, piece: object) -> Sequence[str]:
        before, event = len(self._texts), read(piece, _Event)
        self._count(event.usage)
        if event.message is not None:
            self._count(event.message.usage)
        if event.content_block is not None:
            self._start(event.index, event.content_block)
        if event.delta is not None:
            self._continue(event.index, event.delta)
        return self._texts[before:]

    @property
    def is_complete(self) -> bool:
        return self._stop_reason is not None

    def response(self) -> Response:
        calls = tuple(call.call() for call in self._calls.values())
        stop = _STOPS.get(self._stop_reason or "", "tools" if calls else "end")
        usage = TokenUsage(self._input_tokens, self._output_tokens)
        return Response("".join(self._texts), calls, usage, stop)

    def _start(self, index: int, block: _Block) -> None:
        if block.type == "tool_use":
            self._calls[index] = _PartialCall(block.id or "", block.name or "", block.input)
        elif block.type == "text" and block.text:
            self._texts.append(block.text)

    def _continue(self, index: int, delta: _Delta) -> None:
        self._stop_reason = delta.stop_reason or self._stop_reason
        if delta.partial_json and index in self._calls:
            self._calls[index].pieces.append(delta.partial_json)
        if delta.text:
            self._texts.append(delta.text)

    def _count(self, counts: _TokenCounts | None) -> None:
        """Update the token counts. The counts of an event are totals of the answer so far. A
        missing count is unchanged."""
        if counts is None:
            return
        inputs = (
            counts.input_tokens,
            counts.cache_creation_input_tokens,
            counts.cache_read_input_tokens,
        )
        if counts.input_tokens is not None:
            self._input_tokens = sum(filter(None, inputs))
        if counts.output_tokens is not None:
            self._output_tokens = counts.output_tokens
