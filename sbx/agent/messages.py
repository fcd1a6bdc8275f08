"""The messages of a conversation with a model, independent of any provider."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

Role = Literal["user", "assistant", "tool", "summary"]
Stop = Literal["end", "tools", "length", "refusal"]


class Image(Struct, frozen=True):
    """A picture as base64 text, for models that take them."""

    media_type: str
    data: str


class ToolCall(Struct, frozen=True):
    """A call as the model wrote it. `arguments` is JSON text that may be invalid. `id` is generated
    by sbx and globally unique, because providers repeat their ids between conversations."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True):
    """One message. A `tool` message answers one call and follows the `assistant` message that made
    it. A `summary` replaces earlier messages, and the model receives it as a user message."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False
    images: tuple[Image, ...] = ()
    outputs: tuple[dict[str, Any], ...] = ()  # for people: a model does not receive them
    error: dict[str, Any] | None = None


class TokenUsage(Struct, frozen=True):
    """Tokens."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens

    def to_dict(self) -> dict[str, int]:
        return {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}


class Price(Struct, frozen=True):
    """The prices of a million tokens."""

    input: float
    output: float

    def of(self, usage: TokenUsage) -> float:
        return (usage.input_tokens * self.input + usage.output_tokens * self.output) / 1e6


class Response(Struct, frozen=True):
    """One answer of a model. `refusal`: the model refused to answer. `length`: the answer was cut
    off."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    stop: Stop = "end"

    def message(self) -> Message:
        return Message("assistant", self.content, tool_calls=self.tool_calls)


def carried(text: str) -> str:
    """Return the text in a form that stores, pages and providers accept. Characters that UTF-8
    cannot encode are replaced. NUL is escaped, because some software treats it as the end of the
    text."""
    return text.encode(errors="replace").decode().replace("\0", "\\x00")


def carried_call(call: ToolCall) -> ToolCall:
    """Escape lone surrogates in the arguments, so that the call is refused. The intended character
    is not guessed."""
    arguments = call.arguments.encode(errors="backslashreplace").decode()
    return replace(call, name=carried(call.name), arguments=arguments)


def to_json(message: Message) -> dict[str, Any]:
    """Return the form in which histories are stored, listed and exported. Empty fields are
    omitted."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            fields[key] = value
    if message.is_error:
        fields["is_error"] = True
    if message.images:
        fields["images"] = [
            {"media_type": image.media_type, "data": image.data} for image in message.images
        ]
    if message.outputs:
        fields["outputs"] = list(message.outputs)
    if message.error is not None:
        fields["error"] = message.error
    return fields


def from_json(fields: Mapping[str, Any]) -> Message:
    """Return the message. Raise ValueError for an invalid message; ignore unknown fields."""
    try:
        message = Message(
            role=fields["role"],
            content=fields["content"],
            tool_calls=tuple(
                ToolCall(call["id"], call["name"], call["arguments"])
                for call in fields.get("tool_calls", ())
            ),
            tool_call_id=fields.get("tool_call_id"),
            name=fields.get("name"),
            is_error=fields.get("is_error", False),
            images=tuple(
                Image(image["media_type"], image["data"]) for image in fields.get("images", ())
            ),
            outputs=tuple(dict(each) for each in fields.get("outputs", ())),
            error=dict(fields["error"]) if fields.get("error") is not None else None,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"a field of a message is missing or invalid: {error}") from None
    texts = (
        message.content,
        *(text for call in message.tool_calls for text in (call.id, call.name, call.arguments)),
        *(text for image in message.images for text in (image.media_type, image.data)),
    )
    if message.role not in ("user", "assistant", "tool", "summary") or not all(
        isinstance(text, str) for text in texts
    ):
        raise ValueError("a message must have a valid role and text")
    named = all(
        text_or_none is None or isinstance(text_or_none, str)
        for text_or_none in (message.name, message.tool_call_id)
    )
    if not named or not isinstance(message.is_error, bool):
        raise ValueError("its name must be text, and is_error true or false")
    if (message.role == "tool") != isinstance(message.tool_call_id, str):
        raise ValueError("a tool message, and no other, must have a tool_call_id")
    return message


def without_images(message: Message) -> Message:
    return replace(message, images=()) if message.images else message
