"""Directories of the host, shown inside sandboxes that live: the operator's, for he names a path of
this host. Of whom a sandbox is does not matter; what may be attached says the setting
`attach_dirs`."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, StringConstraints

from sbx.api.auth import OperatorDep, ServiceDep
from sbx.api.errors import documented
from sbx.protocol.mounts import Mount

router = APIRouter(prefix="/v1/admin/sandboxes/{sandbox_id}/attachments", tags=["operator"])
_ERRORS = documented(404, 409)
Target = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class NewAttachment(BaseModel):
    """`source` is a directory of the service's host, by its absolute path. `target` is
    `/mnt/NAME`, or `/workspace/shared/NAME` for what is to be written to; null: `/mnt` and the name
    that the directory has."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=4095)]
    target: Target | None = None
    read_only: bool = True


class AttachmentBody(BaseModel):
    source: str
    target: str
    read_only: bool


class AttachmentList(BaseModel):
    items: list[AttachmentBody]


@router.get("", responses=_ERRORS)
async def attachments(sandbox_id: str, caller: OperatorDep, service: ServiceDep) -> AttachmentList:
    """What is attached, by the path inside; nothing starts for this."""
    found = service.sandboxes.attached(caller, sandbox_id)
    return AttachmentList(items=[_body(one) for one in found])


@router.post("", status_code=201, responses=_ERRORS)
async def attach(
    sandbox_id: str, new: NewAttachment, caller: OperatorDep, service: ServiceDep
) -> AttachmentBody:
    """Show a directory in every kernel of the sandbox, those that live and those that start later,
    until it is detached, the sandbox is deleted, or the service ends."""
    made = await service.sandboxes.attach(
        caller, sandbox_id, new.source, new.target, read_only=new.read_only
    )
    told = {"source": made.source, "target": made.target, "read_only": made.read_only}
    await service.recording.record(caller, "sandbox.attach", sandbox_id, **told)
    return _body(made)


@router.delete("", status_code=204, responses=_ERRORS)
async def detach(
    sandbox_id: str, target: Annotated[Target, Query()], caller: OperatorDep, service: ServiceDep
) -> None:
    """Show it no more; what is open of it stays open."""
    await service.sandboxes.detach(caller, sandbox_id, target)
    await service.recording.record(caller, "sandbox.detach", sandbox_id, target=target)


def _body(one: Mount) -> AttachmentBody:
    return AttachmentBody(source=one.source, target=one.target, read_only=one.read_only)
