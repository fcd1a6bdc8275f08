"""/files: the content of files, in the workspace and outside of it, also at signed addresses."""

import asyncio
import posixpath
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sbx.api.auth import StackDep
from sbx.api.bodies import raw_body
from sbx.api.e2b import paths
from sbx.api.e2b.processes import USERS
from sbx.api.e2b.target import E2bTarget, TargetDep
from sbx.api.inner_contents import content_size, send_range
from sbx.api.inner_files import InnerFiles, is_in_workspace
from sbx.api.multipart import FormLimits, read_form
from sbx.api.slots import upload_slot
from sbx.api.surfaces import ENVD_PORT
from sbx.errors import BadRequest, Denied
from sbx.runtime.conversation import Conversation
from sbx.telemetry import metrics

router = APIRouter(prefix=f"/e2b/{ENVD_PORT}", include_in_schema=False)

_FORM = FormLimits(parts=4000)
_METADATA = "x-metadata-"
_METADATA_MAX = 64
_PIECE = 256 << 10  # bytes of unpacked content at a time
_UNPACKED_AT_ONCE = 64 << 10  # bytes of empty members take 3 ms of the event loop, 256 KiB 80 ms
_Path = Annotated[str | None, Query()]
_User = Annotated[str | None, Query()]


@router.get("/files")
@router.head("/files")
async def download(
    request: Request,
    target: TargetDep,
    stack: StackDep,
    path: Annotated[str, Query()],
    username: _User = None,
) -> Response:
    """Send a file, or a range of its bytes."""
    _check_user(username)
    where = paths.inside(paths.absolute(path))
    conversation = await stack.enter_async_context(target.use())
    size = await content_size(conversation, where)
    return send_range(request, stack, conversation, where, size)


@router.post("/files")
async def upload(
    request: Request, target: TargetDep, path: _Path = None, username: _User = None
) -> list[dict[str, Any]]:
    """Store one file at `path`, or several at the paths in the names of their parts. Return the
    entries in their order."""
    _check_user(username)
    metadata = _metadata(request)
    form = not request.headers.get("content-type", "").startswith("application/octet-stream")
    stored: dict[str, dict[str, Any]] = {}
    async with target.use() as conversation, upload_slot(request, target.caller):
        with metrics.uploading() as counted:
            counted.size = 0
            if form:
                contents = _parts(request, path)
            elif path is None:
                raise BadRequest("path is missing")
            else:
                contents = _octet_stream(request, path)
            async with aclosing(contents) as files:
                async for where, chunks in files:
                    if where in stored:
                        raise BadRequest(f"{where} comes twice")
                    counted.size += await _store(target, conversation, where, chunks, metadata)
                    stored[where] = _entry(where, metadata)
    if not stored:
        raise BadRequest("the form has no file")
    return list(stored.values())


_Files = AsyncGenerator[tuple[str, AsyncIterator[bytes]], None]


async def _parts(request: Request, path: str | None) -> _Files:
    async with aclosing(aiter(read_form(request, _FORM))) as form:
        async for part in form:
            if part.name == "file" and part.filename is not None:
                yield paths.absolute(path or _unescaped(part.filename)), part.chunks()


async def _octet_stream(request: Request, path: str) -> _Files:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip"):
        raise BadRequest(f"the encoding {encoding[:40]} is unknown; send gzip")
    body = raw_body(request)
    yield paths.absolute(path), _unzipped(body) if encoding == "gzip" else body


async def _unzipped(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the content in pieces of a bounded size, as a few bytes may unpack to gigabytes. The
    body has one or more members (RFC 1952, 2.2), as pigz and `cat a.gz b.gz` write them, and
    perhaps zeros after the last."""
    member = _member()
    try:
        async for chunk in body:
            for start in range(0, len(chunk), _UNPACKED_AT_ONCE):
                await asyncio.sleep(0)
                rest = chunk[start : start + _UNPACKED_AT_ONCE]
                while rest:
                    if member.eof:
                        rest = rest.lstrip(b"\0")
                        if not rest:
                            break
                        member = _member()
                    piece = member.decompress(rest, _PIECE)
                    rest = member.unconsumed_tail or member.unused_data
                    if piece:
                        yield piece
        if rest := member.flush():
            yield rest
    except zlib.error:
        raise BadRequest("the content is not gzip") from None
    if not member.eof:
        raise BadRequest("the content is cut off", code="truncated_body")


def _member() -> "zlib._Decompress":
    return zlib.decompressobj(zlib.MAX_WBITS | 16)


async def _store(
    target: E2bTarget,
    conversation: Conversation,
    path: str,
    chunks: AsyncIterator[bytes],
    metadata: dict[str, str],
) -> int:
    where, inner = paths.inside(path), InnerFiles(conversation)
    if is_in_workspace(where):
        size = await conversation.files.write_stream(where, chunks)
    else:
        size = await inner.write(where, chunks)
    if metadata:
        await inner.call({"act": "attributes", "path": where, "values": metadata})
    await target.record("file.write", path=path, size=size)
    return size


def _entry(path: str, metadata: dict[str, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": posixpath.basename(path), "path": path, "type": "file"}
    return {**entry, "metadata": metadata} if metadata else entry


def _metadata(request: Request) -> dict[str, str]:
    """Return the metadata in the headers. Raise BadRequest."""
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in request.headers.items()
        if name.startswith(_METADATA) and name != _METADATA
    }
    if len(metadata) > _METADATA_MAX:
        raise BadRequest(f"a file has at most {_METADATA_MAX} metadata")
    return metadata


def _unescaped(filename: str) -> str:
    """Return the path of a part: three characters come escaped, as in a browser."""
    for escaped, character in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        filename = filename.replace(escaped, character)
    return filename


def _check_user(name: str | None) -> None:
    if name is not None and name not in USERS:
        raise Denied(f"the user {name[:40]!r} does not exist", code="unauthorized")
