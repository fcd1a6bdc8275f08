"""The files of a conversation: read, write, find, change, watch, pack and unpack."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, StringConstraints

from sbx.api import sse
from sbx.api.auth import StackDep
from sbx.api.bodies import RAW_BODY, OkBody, RequestBody, raw_body
from sbx.api.downloads import SENT, PiecesResponse, attachment, files_response
from sbx.api.encoding import list_reply
from sbx.api.errors import documented
from sbx.api.slots import take_slot, upload_slot
from sbx.api.v1.dependencies import PREFIX, Path, Target, TargetDep
from sbx.errors import Denied
from sbx.protocol.files import Copied, FileEntry, Kind, Match, Unpacked
from sbx.runtime.files.archives import ArchiveFormat
from sbx.service.caller import Caller
from sbx.telemetry import metrics
from sbx.workspace.files import RESULTS_MAX

router = APIRouter(prefix=PREFIX, tags=["native"])
_ERRORS = documented(404, 409, 413, 415, 429, 507)
_SENT: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    **SENT,
    416: {"description": "There is no such range"},
}
_ARCHIVE_ERRORS = documented(404, 409, 413, 415, 429, 504, 507)
_WATCH_ERRORS = documented(404, 409, 429)
_ARCHIVE_TYPES = {"tar.gz": "application/gzip", "zip": "application/zip"}
_PathText = Annotated[str, StringConstraints(max_length=16_384)]
_Text = Annotated[str, StringConstraints(max_length=1 << 20)]
_ResultsMax = Annotated[int, Query(description=f"at most {RESULTS_MAX}")]


class ListingBody(BaseModel):
    entries: list[FileEntry]
    complete: bool


class MatchesBody(BaseModel):
    """`complete` is false if a limit cut the search; `files` were read, `skipped` were not."""

    matches: list[Match]
    complete: bool
    files: int
    skipped: int


class WriteReply(BaseModel):
    size: int


class Deleted(BaseModel):
    """`deleted` is false if the rest is removed in the background."""

    deleted: bool


class Directory(RequestBody):
    path: str


class MoveRequest(RequestBody):
    """`overwrite`: a file may replace a file."""

    source: _PathText
    target: _PathText
    overwrite: bool = False


class Replacement(RequestBody):
    """`count`: the number of times that `old` must occur; null: at least once."""

    path: _PathText
    old: _Text
    new: _Text
    count: Annotated[int, Field(ge=0, le=1 << 31)] | None = 1


class ReplacedBody(BaseModel):
    replaced: int


class Mode(RequestBody):
    """`mode` as a number: 420 is 0644."""

    path: _PathText
    mode: Annotated[int, Field(strict=True, ge=0, le=0o7777)]


# -- one file --------------------------------------------------------------------------------------


@router.get("/files", response_class=Response, responses=_SENT)
@router.head("/files", include_in_schema=False)
async def read(path: Path, request: Request, target: TargetDep, stack: StackDep) -> Response:
    """Send the bytes of a file, or a range of them."""
    conversation = await stack.enter_async_context(target.use("files:read"))
    stream = await stack.enter_async_context(await conversation.files.open_stream(path))
    return files_response(request, stream, name=stream.entry.name)


@router.put("/files", responses=_ERRORS, openapi_extra=RAW_BODY)
async def write(path: Path, request: Request, target: TargetDep) -> WriteReply:
    """Create or replace a file in one step, with its missing directories."""
    async with (
        target.use("files:write", creates=True) as conversation,
        upload_slot(request, target.caller),
    ):
        with metrics.uploading() as upload:
            upload.size = await conversation.files.write_stream(path, raw_body(request))
    await target.record("file.write", path=path, size=upload.size)
    return WriteReply(size=upload.size)


@router.delete("/files", responses=_ERRORS)
async def delete(path: Path, target: TargetDep) -> Deleted:
    """Delete a file, or a directory with everything below it."""
    async with target.use("files:write", frees=True) as conversation:
        deleted = await conversation.files.delete(path)
    await target.record("file.delete", path=path)
    return Deleted(deleted=deleted)


@router.get("/stat", responses=_ERRORS)
async def stat(path: Path, target: TargetDep) -> FileEntry:
    """Return the kind, size and time of a path."""
    async with target.use("files:read") as conversation:
        return await conversation.files.stat(path)


@router.post("/replace", responses=_ERRORS)
async def replace(replacement: Replacement, target: TargetDep) -> ReplacedBody:
    """Replace a text in a file in one step, if it occurs exactly as often as stated."""
    async with target.use("files:write") as conversation:
        count = await conversation.files.replace(
            replacement.path, replacement.old, replacement.new, count=replacement.count
        )
    await target.record("file.write", path=replacement.path)
    return ReplacedBody(replaced=count)


@router.post("/chmod", responses=_ERRORS)
async def chmod(mode: Mode, target: TargetDep) -> OkBody:
    """Set permissions; set-id bits and the sticky bit are refused."""
    async with target.use("files:write") as conversation:
        await conversation.files.chmod(mode.path, mode.mode)
    await target.record("file.chmod", path=mode.path, mode=f"{mode.mode:o}")
    return OkBody()


# -- directories -----------------------------------------------------------------------------------


@router.get("/list", response_model=ListingBody, responses=_ERRORS)
async def list_(
    target: TargetDep,
    path: Path = ".",
    max_depth: Annotated[int, Query(ge=1, le=1000)] = 1,
) -> Response:
    """List a directory, by path."""
    async with target.use("files:read") as conversation:
        entries = await conversation.files.list(path, max_depth=max_depth)
    return await list_reply("entries", entries, vars, complete=entries.complete)


@router.post("/directories", responses=_ERRORS)
async def make_directory(directory: Directory, target: TargetDep) -> OkBody:
    """Create a directory, with its missing parents."""
    async with target.use("files:write", creates=True) as conversation:
        await conversation.files.make_directory(directory.path)
    await target.record("directory.create", path=directory.path)
    return OkBody()


@router.post("/move", responses=_ERRORS)
async def move(move: MoveRequest, target: TargetDep) -> OkBody:
    """Move or rename a file, a symlink or a directory."""
    async with target.use("files:write") as conversation:
        await conversation.files.move(move.source, move.target, overwrite=move.overwrite)
    await target.record("file.move", path=move.source, target=move.target)
    return OkBody()


@router.post("/copy", responses=_ERRORS)
async def copy(copy: MoveRequest, target: TargetDep) -> Copied:
    """Copy a file, or a directory with everything below it."""
    async with target.use("files:write") as conversation:
        copied = await conversation.files.copy(copy.source, copy.target, overwrite=copy.overwrite)
    await target.record("file.copy", path=copy.source, target=copy.target, size=copied.bytes)
    return copied


# -- search ----------------------------------------------------------------------------------------


@router.get("/find", response_model=ListingBody, responses=_ERRORS)
async def find(
    pattern: Annotated[str, Query()],
    target: TargetDep,
    path: Path = ".",
    kind: Kind | None = None,
    max_results: _ResultsMax = 1000,
) -> Response:
    """Find entries below a directory whose name, or path, matches the glob `pattern`."""
    async with target.use("files:read") as conversation:
        entries = await conversation.files.find(pattern, path, kind=kind, max_results=max_results)
    return await list_reply("entries", entries, vars, complete=entries.complete)


@router.get("/grep", response_model=MatchesBody, responses=_ERRORS)
async def grep(
    pattern: Annotated[str, Query()],
    target: TargetDep,
    path: Path = ".",
    regex: bool = False,
    ignore_case: bool = False,
    include: str | None = None,
    max_matches: _ResultsMax = 1000,
) -> Response:
    """Find the lines of text files that contain `pattern`: plain text, or an RE2 expression."""
    async with target.use("files:read") as conversation:
        matches = await conversation.files.grep(
            pattern,
            path,
            regex=regex,
            ignore_case=ignore_case,
            include=include,
            max_matches=max_matches,
        )
    return await list_reply(
        "matches",
        matches,
        vars,
        complete=matches.complete,
        files=matches.files,
        skipped=matches.skipped,
    )


# -- archives --------------------------------------------------------------------------------------


@router.get(
    "/archive",
    response_class=Response,
    responses={**_ARCHIVE_ERRORS, 200: {"content": {kind: {} for kind in _ARCHIVE_TYPES.values()}}},
)
async def pack(
    request: Request,
    target: TargetDep,
    stack: StackDep,
    path: Path = ".",
    format: Annotated[ArchiveFormat, Query()] = "tar.gz",
) -> Response:
    """Send a directory as an archive, packed inside the sandbox meanwhile. If it cannot be
    finished, the connection is cut. Starts the kernel."""
    _check_execute(target.caller)
    conversation = await stack.enter_async_context(target.use("files:read"))
    place = take_slot(request, "downloads")
    if place is not None:
        stack.callback(place.end)
    pieces = conversation.files.archive(path, format=format)
    stack.push_async_callback(pieces.aclose)
    first = await anext(pieces)
    name = path.rstrip("/").rpartition("/")[2]
    name = f"{name if name not in ('', '.', '..') else 'workspace'}.{format}"
    return PiecesResponse(
        _chain(first, pieces),
        headers={
            "content-disposition": attachment(name),
            "x-content-type-options": "nosniff",
            "cache-control": "no-store",
        },
        media_type=_ARCHIVE_TYPES[format],
    )


@router.get(
    "/watch", response_class=Response, responses={**_WATCH_ERRORS, 200: {"content": sse.DOCUMENTED}}
)
async def watch(
    request: Request,
    target: TargetDep,
    path: Path = ".",
    recursive: bool = True,
) -> Response:
    """Follow a directory: `started`, then `created`, `modified`, `deleted` with a path, and
    `overflow` if some were missed. The stream ends with the conversation."""
    return await sse.stream(_watch_events(target, path, recursive=recursive), request=request)


@router.put("/archive", responses=_ARCHIVE_ERRORS, openapi_extra=RAW_BODY)
async def unpack(request: Request, target: TargetDep, path: Path = ".") -> Unpacked:
    """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside the sandbox. Starts the
    kernel."""
    _check_execute(target.caller)
    async with (
        target.use("files:write", creates=True) as conversation,
        upload_slot(request, target.caller),
    ):
        unpacked = await conversation.files.unpack(raw_body(request), path)
    await target.record("archive.unpack", path=path, size=unpacked.bytes)
    return unpacked


def _check_execute(caller: Caller) -> None:
    """Raise Denied: a process in the sandbox packs and unpacks archives."""
    if not caller.may("execute"):
        raise Denied(
            "archives are made and read by a process in the sandbox, and this token starts none",
            code="forbidden",
            hint="ask for a token with the scope execute, or read the files one by one",
        )


async def _chain(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for piece in pieces:
        yield piece


async def _watch_events(
    target: Target, path: str, *, recursive: bool
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Lease the sandbox only until the watch has begun: a watching client does not prevent the idle
    time-out."""
    async with target.use("files:read") as conversation:
        changes = conversation.files.watch(path, recursive=recursive)
        change = await anext(changes)
    number = 1
    async with aclosing(changes):
        yield number, {"type": change.kind, "path": change.path}
        async for change in changes:
            number += 1
            yield number, {"type": change.kind, "path": change.path}
