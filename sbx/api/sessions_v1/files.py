"""The uploads of a conversation: upload, list, download, delete."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.downloads import SENT, files_response
from sbx.api.errors import documented
from sbx.api.multipart import FormPart, read_form, spool_to_disk
from sbx.api.sessions_v1.dependencies import (
    NAMES_CONVERSATION,
    SessionDep,
    check_subdir,
    conversation_of,
    conversation_required,
    demand,
    demand_existing,
    demanded_conversation,
    single_conversation,
)
from sbx.api.sessions_v1.models import SessionUploadList
from sbx.api.slots import upload_slot
from sbx.errors import BadRequest
from sbx.protocol.files import Upload
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.service import Service
from sbx.service.sessions import unknown
from sbx.service.uploads import limits_of
from sbx.telemetry import metrics
from sbx.workspace.errors import not_found
from sbx.workspace.paths import check_name

router = APIRouter(prefix="/api/v1/sessions/{session_id}/files", tags=["files"])
_FORM: dict[str, Any] = {
    **NAMES_CONVERSATION,
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "conversation_id": {"type": "string", "maxLength": 128},
                        "subdir": {"type": "string", "enum": ["temparea"]},
                    },
                }
            }
        },
    },
}


@router.post(
    "/upload",
    status_code=201,
    responses=documented(404, 409, 413, 415, 429, 507),
    openapi_extra=_FORM,
)
async def upload(
    request: Request,
    view: SessionDep,
    caller: CallerDep,
    service: ServiceDep,
) -> Upload:
    """Upload a file of any size to a conversation, created if need be. It replaces the file of its
    name in one step. With the conversation before the file it needs no temporary file."""
    if (named := conversation_of(request)) is not None:
        demand(caller, view, "files:write", named)
    elif not caller.may("files:write"):
        raise unknown(view.session_id or view.id)
    async with upload_slot(request, caller):
        with metrics.uploading() as counted:
            upload = await UploadForm(request, caller, view, service).stored()
            counted.size = upload.size
    return upload


@router.get("", responses=documented(404, 409), openapi_extra=NAMES_CONVERSATION)
async def list_(
    request: Request, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> SessionUploadList:
    """List the uploads of a conversation, by name. An expired session has them while it is in its
    grace period."""
    name = demanded_conversation(request)
    await demand_existing(service, caller, view, "files:read", name)
    async with service.sandboxes.using(
        caller, view.id, scope="files:read", starts=False, kept=True
    ) as use:
        uploads = await use.conversation(name).uploads.list()
    return SessionUploadList(files=[upload.name for upload in uploads], items=list(uploads))


@router.get(
    "/{name:path}",
    response_class=Response,
    responses={
        **documented(404, 409, 416, 429),
        **SENT,
    },
    openapi_extra=NAMES_CONVERSATION,
)
@router.head("/{name:path}", include_in_schema=False)
async def download(
    name: str, request: Request, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> Response:
    """Send an upload, or a range of it. The conversation may be omitted if only one of the session
    has a file of this name."""
    check_name(name)
    conversation = conversation_of(request) or await _only_one(service, caller, view, name)
    await demand_existing(service, caller, view, "files:read", conversation)
    async with service.sandboxes.using(
        caller, view.id, scope="files:read", starts=False, kept=True
    ) as use:
        stream = await use.conversation(conversation).uploads.open_stream(name)
    assert stream.upload is not None
    return files_response(request, stream, name=name, etag=stream.upload.sha256)


@router.delete(
    "/{name:path}",
    status_code=204,
    responses=documented(404, 409),
    openapi_extra=NAMES_CONVERSATION,
)
async def delete(
    name: str, request: Request, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> None:
    check_name(name)
    conversation = demanded_conversation(request)
    await demand_existing(service, caller, view, "files:write", conversation)
    async with service.sandboxes.using(
        caller, view.id, scope="files:write", starts=False, frees=True
    ) as use:
        await service.uploads.delete(use, conversation, name, of_session=True)


async def _only_one(service: Service, caller: Caller, view: SandboxView, name: str) -> str:
    """Return the conversation with an upload of this name. Raise NotFound, and BadRequest
    `conversation_required` if several have one."""
    names = await service.uploads.conversations_with(caller, view, name)
    if not names:
        raise not_found(f"/workspace/uploads/temparea/{name}")
    if len(names) > 1:
        raise conversation_required(*names)
    return names[0]


class UploadForm:
    """One upload that arrives: its form is read to the end before the file is stored."""

    def __init__(
        self,
        request: Request,
        caller: Caller,
        view: SandboxView,
        service: Service,
    ) -> None:
        named = conversation_of(request)
        self._named = [named] if named is not None else []
        self._parts = aiter(read_form(request))
        self._caller = caller
        self._view = view
        self._service = service
        self._fields: set[str] = set()

    async def stored(self) -> Upload:
        async with aclosing(self._parts):
            file = await self._file()
            assert file.filename is not None
            check_name(file.filename)
            if self._named:
                return await self._put(file.filename, self._whole(file))
            # Some clients send the file before the conversation.
            directory, limits = self._service.settings.data_dir, limits_of(self._view)
            max_bytes = limits.max_file_size if limits is not None else None
            async with spool_to_disk(self._whole(file), directory, max_bytes) as chunks:
                return await self._put(file.filename, chunks)

    async def _file(self) -> FormPart:
        """Return the part with the file. Read the fields before it."""
        async for part in self._parts:
            if part.name == "file" and part.filename is not None:
                return part
            await self._field(part)
        missing = {"type": "missing", "loc": ("body", "file"), "msg": "Field required"}
        raise RequestValidationError([missing])

    async def _whole(self, file: FormPart) -> AsyncIterator[bytes]:
        """Yield the file, then read the rest of the form: a form that is cut off stores nothing."""
        async for chunk in file.chunks():
            yield chunk
        async for part in self._parts:
            await self._field(part)

    async def _field(self, part: FormPart) -> None:
        if part.name in self._fields or part.filename is not None:
            raise BadRequest(
                "the form must have one file, as `file`, and each field once",
                details={"field": part.name[:100]},
            )
        self._fields.add(part.name)
        if part.name == "conversation_id":
            self._named.append(await part.text())
            single_conversation(self._named)
        elif part.name == "subdir":
            check_subdir(await part.text())

    async def _put(self, name: str, chunks: AsyncIterator[bytes]) -> Upload:
        conversation = single_conversation(self._named)
        if conversation is None:
            raise conversation_required()
        view, service = self._view, self._service
        demand(self._caller, view, "files:write", conversation)
        async with service.sandboxes.using(self._caller, view.id, scope="files:write") as use:
            return await service.uploads.store(use, conversation, name, chunks, of_session=True)
