"""filesystem/*: the files of a sandbox, relative to its workspace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sbx.aio import in_thread
from sbx.api.auth import CallerDep, ServiceDep, StackDep
from sbx.api.bodies import OkBody, body_of, documented_body, entry_form
from sbx.api.downloads import SENT, files_response
from sbx.api.encoding import encoded_form, list_reply
from sbx.api.errors import documented
from sbx.api.middleware import CONTENT_MAX
from sbx.api.multipart import FileForm
from sbx.api.slots import upload_slot
from sbx.api.v1.bay.idempotency import reply
from sbx.api.v1.bay.models import DirectoryList, FileContent, NewContent, Uploaded
from sbx.errors import BadRequest, InvalidPath, TooLarge
from sbx.protocol.files import FileEntry, Listing
from sbx.runtime.files.files import WorkspaceFiles
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.service.caller import Caller
from sbx.service.leases import SandboxLease
from sbx.service.service import Service
from sbx.telemetry import metrics
from sbx.workspace.errors import invalid_path, too_large
from sbx.workspace.paths import resolve

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/filesystem", tags=["files"])
_ERRORS = documented(404, 409, 507)
Path = Annotated[str, Query()]


@router.get("/files", response_model=FileContent, responses=_ERRORS)
async def read(sandbox_id: str, path: Path, caller: CallerDep, service: ServiceDep) -> Response:
    """Return the text of a file. Use the download for a large file."""
    relative(path)
    with _bays_limits():
        async with _using(service, caller, sandbox_id, "files:read") as use:
            content = await _text(use.conversation().files, path)
    return reply(200, await encoded_form({"content": content}))


@router.put("/files", responses=_ERRORS, openapi_extra=documented_body(NewContent))
async def write(
    sandbox_id: str, request: Request, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Create or replace a file, with its missing directories. Use the upload for a large file."""
    new = await body_of(request, NewContent)
    relative(new.path)
    with _bays_limits():
        async with _using(service, caller, sandbox_id, "files:write") as use:
            written = await use.conversation().files.write(new.path, new.content)
    await _record(service, use, "file.write", path=new.path, size=written)
    return OkBody()


@router.delete("/files", responses=_ERRORS)
async def delete(sandbox_id: str, path: Path, caller: CallerDep, service: ServiceDep) -> OkBody:
    """Delete a file, or a directory with everything below it."""
    relative(path)
    async with _using(service, caller, sandbox_id, "files:write", frees=True) as use:
        await use.conversation().files.delete(path)
    await _record(service, use, "file.delete", path=path)
    return OkBody()


@router.get("/directories", response_model=DirectoryList, responses=_ERRORS)
async def list_(
    sandbox_id: str, caller: CallerDep, service: ServiceDep, path: Path = "."
) -> Response:
    """List a directory: directories first, then by name, without hidden names."""
    relative(path)
    async with _using(service, caller, sandbox_id, "files:read") as use:
        listing = await use.conversation().files.list(path)
    entries = await in_thread(_shown, listing)
    return await list_reply("entries", entries, entry_form, complete=listing.complete)


@router.post(
    "/upload",
    responses=documented(404, 409, 415, 429, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file", "path"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "path": {"type": "string"},
                        },
                    }
                }
            },
        }
    },
)
async def upload(
    sandbox_id: str, request: Request, caller: CallerDep, service: ServiceDep
) -> Uploaded:
    """Store a file of any size at `path`. With `path` before `file` it needs no temporary file."""
    with _bays_limits(), metrics.uploading() as counted:
        async with (
            _using(service, caller, sandbox_id, "files:write") as use,
            upload_slot(request, caller),
        ):
            form = FileForm(request, "path")
            most = use.active.policy.limits.file_size_max
            async with form.read(service.settings.data_dir, most) as (path, content):
                size = await use.conversation().files.write_stream(relative(path), content)
        counted.size = size
    await _record(service, use, "file.write", path=path, size=size)
    return Uploaded(path=path, size=size)


@router.get(
    "/download",
    response_class=Response,
    responses={
        **documented(404, 409, 416, 429, 507),
        **SENT,
    },
)
@router.head("/download", include_in_schema=False)
async def download(
    sandbox_id: str,
    path: Path,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    stack: StackDep,
) -> Response:
    """Send a file of any size."""
    relative(path)
    use = await stack.enter_async_context(_using(service, caller, sandbox_id, "files:read"))
    stream = await stack.enter_async_context(await use.conversation().files.open_stream(path))
    return files_response(request, stream, name=stream.entry.name)


def relative(path: str, field: str = "path") -> str:
    """Return `path`, which is relative to the workspace in Bay. Raise InvalidPath, which names the
    `field` of the request."""
    try:
        if path.startswith("/"):
            raise invalid_path("absolute_path", "the path must be relative to the workspace")
        resolve(path)
    except InvalidPath as error:
        error.details["field"] = field
        raise
    return path


def _using(
    service: Service, caller: Caller, sandbox_id: str, scope: str, *, frees: bool = False
) -> SandboxLease:
    """Lease the sandbox. It checks the bounds of a token before the body is read."""
    return service.sandboxes.using(
        caller, sandbox_id, scope=scope, frees=frees, conversation=DEFAULT_CONVERSATION
    )


async def _record(service: Service, use: SandboxLease, what: str, **details: Any) -> None:
    named = {"conversation": DEFAULT_CONVERSATION, **details}
    await service.recording.record(use.caller, what, use.id, **named)


def _shown(listing: Listing) -> list[FileEntry]:
    return sorted(
        (entry for entry in listing if not entry.name.startswith(".")),
        key=lambda entry: (entry.kind != "directory", entry.name.lower(), entry.name),
    )


async def _text(files: WorkspaceFiles, path: str) -> str:
    """Return the text of a file. Raise TooLarge, and BadRequest `not_text` if it is not UTF-8."""
    async with await files.open_stream(path) as stream:
        if stream.size > CONTENT_MAX:
            raise too_large(path, CONTENT_MAX)
        content = b"".join([chunk async for chunk in stream.chunks()])
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is not UTF-8 text", code="not_text", hint="download it") from None


@contextmanager
def _bays_limits() -> Iterator[None]:
    """Raise TooLarge with the code that Bay has for every limit."""
    try:
        yield
    except TooLarge as error:
        raise TooLarge(
            error.message, code="quota_exceeded", hint=error.hint, details=error.details
        ) from error
