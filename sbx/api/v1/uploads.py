"""Uploads of a conversation: in one request, or in resumable pieces with checksums."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, StringConstraints

from sbx.api.auth import StackDep
from sbx.api.bodies import RAW_BODY, RequestBody, raw_body
from sbx.api.downloads import SENT, files_response
from sbx.api.errors import documented
from sbx.api.slots import upload_slot
from sbx.api.v1.dependencies import PREFIX, TargetDep
from sbx.protocol.files import PartialUpload, Upload
from sbx.runtime.files.open_files import OpenFiles
from sbx.telemetry import metrics
from sbx.workspace.streams import ReceivedFile

router = APIRouter(prefix=PREFIX, tags=["native"])
_ERRORS = documented(404, 409, 413, 415, 429, 507)
_SENT: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    **SENT,
    416: {"description": "There is no such range"},
}
_Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class UploadList(BaseModel):
    items: list[Upload]


class NewPartial(RequestBody):
    """`size` in bytes. `upload`: it becomes an upload, and `path` is its name."""

    path: Annotated[str, StringConstraints(max_length=16_384)]
    size: Annotated[int, Field(ge=0, le=1 << 62)]
    upload: bool = False


class FinishUpload(BaseModel):
    """The SHA-256 of the whole file."""

    sha256: _Checksum


class Finished(BaseModel):
    """`upload` is null for a file of the workspace."""

    size: int
    upload: Upload | None


@router.get("/uploads", responses=_ERRORS)
async def uploads(target: TargetDep) -> UploadList:
    """List the uploads, by name."""
    async with target.use("files:read", starts=False, kept=True) as conversation:
        return UploadList(items=list(await conversation.uploads.list()))


@router.put("/uploads/{name}", responses=_ERRORS, openapi_extra=RAW_BODY)
async def put_upload(name: str, request: Request, target: TargetDep) -> Upload:
    """Upload a file, read-only inside; it replaces the upload of the same name in one step."""
    async with (
        target.lease("files:write") as use,
        upload_slot(request, target.caller),
    ):
        with metrics.uploading() as counted:
            upload = await target.service.uploads.store(use, target.name, name, raw_body(request))
            counted.size = upload.size
    return upload


@router.get("/uploads/{name}", response_class=Response, responses=_SENT)
@router.head("/uploads/{name}", include_in_schema=False)
async def get(name: str, request: Request, target: TargetDep, stack: StackDep) -> Response:
    """Send the bytes of an upload, or a range of them."""
    conversation = await stack.enter_async_context(target.use("files:read", kept=True))
    stream = await stack.enter_async_context(await conversation.uploads.open_stream(name))
    etag = stream.upload.sha256 if stream.upload is not None else None
    return files_response(request, stream, name=name, etag=etag)


@router.delete("/uploads/{name}", status_code=204, responses=_ERRORS)
async def remove(name: str, target: TargetDep) -> None:
    """Delete an upload."""
    async with target.lease("files:write", frees=True) as use:
        await use.existing(target.name)
        await target.service.uploads.delete(use, target.name, name)


# -- resumable uploads -----------------------------------------------------------------------------


@router.post("/partials", status_code=201, responses=_ERRORS)
async def begin(new: NewPartial, target: TargetDep) -> PartialUpload:
    """Begin a resumable upload. The file appears when it is finished."""
    async with target.use("files:write", creates=True) as conversation:
        return await conversation.files.partials.begin(new.path, new.size, upload=new.upload)


@router.get("/partials/{partial_id}", responses=_ERRORS)
async def progress(partial_id: str, target: TargetDep) -> PartialUpload:
    """Return the offset from which to continue after a lost connection."""
    async with target.use("files:write", frees=True) as conversation:
        return conversation.files.partials.get(partial_id)


@router.patch("/partials/{partial_id}", responses=_ERRORS, openapi_extra=RAW_BODY)
async def append(
    partial_id: str,
    offset: Annotated[int, Query(ge=0, le=1 << 62)],
    request: Request,
    target: TargetDep,
    sha256: Annotated[str | None, Query(pattern=r"^[0-9a-f]{64}$")] = None,
) -> PartialUpload:
    """Add a piece at the offset. An incomplete piece, or one with another SHA-256 than `sha256`,
    leaves nothing. Without it, only the SHA-256 of the complete file is checked at the end."""
    async with (
        target.use("files:write") as conversation,
        upload_slot(request, target.caller),
    ):
        body = raw_body(request)
        return await conversation.files.partials.append(partial_id, offset, sha256, body)


@router.post("/partials/{partial_id}/finish", responses=_ERRORS)
async def finish(partial_id: str, whole: FinishUpload, target: TargetDep) -> Finished:
    """Put the file in its place in one step, if its checksum is right."""
    async with target.lease("files:write") as use:
        partials = (await use.existing(target.name)).files.partials
        if partials.is_upload(partial_id):
            with metrics.uploading() as counted:
                upload = await target.service.uploads.finish(
                    use, target.name, partial_id, whole.sha256
                )
                counted.size = upload.size
            return Finished(size=upload.size, upload=upload)

        def store(opened: OpenFiles, path: str, received: ReceivedFile) -> tuple[str, int]:
            return path, opened.files.place(path, received)

        path, size = await partials.finish(partial_id, whole.sha256, store)
    await target.record("file.write", path=path, size=size)
    return Finished(size=size, upload=None)


@router.delete("/partials/{partial_id}", status_code=204, responses=_ERRORS)
async def abort(partial_id: str, target: TargetDep) -> None:
    """Delete the resumable upload and its bytes."""
    async with target.use("files:write", frees=True) as conversation:
        await conversation.files.partials.abort(partial_id)
