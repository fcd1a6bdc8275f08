"""Rules for all dialects: a message must not make a provider refuse the whole request, because then
the conversation could not continue."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sbx.agent.messages import Image, Message, ToolCall

_NAME_MAX = 64
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]")
_IMAGE_TYPES = frozenset(("image/png", "image/jpeg", "image/gif", "image/webp"))
_IMAGE_MAX = 5 * 1024 * 1024  # characters of base64; the smallest limit of the providers


def plain(text: str) -> str:
    """Return the text without lone surrogates, which JSON cannot carry."""
    return text.encode(errors="replace").decode()


def tool_name(call: ToolCall) -> str:
    """Return the name in a valid form: models call tools by names that no definition may have."""
    return _UNFIT.sub("_", call.name)[:_NAME_MAX] or "unnamed"


def arguments(call: ToolCall) -> Mapping[str, Any]:
    """Return the arguments as an object. Invalid arguments are in its field `malformed`."""
    text = plain(call.arguments)
    if not text.strip():
        return {}
    try:
        fields = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {"malformed": text}
    return fields if isinstance(fields, dict) else {"malformed": text}


def images(message: Message, taken: bool) -> tuple[str, Sequence[Image]]:
    """Return the text of a message, and the images that the model accepts. The text states how many
    images were left out."""
    fit = [image for image in message.images if taken and _is_fit(image)]
    text = plain(message.content)
    if left_out := len(message.images) - len(fit):
        text += f"\n[images left out, which this model does not take: {left_out}]"
    return text.strip("\n") if left_out else text, fit


def _is_fit(image: Image) -> bool:
    return image.media_type in _IMAGE_TYPES and len(image.data) <= _IMAGE_MAX
