"""Cargos: workspaces with an id, which outlive the sandboxes that use them."""

from fastapi import APIRouter, Request, Response

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented, iso
from sbx.api.v1.bay.idempotency import TAKES_KEY, Answer, answered, encoded
from sbx.api.v1.bay.models import CargoList, CargoResponse, Limit, NewCargo
from sbx.service.models import WorkspaceView

router = APIRouter(prefix="/v1/cargos", tags=["cargos"])
_DEFAULT_MB = 1024  # also shown for a managed cargo, whose limit is in its policy


@router.post(
    "",
    status_code=201,
    response_model=CargoResponse,
    responses=documented(409, 429),
    openapi_extra=TAKES_KEY,
)
async def create(
    new: NewCargo, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    async def work() -> Answer:
        size = _DEFAULT_MB if new.size_limit_mb is None else new.size_limit_mb
        cargo = await service.workspaces.create(caller, size_limit_mb=size)
        await service.recording.record(caller, "cargo.create", cargo.id, size_limit_mb=size)
        return 201, encoded(_shown(cargo))

    return await answered(request, service, caller, new, work)


@router.get("", responses=documented())
async def list_(
    caller: CallerDep,
    service: ServiceDep,
    limit: Limit = 50,
    cursor: str | None = None,
    managed: bool = False,
) -> CargoList:
    """List the external cargos, or with `managed` those that sandboxes created for themselves."""
    page = service.workspaces.list(caller, limit=limit, cursor=cursor, managed=managed)
    return CargoList(items=[_shown(cargo) for cargo in page.items], next_cursor=page.next_cursor)


@router.get("/{cargo_id}", responses=documented(404))
async def get(cargo_id: str, caller: CallerDep, service: ServiceDep) -> CargoResponse:
    return _shown(service.workspaces.get(caller, cargo_id))


@router.delete("/{cargo_id}", status_code=204, responses=documented(404, 409))
async def delete(cargo_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Delete a cargo. Refused while a sandbox uses it."""
    await service.workspaces.delete(caller, cargo_id)
    await service.recording.record(caller, "cargo.delete", cargo_id)


def _shown(cargo: WorkspaceView) -> CargoResponse:
    return CargoResponse(
        id=cargo.id,
        managed=cargo.managed_by is not None,
        managed_by_sandbox_id=cargo.managed_by,
        size_limit_mb=cargo.size_limit_mb or _DEFAULT_MB,
        created_at=iso(cargo.created_at),
        last_accessed_at=iso(cargo.last_accessed_at),
    )
