"""Images that a run showed. They are stored as files, and the model receives those that it can
view.

The content comes from inside. If a provider receives anything but a valid image, it refuses all
further requests of the conversation. So the model receives only data that is certainly an image of
an accepted size. The other figures are only in their files.
"""

import base64
import binascii
import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from sbx.agent.messages import Image, carried
from sbx.agent.tools.results import keep
from sbx.agent.tools.tool import ToolCallRequest
from sbx.errors import SbxError
from sbx.protocol.agent import Json
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
_SHOWN_TYPES = ("text/plain", "text/html", "text/markdown", "text/latex", "application/json")
_SHOWN_MAX = 256 << 10
_INLINE_MAX = 48 << 10  # bytes
_ALT_MAX = 200
_FILES_MAX = 20
_IMAGES_MAX = 8
_IMAGE_MAX = 3_750_000  # bytes; providers accept 5 MB of base64
_IMAGES_SIZE_MAX = 6 << 20  # bytes per call: the message has to be stored
_SIDE_MAX = 8000  # pixels
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_NO_SIZE = frozenset((0xC4, 0xC8, 0xCC))  # JPEG: markers of tables in the range of frame markers


class Figure(Struct, frozen=True):
    media_type: str
    content: bytes


def figures(outputs: Iterable[MimeBundle]) -> Iterator[Figure]:
    """Yield one figure of each bundle that has any, preferring types that models can view."""
    for bundle in outputs:
        for media_type in _SUFFIXES:
            if (content := _content(media_type, text_of(bundle, media_type))) is not None:
                yield Figure(media_type, content)
                break


async def kept(
    call: ToolCallRequest, shown: Iterable[Figure]
) -> tuple[list[str], tuple[Image, ...], list[Json]]:
    """Store the figures. Return a line with the path of each figure, the images for the model, and
    the files of the figures in their order: path, media_type, size."""
    lines: list[str] = []
    files: list[Json] = []
    images: list[Image] = []
    room = _IMAGES_SIZE_MAX
    digest = hashlib.sha256(call.id.encode(errors="replace")).hexdigest()[:12]
    for number, figure in enumerate(shown, 1):
        if number > _FILES_MAX:
            lines.append(f"further figures were not kept: {_FILES_MAX} is the limit of one run")
            break
        name = f"figure-{digest}-{number}.{_SUFFIXES[figure.media_type]}"
        size = len(figure.content)
        try:
            path = await keep(call.sandbox, name, figure.content)
        except SbxError as error:
            path = f"could not be kept in a file ({without_host_paths(error)['message']:.200})"
        else:
            files.append(_file(path, figure))
        lines.append(f"{path} ({figure.media_type}, {size} bytes)")
        if len(images) < _IMAGES_MAX and size <= min(room, _IMAGE_MAX) and can_be_shown(figure):
            room -= size
            images.append(Image(figure.media_type, base64.b64encode(figure.content).decode()))
        if len(files) < number:
            files.append({})
    return lines, tuple(images), files


def _file(path: str, figure: Figure) -> Json:
    """Return the file of a figure. A small one has its content as `data`, in base64: people cannot
    read the files that the sandbox of a project keeps."""
    file: Json = {"path": path, "media_type": figure.media_type, "size": len(figure.content)}
    if len(figure.content) <= _INLINE_MAX:
        file["data"] = base64.b64encode(figure.content).decode()
    return file


def shown_outputs(bundles: Sequence[MimeBundle], files: Sequence[Json]) -> tuple[Json, ...]:
    """Return the bundles of a run for a person, at most _SHOWN_MAX characters of text in all. A
    figure is the file that keeps it, with an `alt`. A last `{"truncated": true}` stands for the
    rest."""
    shown: list[Json] = []
    room, kept_files = _SHOWN_MAX, iter(files)
    for bundle in bundles:
        entry: Json = {}
        for media_type in _SHOWN_TYPES:
            if (text := text_of(bundle, media_type)) is not None:
                entry[media_type] = carried(text)
        if next(figures([bundle]), None) is not None and (file := next(kept_files, None)):
            alt = entry.get("text/plain", "")[:_ALT_MAX]
            entry[file["media_type"]] = {**file, "alt": alt}
            room -= len(file.get("data", ""))
        room -= sum(len(text) for text in entry.values() if isinstance(text, str))
        if room < 0:
            return (*shown, {"truncated": True})
        if entry:
            shown.append(entry)
    return tuple(shown)


def can_be_shown(figure: Figure) -> bool:
    """Return whether the figure is a complete PNG or JPEG of a size that providers accept."""
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
    is_complete = content.startswith(_PNG) and content.endswith(_PNG_END) and len(content) > 45
    return (
        struct.unpack_from(">II", content, 16)
        if is_complete and content[12:16] == b"IHDR"
        else None
    )


def _jpeg_size(content: bytes) -> tuple[int, ...] | None:
    """Return the size in the header of the first frame. Return None if the image is cut off or has
    no frame."""
    if not (content.startswith(b"\xff\xd8\xff") and content.rstrip(b"\0").endswith(b"\xff\xd9")):
        return None
    offset = 2
    while offset + 9 <= len(content) and content[offset] == 0xFF:
        marker, length = struct.unpack_from(">BH", content, offset + 1)
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            return struct.unpack_from(">HH", content, offset + 5)
        if length < 2:
            return None
        offset += 2 + length
    return None
