"""Multipart bodies, read as they arrive: nothing is spooled, to memory or to disk.

    socket → request.stream() → python-multipart's parser → Form → Part → whoever stores it

A part is given while its bytes are still on their way, and the next piece is asked for only when
the last one was taken, so a body of any size needs the memory of one piece. Everything that a
sender chooses is bounded by `FormLimits`, and a body that ends too early is refused.
"""

import asyncio
import re
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_to_bytes
from weakref import WeakValueDictionary

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from sbx.aio import in_thread
from sbx.api.middleware import HURRY
from sbx.api.server.settings import ServiceSettings
from sbx.errors import BadRequest, SbxError, TooLarge, Unavailable
from sbx.service.auth import Caller
from sbx.workspace.errors import too_large, translated

_SLOT_WAIT_S = 30.0  # longer than a slow upload can keep a slot that others wait for
_PIECE = 256 * 1024  # bytes
# A parameter of Content-Disposition. A backslash is kept unless it escapes: a name that came from
# Windows is refused later, and never silently cut.
_PARAMETER = re.compile(r';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^;"\s]*))')
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True)
class FormLimits:
    """What one body may have: parts in all, bytes of a part's headers, bytes of a text field."""

    parts: int = 32
    header_bytes: int = 8 * 1024
    field_bytes: int = 64 * 1024


@dataclass(slots=True)
class _Head:
    """The headers of a part, as the parser tells them, piece by piece."""

    size: int = 0
    name: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)


class _PartEnd:
    """The mark between two parts."""


_PART_END = _PartEnd()


class FormPart:
    """One part of a form. `filename` is None for a text field.

    Names hold, as lone surrogates, bytes that are no UTF-8: whoever takes them checks them.
    """

    def __init__(self, form: "Form", headers: dict[str, str]) -> None:
        self._form = form
        self._over = False
        self._begun = False
        parameters = _disposition(headers.get("content-disposition", ""))
        self.name = parameters["name"]
        self.filename = parameters.get("filename", parameters.get("filename*"))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Its bytes; only until the next part is asked for."""
        self._begun = True
        while not self._over:
            event = await self._form.next_event()
            if isinstance(event, bytes):
                yield event
            else:
                self._over = True

    async def text(self) -> str:
        """The value of a field. Raises TooLarge `field_too_large`, BadRequest for no UTF-8."""
        most = self._form.limits.field_bytes
        held = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                held += chunk
                if len(held) > most:
                    raise TooLarge(
                        f"a form field is larger than {most} bytes",
                        code="field_too_large",
                        details={"limit": most},
                    )
        try:
            return held.decode()
        except UnicodeDecodeError:
            raise _malformed("a form field is not UTF-8 text") from None

    async def skip(self) -> None:
        """Read on to its end."""
        async with aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass


class Form:
    """The parts of a body, in their order: `async for part in form`. Made by `read_form`.

    Raises BadRequest `malformed_form`, `truncated_body`, `too_many_parts`.
    """

    def __init__(self, body: AsyncIterator[bytes], boundary: bytes, limits: FormLimits) -> None:
        self.limits = limits
        self._body = body
        self._events: deque[dict[str, str] | bytes | _PartEnd] = deque()
        self._head = _Head()
        self._parts = 0
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    async def __aiter__(self) -> AsyncGenerator[FormPart, None]:
        while (event := await self.next_event()) is not None:
            assert isinstance(event, dict)
            part = FormPart(self, event)
            yield part
            await part.skip()

    async def next_event(self) -> dict[str, str] | bytes | _PartEnd | None:
        """The next headers, piece of data or end of a part; None at the end of the body."""
        while not self._events:
            try:
                chunk = await anext(self._body, None)
            except ClientDisconnect:
                raise _truncated() from None
            if chunk is None:
                if not self._ended:
                    raise _truncated()
                return None
            if chunk and not self._ended:
                self._parse(chunk)
        return self._events.popleft()

    def _parse(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed(f"the form cannot be read: {error}") from None

    # What the parser calls, while it parses a chunk.

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > self.limits.parts:
            raise BadRequest(
                f"a form may have at most {self.limits.parts} parts",
                code="too_many_parts",
                hint="send the file and the fields of this route, and nothing else",
                details={"limit": self.limits.parts},
            )
        self._head = _Head()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._head.name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._head.value += data[start:end]

    def _on_header_end(self) -> None:
        head = self._head
        name = head.name.decode("ascii").lower()  # the parser takes token characters only
        if name in head.headers:
            raise _malformed("a part of the form has the same header twice")
        head.headers[name] = head.value.decode("utf-8", "surrogateescape")
        head.name, head.value = bytearray(), bytearray()

    def _on_headers_finished(self) -> None:
        self._events.append(self._head.headers)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])

    def _on_part_end(self) -> None:
        self._events.append(_PART_END)

    def _on_end(self) -> None:
        self._ended = True

    def _count_header(self, size: int) -> None:
        self._head.size += size
        if self._head.size > self.limits.header_bytes:
            raise BadRequest(
                f"the headers of a part are larger than {self.limits.header_bytes} bytes",
                code="headers_too_large",
                details={"limit": self.limits.header_bytes},
            )


def read_form(request: Request, limits: FormLimits = FormLimits()) -> Form:
    """The form in the body of `request`. Raises BadRequest `unsupported_media_type`."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest(
            "the body must be multipart/form-data, with a boundary",
            code="unsupported_media_type",
            hint="send it as a form, as in: curl -F file=@data.csv",
        )
    try:
        return Form(request.stream(), boundary, limits)
    except FormParserError as error:
        raise _malformed(f"the form cannot be read: {error}") from None


class UploadSlots:
    """How many uploads may be on their way at once, in all and for one owner; the others wait a
    moment for their turn. An owner waits for its own share first: its many do not fill the queue of
    all."""

    def __init__(self, most: int, per_owner: int, wait_s: float = _SLOT_WAIT_S) -> None:
        self._most = most
        self._per_owner = per_owner
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(most)
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting = 0

    def awaited(self) -> bool:
        """Whether an owner with a share left waits for a slot."""
        return self._waiting > 0

    @asynccontextmanager
    async def one(self, owner: str) -> AsyncIterator[None]:
        """For a caller who may upload: it is known what, and where to. Raises Unavailable
        `too_many_uploads`."""
        own = self._owners.get(owner)
        if own is None:
            own = self._owners[owner] = asyncio.Semaphore(self._per_owner)
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._wait_s):
                    await held.enter_async_context(own)
                    await self._enter(held)
            except TimeoutError:
                raise Unavailable(
                    f"{self._most} uploads are on their way already, or {self._per_owner} of yours",
                    code="too_many_uploads",
                    hint="try again when one of them has ended",
                    details={
                        "limit": self._most,
                        "limit_per_owner": self._per_owner,
                        "retry_after_s": 5,
                    },
                ) from None
            yield

    async def _enter(self, held: AsyncExitStack) -> None:
        self._waiting += 1
        try:
            await held.enter_async_context(self._free)
        finally:
            self._waiting -= 1


@asynccontextmanager
async def spool_to_disk(
    chunks: AsyncIterator[bytes], directory: Path | None, max_bytes: int | None
) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    """Keep `chunks` in a file without a name until it is known where they belong, and give them
    again: for senders that put the file before the fields that say whose it is.

    `directory` is on the disk that they end on. Nothing is left, however this ends. Raises TooLarge
    `file_too_large`, Unavailable `no_space`.
    """
    with ExitStack() as held:
        with translated("the upload"):
            file = await in_thread(lambda: held.enter_context(_without_name(directory)))

        def write(chunk: bytes) -> None:
            rest = memoryview(chunk)
            with translated("the upload"):
                while rest:
                    rest = rest[file.write(rest) :]

        async def again() -> AsyncGenerator[bytes, None]:
            await in_thread(file.seek, 0)
            while piece := await in_thread(file.read, _PIECE):
                yield piece

        size = 0
        async for chunk in chunks:
            size += len(chunk)
            if max_bytes is not None and size > max_bytes:
                raise too_large("the upload", max_bytes)
            await in_thread(write, chunk)
        yield again()


def slots(request: Request) -> UploadSlots:
    """The slots of the app."""
    state = request.app.state
    if not hasattr(state, "upload_slots"):
        settings: ServiceSettings = state.settings
        state.upload_slots = UploadSlots(settings.uploads_at_once, settings.uploads_per_owner)
    found: UploadSlots = state.upload_slots
    return found


@asynccontextmanager
async def slot(request: Request, caller: Caller) -> AsyncIterator[None]:
    """One of them, for the body of `request`: it must come faster while others wait. To be taken
    once it is known that the caller may send it. Raises as `UploadSlots.one`."""
    found = slots(request)
    async with found.one(caller.owner):
        request.scope["state"][HURRY] = found.awaited
        yield


def _without_name(directory: Path | None) -> FileIO:
    """A file in no directory: it is gone with the process, whatever becomes of that."""
    return tempfile.TemporaryFile(dir=directory, buffering=0)  # the caller's


def _disposition(header: str) -> dict[str, str]:
    """The parameters of a part's Content-Disposition, which must name it."""
    kind, separator, _ = header.partition(";")
    rest = header[len(kind) :]
    found: dict[str, str] = {}
    position = 0
    while separator and (match := _PARAMETER.match(rest, position)) is not None:
        position = match.end()
        name = match[1].lower()
        if name in found:
            raise _malformed("a part of the form has the same parameter twice")
        found[name] = match[3] if match[2] is None else _ESCAPED.sub(r"\1", match[2])
    if rest[position:].strip(" \t;") or kind.strip().lower() != "form-data" or "name" not in found:
        raise _malformed("a part of the form does not say its name as RFC 7578 wants")
    if "filename*" in found:
        found["filename*"] = _extended(found["filename*"])
    return found


def _extended(value: str) -> str:
    """The text of a parameter in RFC 5987's form, as some clients name files of other scripts."""
    charset, _, rest = value.partition("'")
    _, separator, quoted = rest.partition("'")
    if not separator or charset.lower() not in ("utf-8", "us-ascii"):
        raise _malformed("the extended name of a file is not in UTF-8")
    return unquote_to_bytes(quoted).decode("utf-8", "surrogateescape")


def _malformed(message: str) -> SbxError:
    return BadRequest(
        message,
        code="malformed_form",
        hint="send it as RFC 7578 says, as in: curl -F file=@data.csv",
    )


def _truncated() -> SbxError:
    return BadRequest(
        "the body ended before the form did",
        code="truncated_body",
        hint="send all of it; nothing of it was kept",
    )
