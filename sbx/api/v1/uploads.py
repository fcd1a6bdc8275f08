"""Resumable uploads into any conversation: in pieces with checksums, whatever connections break."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, StringConstraints

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.multipart import slot
from sbx.api.v1.files import (
    RAW,
    UploadBody,
    body_of,
    conversation_lease,
    upload_body,
    use_of,
)
from sbx.protocol.files import PartialUpload
from sbx.runtime.files.open_files import OpenFiles
from sbx.telemetry import metrics

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}/partials", tags=["native"]
)
_ERRORS = documented(404, 409, 413, 415, 429, 507)
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class NewPartial(BaseModel):
    """`size` in bytes. `upload`: it becomes an upload, and `path` is its name."""

    path: Annotated[str, StringConstraints(max_length=16_384)]
    size: Annotated[int, Field(ge=0, le=1 << 62)]
    upload: bool = False


class PartialBody(BaseModel):
    """`offset` bytes of `size` are here; a piece has at most `piece_max` of them."""

    id: str
    path: str
    size: int
    offset: int
    piece_max: int
    expires_in_s: float


class FinishUpload(BaseModel):
    """The SHA-256 of all of it."""

    sha256: Checksum


class Finished(BaseModel):
    """`upload` is null for a file of the workspace."""

    size: int
    upload: UploadBody | None


@router.post("", status_code=201, responses=_ERRORS)
async def begin(
    sandbox_id: str, conversation: str, new: NewPartial, caller: CallerDep, service: ServiceDep
) -> PartialBody:
    """Begin one; nothing is seen of it before it is finished."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", makes=True
    ) as (
        talk,
        _,
    ):
        return _told(await talk.files.partials.begin(new.path, new.size, upload=new.upload))


@router.get("/{partial_id}", responses=_ERRORS)
async def get(
    sandbox_id: str, conversation: str, partial_id: str, caller: CallerDep, service: ServiceDep
) -> PartialBody:
    """How far it is: where to go on after a lost connection."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", frees=True
    ) as (
        talk,
        _,
    ):
        return _told(talk.files.partials.get(partial_id))


@router.patch("/{partial_id}", responses=_ERRORS, openapi_extra=RAW)
async def append(
    sandbox_id: str,
    conversation: str,
    partial_id: str,
    offset: Annotated[int, Query(ge=0, le=1 << 62)],
    sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$")],
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
) -> PartialBody:
    """Add a piece at the offset; one that does not come whole leaves nothing."""
    async with (
        conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (talk, _),
        slot(request, caller),
    ):
        body = body_of(request)
        return _told(await talk.files.partials.append(partial_id, offset, sha256, body))


@router.post("/{partial_id}/finish", responses=_ERRORS)
async def finish(
    sandbox_id: str,
    conversation: str,
    partial_id: str,
    whole: FinishUpload,
    caller: CallerDep,
    service: ServiceDep,
) -> Finished:
    """Put it in its place in one step, if it is what its checksum says."""
    async with use_of(service, caller, sandbox_id, conversation, "files:write") as use:
        partials = (await use.existing(conversation)).files.partials
        if partials.is_upload(partial_id):
            with metrics.uploading() as counted:
                upload = await service.uploads.finish(use, conversation, partial_id, whole.sha256)
                counted.size = upload.size
            return Finished(size=upload.size, upload=upload_body(upload))

        def store(opened: OpenFiles, path: str, content: Iterator[bytes]) -> tuple[str, int]:
            return path, opened.files.write(path, content)

        path, size = await partials.finish(partial_id, whole.sha256, store)
    await service.recording.record(
        caller, "file.write", use.view.id, conversation=conversation, path=path, size=size
    )
    return Finished(size=size, upload=None)


@router.delete("/{partial_id}", status_code=204, responses=_ERRORS)
async def abort(
    sandbox_id: str, conversation: str, partial_id: str, caller: CallerDep, service: ServiceDep
) -> None:
    """Forget it and its bytes."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", frees=True
    ) as (
        talk,
        _,
    ):
        await talk.files.partials.abort(partial_id)


def _told(partial: PartialUpload) -> PartialBody:
    return PartialBody(**asdict(partial))
