"""Mounts: directories of the host inside live sandboxes of any owner. They are for the operator,
because they name paths of this host. The setting `mount_dirs` lists the allowed directories."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, StringConstraints

from sbx.api.auth import OperatorDep, ServiceDep
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented
from sbx.protocol.mounts import Mount

router = APIRouter(prefix="/v1/admin/sandboxes/{sandbox_id}/mounts", tags=["operator"])
_ERRORS = documented(404, 409)
Target = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class NewMount(RequestBody):
    """`source` is a directory of the service's host, by its absolute path. `target` is
    `/mnt/NAME`, or `/workspace/shared/NAME` to write to it; null: `/mnt` and the name of the
    directory."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=4095)]
    target: Target | None = None
    read_only: bool = True


class MountList(BaseModel):
    items: list[Mount]


@router.get("", responses=_ERRORS)
async def mounts(sandbox_id: str, caller: OperatorDep, service: ServiceDep) -> MountList:
    """List the mounts by the path inside. No kernel starts."""
    sandbox = service.sandboxes.index.get_as_operator(caller, sandbox_id)
    return MountList(items=list(sandbox.mounted))


@router.post("", status_code=201, responses=_ERRORS)
async def mount(sandbox_id: str, new: NewMount, caller: OperatorDep, service: ServiceDep) -> Mount:
    """Mount a directory into every live and later kernel of the sandbox, until it is unmounted, the
    sandbox is deleted, or the service ends."""
    sandbox = service.sandboxes.index.get_as_operator(caller, sandbox_id)
    mount = await sandbox.mount(new.source, new.target, read_only=new.read_only)
    await service.recording.record(caller, "sandbox.mount", sandbox_id, **asdict(mount))
    return mount


@router.delete("", status_code=204, responses=_ERRORS)
async def unmount(
    sandbox_id: str, target: Annotated[Target, Query()], caller: OperatorDep, service: ServiceDep
) -> None:
    """Unmount a directory. Its open files stay open."""
    await service.sandboxes.index.get_as_operator(caller, sandbox_id).unmount(target)
    await service.recording.record(caller, "sandbox.unmount", sandbox_id, target=target)
