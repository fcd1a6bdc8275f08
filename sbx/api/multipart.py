"""Multipart bodies, read as they arrive, without a copy in memory or on disk.

    socket → request.stream() → python-multipart's parser → Form → FormPart → the route

A part begins before its bytes have arrived, and the next piece is read only after the last one was
taken, so a body of any size needs the memory of one piece. `FormLimits` bounds everything that a
sender chooses, and a body that ends too early is refused.
"""

import re
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_to_bytes

from fastapi import Request
from msgspec import Struct, field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from sbx.aio import in_thread
from sbx.errors import BadRequest, SbxError, TooLarge
from sbx.workspace.errors import too_large, translated

_PIECE = 256 * 1024  # bytes
# A parameter of Content-Disposition. A backslash is kept unless it escapes: a name that came from
# Windows is refused later, and never silently cut.
_PARAMETER = re.compile(r';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^;"\s]*))')
_ESCAPED = re.compile(r'\\(["\\])')


class FormLimits(Struct, frozen=True):
    """The limits of one body: its parts, bytes of the headers of a part, bytes of a text field."""

    parts: int = 32
    header_bytes: int = 8 * 1024
    field_bytes: int = 64 * 1024


class _Head(Struct):
    """The headers of a part, from the parser piece by piece."""

    size: int = 0
    name: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)


class _PartEnd:
    """The mark between two parts."""


_PART_END = _PartEnd()


class FormPart:
    """One part of a form. `filename` is None for a text field.

    Bytes of a name that are not UTF-8 become lone surrogates. Routes check names.
    """

    def __init__(self, form: "Form", headers: dict[str, str]) -> None:
        self._form = form
        self._over = False
        self._begun = False
        parameters = _disposition(headers.get("content-disposition", ""))
        self.name = parameters["name"]
        self.filename = parameters.get("filename", parameters.get("filename*"))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield its bytes. Call this before the next part."""
        self._begun = True
        while not self._over:
            event = await self._form.next_event()
            if isinstance(event, bytes):
                yield event
            else:
                self._over = True

    async def text(self) -> str:
        """Return the text of a field. Raise TooLarge `field_too_large`, BadRequest if not UTF-8."""
        limit = self._form.limits.field_bytes
        value = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                value += chunk
                if len(value) > limit:
                    raise TooLarge(
                        f"a form field is larger than {limit} bytes",
                        code="field_too_large",
                        details={"limit": limit},
                    )
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _malformed("a form field is not UTF-8 text") from None

    async def skip(self) -> None:
        """Read to its end."""
        async with aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass


class Form:
    """The parts of a body, in their order: `async for part in form`. Made by `read_form`.

    Raise BadRequest `malformed_form`, `truncated_body`, `too_many_parts`.
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
        """Return the next headers, data or end of a part. Return None at the end of the body."""
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

    # The parser calls these methods while it parses a chunk.

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


_FORM_LIMITS = FormLimits()


def read_form(request: Request, limits: FormLimits = _FORM_LIMITS) -> Form:
    """Return the form in the body of `request`. Raise BadRequest `unsupported_media_type`."""
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


@asynccontextmanager
async def spool_to_disk(
    chunks: AsyncIterator[bytes], directory: Path | None, max_bytes: int | None
) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    """Store `chunks` in a file without a name, and yield them again: for clients that send the file
    before the fields with its place.

    `directory` is on the disk of the final place. Nothing is left, in any case. Raise TooLarge
    `file_too_large`, Unavailable `no_space`.
    """
    with ExitStack() as stack:
        with translated("the upload"):
            file = await in_thread(lambda: stack.enter_context(_unnamed_file(directory)))

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


class FileForm:
    """A form with one file, as `file`, and one field with its path, in any order."""

    def __init__(self, request: Request, path_field: str) -> None:
        self._form = aiter(read_form(request))
        self._field = path_field
        self.path: str | None = None

    @asynccontextmanager
    async def read(
        self, directory: Path | None, max_bytes: int | None
    ) -> AsyncIterator[tuple[str, AsyncIterator[bytes]]]:
        """Yield the path, and the bytes of the file: from a temporary file in `directory` if the
        path comes last. Raise BadRequest, and as `spool_to_disk`."""
        async with aclosing(self._form):
            content = self._then_rest(await self._file())
            if self.path is not None:
                yield self.path, content
                return
            async with spool_to_disk(content, directory, max_bytes) as again:
                if self.path is None:
                    raise self._incomplete(self._field)
                yield self.path, again

    async def _file(self) -> FormPart:
        async for part in self._form:
            if part.filename is not None and part.name == "file":
                return part
            await self._keep(part)
        raise self._incomplete("file")

    async def _then_rest(self, file: FormPart) -> AsyncIterator[bytes]:
        """Yield the file, then read the rest of the form: a form that is cut off stores nothing."""
        async for chunk in file.chunks():
            yield chunk
        async for part in self._form:
            await self._keep(part)

    async def _keep(self, part: FormPart) -> None:
        """Raise BadRequest for a second file or path, which would be ambiguous."""
        if part.name not in (self._field, "file"):
            await part.skip()
        elif self.path is not None or part.name == "file":
            raise BadRequest(f"the form needs exactly one {part.name}")
        else:
            self.path = await part.text()

    def _incomplete(self, name: str) -> SbxError:
        return BadRequest(f"the form has no {name}", hint=f"send the fields {self._field} and file")


def _unnamed_file(directory: Path | None) -> FileIO:
    """Return a file without a directory entry, which disappears with the process in any case."""
    return tempfile.TemporaryFile(dir=directory, buffering=0)  # the caller closes it


def _disposition(header: str) -> dict[str, str]:
    """Return the parameters of the Content-Disposition of a part, which must name it."""
    kind, separator, _ = header.partition(";")
    rest = header[len(kind) :]
    parameters: dict[str, str] = {}
    position = 0
    while separator and (match := _PARAMETER.match(rest, position)) is not None:
        position = match.end()
        name = match[1].lower()
        if name in parameters:
            raise _malformed("a part of the form has the same parameter twice")
        parameters[name] = match[3] if match[2] is None else _ESCAPED.sub(r"\1", match[2])
    if (
        rest[position:].strip(" \t;")
        or kind.strip().lower() != "form-data"
        or "name" not in parameters
    ):
        raise _malformed("a part of the form does not have a name as in RFC 7578")
    if "filename*" in parameters:
        parameters["filename*"] = _extended(parameters["filename*"])
    return parameters


def _extended(value: str) -> str:
    """Return the text of a parameter in the form of RFC 5987, which some clients use for names."""
    charset, _, rest = value.partition("'")
    _, separator, quoted = rest.partition("'")
    if not separator or charset.lower() not in ("utf-8", "us-ascii"):
        raise _malformed("the extended name of a file is not in UTF-8")
    return unquote_to_bytes(quoted).decode("utf-8", "surrogateescape")


def _malformed(message: str) -> SbxError:
    return BadRequest(
        message,
        code="malformed_form",
        hint="send it as in RFC 7578: curl -F file=@data.csv",
    )


def _truncated() -> SbxError:
    return BadRequest(
        "the body ended before the form did",
        code="truncated_body",
        hint="send all of it; nothing of it was stored",
    )
