"""Pictures that a run showed: kept as files, and given to the model as what it can look at.

The bytes come from inside. A provider that is sent something else than the picture it was promised
refuses the whole conversation from then on, so only what is surely one, and of a size that
providers take, goes to the model; the rest is in its file.
"""

import base64
import binascii
import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sbx.agent.messages import Image
from sbx.agent.tools.results import keep
from sbx.agent.tools.tool import Call
from sbx.errors import SbxError
from sbx.protocol.bundles import text_of
from sbx.protocol.runs import MimeBundle
from sbx.telemetry.host_paths import without_host_paths

_SUFFIXES = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
    "application/pdf": "pdf",
}
_FILES_MAX = 20
_IMAGES_MAX = 8
_IMAGE_MAX = 3_750_000  # bytes; 5 MB of base64 is what providers take
_IMAGES_SIZE_MAX = 6 << 20  # bytes, of all of one call: a message has to be stored
_SIDE_MAX = 8000  # pixels
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_NO_SIZE = frozenset((0xC4, 0xC8, 0xCC))  # JPEG: tables among the markers of frames


@dataclass(frozen=True, slots=True)
class Figure:
    media_type: str
    content: bytes


def figures(outputs: Iterable[MimeBundle]) -> Iterator[Figure]:
    """One of each bundle that has any: what models can look at first."""
    for bundle in outputs:
        for media_type in _SUFFIXES:
            if (content := _content(media_type, text_of(bundle, media_type))) is not None:
                yield Figure(media_type, content)
                break


async def kept(call: Call, shown: Iterable[Figure]) -> tuple[list[str], tuple[Image, ...]]:
    """A line for each figure with where it is, and those that a model can look at."""
    lines: list[str] = []
    images: list[Image] = []
    room = _IMAGES_SIZE_MAX
    digest = hashlib.sha256(call.id.encode(errors="replace")).hexdigest()[:12]
    for number, figure in enumerate(shown, 1):
        if number > _FILES_MAX:
            lines.append(f"further figures were not kept: {_FILES_MAX} is the most of one run")
            break
        name = f"figure-{digest}-{number}.{_SUFFIXES[figure.media_type]}"
        size = len(figure.content)
        try:
            path = await keep(call.sandbox, name, figure.content)
        except SbxError as error:
            path = f"could not be kept in a file ({without_host_paths(error)['message']:.200})"
        lines.append(f"{path} ({figure.media_type}, {size} bytes)")
        if len(images) < _IMAGES_MAX and size <= min(room, _IMAGE_MAX) and can_be_shown(figure):
            room -= size
            images.append(Image(figure.media_type, base64.b64encode(figure.content).decode()))
    return lines, tuple(images)


def can_be_shown(figure: Figure) -> bool:
    """Whether it is a whole PNG or JPEG of a size that providers take."""
    match figure.media_type:
        case "image/png":
            size = _png_size(figure.content)
        case "image/jpeg":
            size = _jpeg_size(figure.content)
        case _:
            return False
    return size is not None and all(0 < side <= _SIDE_MAX for side in size)


def _content(media_type: str, value: str | None) -> bytes | None:
    if not value:
        return None
    if media_type == "image/svg+xml":
        return value.encode(errors="replace")
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _png_size(content: bytes) -> tuple[int, ...] | None:
    whole = content.startswith(_PNG) and content.endswith(_PNG_END) and len(content) > 45
    return struct.unpack_from(">II", content, 16) if whole and content[12:16] == b"IHDR" else None


def _jpeg_size(content: bytes) -> tuple[int, ...] | None:
    """By the header of its first frame; None where it is cut off or none is found."""
    if not (content.startswith(b"\xff\xd8\xff") and content.rstrip(b"\0").endswith(b"\xff\xd9")):
        return None
    at = 2
    while at + 9 <= len(content) and content[at] == 0xFF:
        marker, length = struct.unpack_from(">BH", content, at + 1)
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            return struct.unpack_from(">HH", content, at + 5)
        if length < 2:
            return None
        at += 2 + length
    return None
