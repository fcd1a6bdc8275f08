"""What every dialect has to mind when it tells a history: no word in it may make a provider refuse
the whole request, for then the conversation could not go on."""

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
    """Without lone surrogates, which no JSON can carry."""
    return text.encode(errors="replace").decode()


def tool_name(call: ToolCall) -> str:
    """Models call tools by names that no definition may have; those are told back mended."""
    return _UNFIT.sub("_", call.name)[:_NAME_MAX] or "unnamed"


def arguments(call: ToolCall) -> Mapping[str, Any]:
    """The arguments as an object, in which what is none is named as malformed."""
    text = plain(call.arguments)
    if not text.strip():
        return {}
    try:
        told = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {"malformed": text}
    return told if isinstance(told, dict) else {"malformed": text}


def images(message: Message, taken: bool) -> tuple[str, Sequence[Image]]:
    """The text of a message, and its images that the model takes; the text tells of all others."""
    fit = [image for image in message.images if taken and _is_fit(image)]
    text = plain(message.content)
    if left_out := len(message.images) - len(fit):
        text += f"\n[images left out, which this model does not take: {left_out}]"
    return text.strip("\n") if left_out else text, fit


def _is_fit(image: Image) -> bool:
    return image.media_type in _IMAGE_TYPES and len(image.data) <= _IMAGE_MAX
