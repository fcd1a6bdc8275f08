"""What a conversation with a model consists of, in no dialect of any provider."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["user", "assistant", "tool", "summary"]
Stop = Literal["end", "tools", "length", "refusal"]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture as base64 text, for models that take them."""

    media_type: str
    data: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: `arguments` is JSON text, and may be no JSON at all. `id` is
    ours, unique for good: providers repeat theirs between conversations."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `tool` answers one call, and follows the `assistant` message that made it;
    `summary` stands for what a model was told before, and is told to it as a user's."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens

    def to_dict(self) -> dict[str, int]:
        return {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}


@dataclass(frozen=True, slots=True)
class Response:
    """One answer of a model. `refusal`: it would not; `length`: it was cut off."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    stop: Stop = "end"

    def message(self) -> Message:
        return Message("assistant", self.content, tool_calls=self.tool_calls)


def carried(text: str) -> str:
    """The text, as stores, pages and providers take it: what UTF-8 cannot carry is replaced, and
    NUL is written out, for some take it for the end."""
    return text.encode(errors="replace").decode().replace("\0", "\\x00")


def carried_call(call: ToolCall) -> ToolCall:
    """Half a character in its arguments becomes its escape in JSON, by which they are refused: what
    was meant is not guessed."""
    arguments = call.arguments.encode(errors="backslashreplace").decode()
    return replace(call, name=carried(call.name), arguments=arguments)


def to_json(message: Message) -> dict[str, Any]:
    """As histories are stored, listed and exported; what is empty is left out."""
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            told[key] = value
    if message.is_error:
        told["is_error"] = True
    if message.images:
        told["images"] = [
            {"media_type": image.media_type, "data": image.data} for image in message.images
        ]
    return told


def from_json(told: Mapping[str, Any]) -> Message:
    """The message again. Raises ValueError for what is none; unknown fields are left aside."""
    try:
        message = Message(
            role=told["role"],
            content=told["content"],
            tool_calls=tuple(
                ToolCall(call["id"], call["name"], call["arguments"])
                for call in told.get("tool_calls", ())
            ),
            tool_call_id=told.get("tool_call_id"),
            name=told.get("name"),
            is_error=told.get("is_error", False),
            images=tuple(
                Image(image["media_type"], image["data"]) for image in told.get("images", ())
            ),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a message lacks or garbles {error}") from None
    texts = (
        message.content,
        *(text for call in message.tool_calls for text in (call.id, call.name, call.arguments)),
        *(text for image in message.images for text in (image.media_type, image.data)),
    )
    if message.role not in ("user", "assistant", "tool", "summary") or not all(
        isinstance(text, str) for text in texts
    ):
        raise ValueError("a message has a role and text")
    named = all(one is None or isinstance(one, str) for one in (message.name, message.tool_call_id))
    if not named or not isinstance(message.is_error, bool):
        raise ValueError("its name is text, and is_error is true or false")
    if (message.role == "tool") != isinstance(message.tool_call_id, str):
        raise ValueError("a message of a tool, and no other, names the call it answers")
    return message


def without_images(message: Message) -> Message:
    return replace(message, images=()) if message.images else message
