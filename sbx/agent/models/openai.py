"""All servers of the chat completions API by the openai SDK: OpenAI, DeepSeek, vLLM, Ollama.

These servers omit different fields. So no field of an answer is required, and only a wrong type is
an error.
"""

from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from sbx.agent.messages import Image, Message, Response, Stop, TokenUsage, ToolCall
from sbx.agent.models import sanitize
from sbx.agent.models.failures import bad_answer
from sbx.agent.models.sdk_model import ResponseBuilder, SdkModel, read
from sbx.agent.tools import schema_formats
from sbx.agent.tools.tool import ToolDefinition

Json = dict[str, Any]


class OpenAIModel(SdkModel):
    """A model behind the chat completions API of OpenAI or another server; see SdkModel."""

    sdk, client, error = "openai", "AsyncOpenAI", "OpenAIError"

    def _request(
        self,
        system: str,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        takes_images: bool,
    ) -> Json:
        # The SDK takes 150 µs of the event loop for each message, and sends those in `extra_body`
        # unchanged.
        written = encode_messages(system, messages, takes_images)
        request: Json = {
            "model": self.name,
            "messages": (),
            "extra_body": {"messages": written, **self._options},
        }
        if tools:
            request["tools"] = schema_formats.openai(tools)
        return request

    def _create(self, request: Json) -> Awaitable[Any]:
        if request["stream"]:
            request = {**request, "stream_options": {"include_usage": True}}
        created: Awaitable[Any] = self._client.chat.completions.create(**request)
        return created

    def _building(self) -> ResponseBuilder:
        return _Completion()


# -- the request -----------------------------------------------------------------------------------


def encode_messages(system: str, messages: Sequence[Message], takes_images: bool) -> list[Json]:
    """Return the messages of a request. A tool message cannot contain images. So the images of tool
    results are in a user message after all results of the same answer."""
    written: list[Json] = [{"role": "system", "content": sanitize.plain(system)}] if system else []
    shown: list[Image] = []
    for message in messages:
        if message.role != "tool" and shown:
            written.append(_user("[images of the results above]", shown))
            shown = []
        text, images = sanitize.images(message, takes_images)
        match message.role:
            case "user" | "summary":
                written.append(_user(text, images))
            case "assistant":
                written += _assistant(message, text)
            case "tool":
                written.append(_result(message, text))
                shown += images
    return written + ([_user("[images of the results above]", shown)] if shown else [])


def _user(text: str, images: Sequence[Image]) -> Json:
    if not images:
        return {"role": "user", "content": text or "[nothing]"}
    parts: list[Json] = [{"type": "text", "text": text}] if text else []
    for image in images:
        url = f"data:{image.media_type};base64,{image.data}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": parts}


def _assistant(message: Message, text: str) -> Iterator[Json]:
    """Omit an empty answer: many servers refuse a history that has one."""
    if message.tool_calls:
        calls = [_call(call) for call in message.tool_calls]
        yield {"role": "assistant", "content": text or None, "tool_calls": calls}
    elif text:
        yield {"role": "assistant", "content": text}


def _call(call: ToolCall) -> Json:
    """Return the arguments as the model wrote them if they are an object. Some servers parse the
    arguments and fail on anything else."""
    parsed = sanitize.arguments(call)
    written = sanitize.plain(call.arguments)
    is_valid = written.strip() and "malformed" not in parsed
    text = written if is_valid else msgspec.json.encode(parsed).decode()
    function = {"name": sanitize.tool_name(call), "arguments": text}
    return {"id": call.id, "type": "function", "function": function}


def _result(message: Message, text: str) -> Json:
    is_plain = message.is_error and not text.lower().startswith("error")
    content = f"Error: {text}" if is_plain else text  # the API has no field for errors
    return {"role": "tool", "tool_call_id": message.tool_call_id, "content": content}


# -- the answer ------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Content(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Content | None = None
    delta: _Content | None = None
    finish_reason: str | None = None


class _TokenCounts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _TokenCounts | None = None


class _PartialCall(Struct):
    """A call, as far as it has arrived."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def call(self) -> ToolCall:
        return ToolCall(self.id, self.name, "".join(self.arguments))


class _Completion(ResponseBuilder):
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: list[_PartialCall] = []
        self._by_index: dict[int, _PartialCall] = {}
        self._refused = False
        self._finish: str | None = None
        self._usage = TokenUsage()

    def whole(self, answer: object) -> None:
        message = read(answer, _Answer)
        if not message.choices or message.choices[0].message is None:
            raise bad_answer("it contains no choice")
        self._take(message)

    def add(self, piece: object) -> Sequence[str]:
        before = len(self._texts)
        self._take(read(piece, _Answer))
        return self._texts[before:]

    @property
    def is_complete(self) -> bool:
        return self._finish is not None

    def response(self) -> Response:
        calls = tuple(call.call() for call in self._calls)
        return Response("".join(self._texts), calls, self._usage, self._stop())

    def _stop(self) -> Stop:
        if self._refused or self._finish == "content_filter":
            return "refusal"
        if self._finish == "length":
            return "length"
        return "tools" if self._calls else "end"

    def _take(self, answer: _Answer) -> None:
        if answer.usage is not None:
            self._usage = TokenUsage(
                answer.usage.prompt_tokens or 0, answer.usage.completion_tokens or 0
            )
        for choice in (answer.choices or ())[:1]:
            self._finish = choice.finish_reason or self._finish
            content = choice.message or choice.delta or _Content()
            if content.refusal:
                self._refused = True
            for position, call in enumerate(content.tool_calls or ()):
                self._take_call(call, position)
            self._texts += filter(None, (content.content, content.refusal))

    def _take_call(self, piece: _Call, position: int) -> None:
        """Add a piece of a call. Only the first piece of a call has its id. Some servers do not
        number the calls, or use the same number for all: another id means another call."""
        index = piece.index if piece.index is not None else position
        call = self._by_index.get(index)
        if call is None or (piece.id and call.id and piece.id != call.id):
            call = self._by_index[index] = _PartialCall()
            self._calls.append(call)
        call.id = piece.id or call.id
        if (function := piece.function) is None:
            return
        call.name = call.name or function.name or ""
        arguments = function.arguments or ""
        call.arguments.append(
            arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        )
