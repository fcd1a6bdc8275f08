"""Files and uploads of any conversation, as raw bytes of any size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from sbx.api.auth import CallerDep, HeldDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.downloads import SENT, files_response
from sbx.api.errors import documented
from sbx.api.multipart import slot
from sbx.errors import BadRequest
from sbx.protocol.files import FileEntry, Kind, Upload
from sbx.runtime.conversation import Conversation
from sbx.service.auth import Caller
from sbx.service.sandboxes import SandboxView
from sbx.service.service import Service
from sbx.service.using import SandboxLease
from sbx.telemetry import metrics

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}", tags=["native"]
)
_ERRORS = documented(404, 409, 413, 415, 429, 507)
RAW: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_SENT: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    **SENT,
    416: {"description": "There is no such range"},
}
Path = Annotated[str, Query()]


class EntryBody(BaseModel):
    name: str
    path: str
    kind: Kind
    size: int | None
    modified_s: float


class ListingBody(BaseModel):
    entries: list[EntryBody]
    complete: bool


class WriteReply(BaseModel):
    size: int


class Deleted(BaseModel):
    """`deleted` is false when the rest of it goes in the background."""

    deleted: bool


class Directory(BaseModel):
    path: str


class UploadBody(BaseModel):
    name: str
    size: int
    sha256: str
    path: str
    uploaded_at: float


class UploadList(BaseModel):
    items: list[UploadBody]


# -- files -----------------------------------------------------------------------------------------


@router.get("/files", response_class=Response, responses=_SENT)
async def read(
    sandbox_id: str,
    conversation: str,
    path: Path,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    held: HeldDep,
) -> Response:
    """The bytes of a file, or a range of them."""
    talk, _ = await held.enter_async_context(
        conversation_lease(service, caller, sandbox_id, conversation, "files:read")
    )
    stream = await held.enter_async_context(await talk.files.open_stream(path))
    return files_response(request, stream, name=stream.entry.name)


@router.put("/files", responses=_ERRORS, openapi_extra=RAW)
async def write(
    sandbox_id: str,
    conversation: str,
    path: Path,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
) -> WriteReply:
    """Make or replace a file in one step, with the directories it needs."""
    async with (
        conversation_lease(
            service, caller, sandbox_id, conversation, "files:write", makes=True
        ) as (
            talk,
            view,
        ),
        slot(request, caller),
    ):
        with metrics.uploading() as upload:
            upload.size = await talk.files.write_stream(path, body_of(request))
    await service.recording.record(
        caller,
        "file.write",
        view.id,
        conversation=conversation,
        path=path,
        size=upload.size,
    )
    return WriteReply(size=upload.size)


@router.delete("/files", responses=_ERRORS)
async def delete(
    sandbox_id: str, conversation: str, path: Path, caller: CallerDep, service: ServiceDep
) -> Deleted:
    """Delete a file, or a directory with all below it."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", frees=True
    ) as (
        talk,
        view,
    ):
        deleted = await talk.files.delete(path)
    await service.recording.record(
        caller, "file.delete", view.id, conversation=conversation, path=path
    )
    return Deleted(deleted=deleted)


@router.get("/stat", responses=_ERRORS)
async def stat(
    sandbox_id: str, conversation: str, path: Path, caller: CallerDep, service: ServiceDep
) -> EntryBody:
    """What a name stands for."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:read") as (
        talk,
        _,
    ):
        return entry_body(await talk.files.stat(path))


@router.get("/list", responses=_ERRORS)
async def list_(
    sandbox_id: str,
    conversation: str,
    caller: CallerDep,
    service: ServiceDep,
    path: Path = ".",
    max_depth: Annotated[int, Query(ge=1, le=1000)] = 1,
) -> ListingBody:
    """What lies in a directory, by path."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:read") as (
        talk,
        _,
    ):
        found = await talk.files.list(path, max_depth=max_depth)
    return ListingBody(entries=[entry_body(one) for one in found], complete=found.complete)


@router.post("/directories", responses=_ERRORS)
async def make_directory(
    sandbox_id: str, conversation: str, asked: Directory, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Make a directory, with those it lies in."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", makes=True
    ) as (
        talk,
        view,
    ):
        await talk.files.make_directory(asked.path)
    await service.recording.record(
        caller, "directory.create", view.id, conversation=conversation, path=asked.path
    )
    return OkBody()


# -- uploads ---------------------------------------------------------------------------------------


@router.get("/uploads", responses=_ERRORS)
async def uploads(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> UploadList:
    """What was put in, by name."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:read") as (
        talk,
        _,
    ):
        found = await talk.uploads.list()
    return UploadList(items=[upload_body(one) for one in found])


@router.put("/uploads/{name}", responses=_ERRORS, openapi_extra=RAW)
async def put(
    sandbox_id: str,
    conversation: str,
    name: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
) -> UploadBody:
    """Put a file in, read-only inside; the same name replaces in one step."""
    async with (
        use_of(service, caller, sandbox_id, conversation, "files:write") as use,
        slot(request, caller),
    ):
        with metrics.uploading() as counted:
            upload = await service.uploads.store(use, conversation, name, body_of(request))
            counted.size = upload.size
    return upload_body(upload)


@router.get("/uploads/{name}", response_class=Response, responses=_SENT)
async def get(
    sandbox_id: str,
    conversation: str,
    name: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    held: HeldDep,
) -> Response:
    """The bytes of an upload, or a range of them."""
    talk, _ = await held.enter_async_context(
        conversation_lease(service, caller, sandbox_id, conversation, "files:read")
    )
    stream = await held.enter_async_context(await talk.uploads.open_stream(name))
    etag = stream.upload.sha256 if stream.upload is not None else None
    return files_response(request, stream, name=name, etag=etag)


@router.delete("/uploads/{name}", status_code=204, responses=_ERRORS)
async def remove(
    sandbox_id: str, conversation: str, name: str, caller: CallerDep, service: ServiceDep
) -> None:
    """Take an upload away."""
    async with use_of(service, caller, sandbox_id, conversation, "files:write", frees=True) as use:
        await use.existing(conversation)
        await service.uploads.delete(use, conversation, name)


def use_of(
    service: Service,
    caller: Caller,
    sandbox_id: str,
    conversation: str,
    scope: str,
    *,
    frees: bool = False,
) -> SandboxLease:
    """Lease a sandbox for one of its conversations."""
    return service.sandboxes.using(
        caller, sandbox_id, scope=scope, frees=frees, conversation=conversation
    )


@asynccontextmanager
async def conversation_lease(
    service: Service,
    caller: Caller,
    sandbox_id: str,
    conversation: str,
    scope: str,
    *,
    makes: bool = False,
    frees: bool = False,
) -> AsyncIterator[tuple[Conversation, SandboxView]]:
    """Only what `makes` something there makes the conversation for it. What only `frees` space is
    not refused on a full disk."""
    async with use_of(service, caller, sandbox_id, conversation, scope, frees=frees) as use:
        talk = use.conversation(conversation) if makes else await use.existing(conversation)
        yield talk, use.view


async def body_of(request: Request) -> AsyncIterator[bytes]:
    """The bytes as they come. Raises BadRequest `truncated_body` when the sender goes."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise BadRequest(
            "the body ended before its end", code="truncated_body", hint="send it again"
        ) from None


def entry_body(entry: FileEntry) -> EntryBody:
    return EntryBody(**asdict(entry))


def upload_body(upload: Upload) -> UploadBody:
    return UploadBody(**asdict(upload))
