"""Files of any conversation moved, copied, edited in place, and given permissions."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field, StringConstraints

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.errors import documented
from sbx.api.v1.files import conversation_lease

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}", tags=["native"]
)
_ERRORS = documented(404, 409, 413, 415, 429, 507)
Named = Annotated[str, StringConstraints(max_length=16_384)]
Text = Annotated[str, StringConstraints(max_length=1 << 20)]


class MoveRequest(BaseModel):
    """From where to where; `overwrite`: a file may replace a file."""

    source: Named
    target: Named
    overwrite: bool = False


class CopiedBody(BaseModel):
    """`complete` is false where something was left out that is no file, directory or symlink."""

    files: int
    bytes: int
    complete: bool


class Replacement(BaseModel):
    """`count`: how often `old` must be there; null: once at least."""

    path: Named
    old: Text
    new: Text
    count: Annotated[int, Field(ge=0, le=1 << 31)] | None = 1


class ReplacedBody(BaseModel):
    replaced: int


class Mode(BaseModel):
    """`mode` as a number: 420 is 0644."""

    path: Named
    mode: Annotated[int, Field(strict=True, ge=0, le=0o7777)]


@router.post("/move", responses=_ERRORS)
async def move(
    sandbox_id: str, conversation: str, way: MoveRequest, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Move or rename a file, a symlink or a directory."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        await talk.files.move(way.source, way.target, overwrite=way.overwrite)
    told = {"path": way.source, "target": way.target}
    await service.recording.record(caller, "file.move", view.id, conversation=conversation, **told)
    return OkBody()


@router.post("/copy", responses=_ERRORS)
async def copy(
    sandbox_id: str, conversation: str, way: MoveRequest, caller: CallerDep, service: ServiceDep
) -> CopiedBody:
    """Copy a file, or a directory with all below it."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        copied = await talk.files.copy(way.source, way.target, overwrite=way.overwrite)
    told = {"path": way.source, "target": way.target, "size": copied.bytes}
    await service.recording.record(caller, "file.copy", view.id, conversation=conversation, **told)
    return CopiedBody(**asdict(copied))


@router.post("/replace", responses=_ERRORS)
async def replace(
    sandbox_id: str, conversation: str, asked: Replacement, caller: CallerDep, service: ServiceDep
) -> ReplacedBody:
    """Replace a text in a file, exactly as often as it is said to be there, in one step."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        count = await talk.files.replace(asked.path, asked.old, asked.new, count=asked.count)
    await service.recording.record(
        caller, "file.write", view.id, conversation=conversation, path=asked.path
    )
    return ReplacedBody(replaced=count)


@router.post("/chmod", responses=_ERRORS)
async def chmod(
    sandbox_id: str, conversation: str, asked: Mode, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Set permissions; set-id bits and the sticky bit are refused."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        await talk.files.chmod(asked.path, asked.mode)
    told = {"path": asked.path, "mode": f"{asked.mode:o}"}
    await service.recording.record(caller, "file.chmod", view.id, conversation=conversation, **told)
    return OkBody()
