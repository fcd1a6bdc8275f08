"""Files at any path inside. A `mode` is a number whose decimal digits are the octal mode: 755."""

import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import Field, TypeAdapter, ValidationError

from sbx.aio import in_thread
from sbx.api.auth import StackDep
from sbx.api.bodies import ForeignBody
from sbx.api.encoding import encoded_list
from sbx.api.errors import iso
from sbx.api.inner_contents import content_of, content_size, send_range
from sbx.api.inner_files import InnerAnswer, InnerEntry, InnerFiles, inner_path, is_in_workspace
from sbx.api.multipart import FormLimits, FormPart, read_form
from sbx.api.opensandbox.execd import PREFIX, ExecdTarget, TargetDep
from sbx.api.slots import upload_slot
from sbx.errors import BadRequest
from sbx.runtime.conversation import Conversation
from sbx.telemetry import metrics
from sbx.workspace.errors import is_a_directory

router = APIRouter(prefix=PREFIX, include_in_schema=False)

_UPLOADS = FormLimits(parts=4000)
_LINES_MAX = 64 << 20  # bytes of a file that is read by lines
_PART = 64 << 10  # characters
_Path = Annotated[str, Query()]
_Paths = Annotated[list[str], Query(alias="path", min_length=1, max_length=1000)]


class FilePermission(ForeignBody):
    mode: Annotated[int, Field(ge=0, le=7777)] | None = None
    owner: str | None = None
    group: str | None = None


class FileMetadata(FilePermission):
    path: str


class FileMove(ForeignBody):
    src: str
    dest: str


class TextReplacement(ForeignBody):
    old: str
    new: str


_PERMISSIONS = TypeAdapter(dict[str, FilePermission])
_MOVES = TypeAdapter(list[FileMove])
_REPLACEMENTS = TypeAdapter(dict[str, TextReplacement])


def octal(mode: int | None) -> int | None:
    """Return 0o755 for 755. Raise BadRequest for other digits."""
    if mode is None:
        return None
    try:
        return int(str(mode), 8)
    except ValueError:
        raise BadRequest(f"{mode} is not a mode such as 644") from None


# -- content ---------------------------------------------------------------------------------------


@router.get("/files/download")
@router.head("/files/download")
async def download(
    path: _Path,
    request: Request,
    target: TargetDep,
    stack: StackDep,
    offset: Annotated[int, Query(ge=1)] | None = None,
    limit: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """Send a file, a range of its bytes, or some of its lines."""
    where = inner_path(path)
    requested = request.headers.get("range")
    by_lines = offset is not None or limit is not None
    if by_lines and requested:
        raise BadRequest("either lines or a range")
    conversation = await stack.enter_async_context(target.use())
    inner = InnerFiles(conversation)
    entry = await inner.stat(where)
    if entry.kind == "directory":
        raise is_a_directory(where)
    size = await content_size(conversation, where) if entry.kind == "symlink" else entry.size
    if by_lines:
        if size > _LINES_MAX:
            raise BadRequest("the file is too large to be read by lines; read a range")
        content = io.BytesIO()
        async for piece in content_of(conversation, where, 0, size):
            content.write(piece)
        begin = (offset or 1) - 1
        lines = _lines(content, begin, None if limit is None else begin + limit)
        return StreamingResponse(_sent(lines), media_type="text/plain")
    return send_range(request, stack, conversation, where, size)


def _lines(content: io.BytesIO, begin: int, end: int | None) -> Iterator[str]:
    """Yield some lines of a text in bounded parts, without the last line end."""
    content.seek(0)
    text, number, before = io.TextIOWrapper(content, "utf-8", "replace"), 0, ""
    while (end is None or number < end) and (part := text.read(_PART)):
        stop = len(part) if end is None else _after(part, end - number)
        chosen = before + part[_after(part, max(0, begin - number)) : stop]
        before = "\n" if chosen.endswith("\n") else ""
        yield chosen.removesuffix("\n")
        number += part.count("\n")


def _after(text: str, lines: int) -> int:
    """Return the place after this number of lines; the end of a text that has fewer."""
    parts = text.split("\n", lines)
    return len(text) - len(parts[lines]) if len(parts) > lines else len(text)


async def _sent(parts: Iterator[str]) -> AsyncIterator[str]:
    while (part := await in_thread(next, parts, None)) is not None:
        yield part


@router.post("/files/upload")
async def upload(request: Request, target: TargetDep) -> Response:
    """Store files: for each one a part `metadata`, then a part `file`."""
    async with target.use() as conversation, upload_slot(request, target.caller):
        stored = 0
        with metrics.uploading() as counted:
            async with aclosing(aiter(read_form(request, _UPLOADS))) as form:
                metadata: FileMetadata | None = None
                async for part in form:
                    if part.name == "metadata":
                        if metadata is not None:
                            raise BadRequest("two metadata without a file", code="INVALID_FILE")
                        metadata = await _metadata(part)
                    elif metadata is None:
                        raise BadRequest("a file without metadata", code="INVALID_FILE_METADATA")
                    else:
                        stored += await _store(target, conversation, metadata, part)
                        metadata = None
            counted.size = stored
            if metadata is not None:
                raise BadRequest("metadata without a file", code="INVALID_FILE")
    return Response()


async def _metadata(part: FormPart) -> FileMetadata:
    try:
        return FileMetadata.model_validate_json(await part.text())
    except ValidationError as error:
        raise BadRequest(
            f"the metadata of a file are wrong: {error.errors()[0]['msg']}",
            code="INVALID_FILE_METADATA",
        ) from None


async def _store(
    target: ExecdTarget, conversation: Conversation, metadata: FileMetadata, part: FormPart
) -> int:
    path, inner = inner_path(metadata.path), InnerFiles(conversation)
    if is_in_workspace(path):
        size = await conversation.files.write_stream(path, part.chunks())
    else:
        size = await inner.write(path, part.chunks())
    await inner.call(_permission_request(path, metadata))
    await target.record("file.write", path=path, size=size)
    return size


# -- the tree --------------------------------------------------------------------------------------


@router.get("/files/info")
async def info(paths: _Paths, target: TargetDep) -> dict[str, Any]:
    async with target.use() as conversation:
        answers = await InnerFiles(conversation).call(
            *({"act": "stat", "path": inner_path(path)} for path in paths)
        )
    return {path: _shown(answer.entry) for path, answer in zip(paths, answers, strict=True)}


@router.get("/files/search")
async def search(
    path: _Path, target: TargetDep, pattern: Annotated[str, Query()] = "**"
) -> Response:
    """Find files by their base name, in a directory and below it."""
    request = {"act": "search", "path": inner_path(path), "pattern": pattern}
    async with target.use() as conversation:
        (answer,) = await InnerFiles(conversation).call(request)
    return await _listed(answer)


@router.get("/directories/list")
async def list_(
    path: _Path, target: TargetDep, depth: Annotated[int, Query(ge=0, le=1000)] = 1
) -> Response:
    where = inner_path(path)
    async with target.use() as conversation:
        inner = InnerFiles(conversation)
        if (await inner.stat(where)).kind != "directory":
            raise BadRequest(f"{where} is not a directory", code="INVALID_FILE")
        (answer,) = await inner.call({"act": "list", "path": where, "depth": depth})
    return await _listed(answer)


async def _listed(answer: InnerAnswer) -> Response:
    entries = await encoded_list(answer.each_entry(), _shown)
    return Response(entries, media_type="application/json")


@router.post("/directories")
async def make_directories(request: Request, target: TargetDep) -> Response:
    new = await _body(request, _PERMISSIONS)
    requests = [
        {"act": "make_directory", "path": inner_path(path), "mode": octal(each.mode)}
        for path, each in new.items()
    ]
    await _change(target, requests, "directory.create")
    return Response()


@router.delete("/directories")
async def delete_directories(paths: _Paths, target: TargetDep) -> Response:
    requests = [{"act": "delete", "path": inner_path(path), "tree": True} for path in paths]
    await _change(target, requests, "file.delete")
    return Response()


@router.delete("/files")
async def delete_files(paths: _Paths, target: TargetDep) -> Response:
    requests = [{"act": "delete", "path": inner_path(path), "tree": False} for path in paths]
    await _change(target, requests, "file.delete")
    return Response()


@router.post("/files/mv")
async def move(request: Request, target: TargetDep) -> Response:
    requests = [
        {
            "act": "move",
            "source": inner_path(each.src),
            "target": inner_path(each.dest),
            "replace": False,
        }
        for each in await _body(request, _MOVES)
    ]
    await _change(target, requests, "file.move")
    return Response()


@router.post("/files/permissions")
async def permissions(request: Request, target: TargetDep) -> Response:
    new = await _body(request, _PERMISSIONS)
    requests = [_permission_request(inner_path(path), each) for path, each in new.items()]
    await _change(target, requests, "file.chmod")
    return Response()


@router.post("/files/replace")
async def replace(request: Request, target: TargetDep, verbose: bool = False) -> Response:
    """Replace every occurrence of a text. With `verbose`, report how many there were."""
    new = await _body(request, _REPLACEMENTS)
    if any(not each.old for each in new.values()):
        raise BadRequest("the text to be replaced is empty")
    requests = [
        {"act": "replace", "path": inner_path(path), "old": each.old, "new": each.new}
        for path, each in new.items()
    ]
    answers = await _change(target, requests, "file.write")
    if not verbose:
        return Response()
    counts = {
        path: {"replacedCount": answer.count} for path, answer in zip(new, answers, strict=True)
    }
    return Response(json.dumps(counts), media_type="application/json")


async def _change(target: ExecdTarget, requests: list[dict[str, Any]], action: str) -> Any:
    async with target.use() as conversation:
        answers = await InnerFiles(conversation).call(*requests)
    for request in requests:
        await target.record(action, path=request.get("path") or request["source"])
    return answers


async def _body(request: Request, adapter: TypeAdapter[Any]) -> Any:
    try:
        return adapter.validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


def _permission_request(path: str, new: FilePermission) -> dict[str, Any]:
    return {
        "act": "permissions",
        "path": path,
        "mode": octal(new.mode),
        "owner": new.owner,
        "group": new.group,
    }


def _shown(entry: InnerEntry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "type": entry.kind,
        "size": entry.size,
        "modified_at": iso(entry.modified_s),
        "created_at": iso(entry.created_s),
        "owner": entry.owner,
        "group": entry.group,
        "mode": int(f"{entry.mode & 0o777:o}"),
    }
