"""The life of a ship, and its files up and down."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from sbx.api.auth import CallerDep, ServiceDep, StackDep
from sbx.api.bodies import ForeignBody, body_of
from sbx.api.downloads import files_response
from sbx.api.multipart import FileForm
from sbx.api.shipyard.operations import SessionCall, absolute, operate, outside_is_denied
from sbx.api.shipyard.ships import SURFACE, SessionName, ShipsDep, shown
from sbx.api.slots import upload_slot
from sbx.api.templates import limits_within, policy_of
from sbx.errors import Conflict, NotFound
from sbx.telemetry import metrics

router = APIRouter(prefix=f"/{SURFACE}", include_in_schema=False)

_Seconds = Annotated[int, Field(gt=0)]


class ShipSpec(ForeignBody):
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory: str | None = None


class NewShip(ForeignBody):
    ttl: _Seconds
    max_session_num: Annotated[int, Field(gt=0, le=10_000)] = 1
    spec: ShipSpec | None = None


class ShipExtension(ForeignBody):
    ttl: _Seconds


class ShipOperation(ForeignBody):
    type: str
    payload: dict[str, Any] = Field(default_factory=dict)


@router.post("/ship", status_code=201)
async def create(
    request: Request, session: SessionName, caller: CallerDep, service: ServiceDep, ships: ShipsDep
) -> dict[str, Any]:
    """Return the ship of a session, see `Ships.take`."""
    new = await body_of(request, NewShip)
    policy = policy_of(request.app.state.settings.templates, SURFACE)
    spec = new.spec or ShipSpec()
    view = await ships.take(
        caller,
        session,
        policy=policy,
        ttl_s=new.ttl,
        sessions_max=new.max_session_num,
        narrower=await limits_within(service, policy, cpus=spec.cpus, memory=spec.memory),
    )
    return shown(view, now=service.clock.now())


@router.get("/ships")
async def list_(caller: CallerDep, service: ServiceDep, ships: ShipsDep) -> list[dict[str, Any]]:
    """List the caller's running ships."""
    now = service.clock.now()
    return [shown(await ship.view(), now=now) for ship in ships.every(caller) if not ship.expired]


@router.get("/ship/logs/{ship_id}")
async def logs(ship_id: str, caller: CallerDep, service: ServiceDep) -> dict[str, str]:
    """Return the events of a ship, a line each: no container has logs. "" for an unknown ship."""
    try:
        page = await service.events.page(caller, ship_id, after=0, limit=500)
    except NotFound:
        return {"logs": ""}
    lines = (" ".join(filter(None, (each.type, each.cause))) for each in page.items)
    return {"logs": "".join(f"{line}\n" for line in lines)}


@router.get("/ship/{ship_id}")
async def get(
    ship_id: str, caller: CallerDep, service: ServiceDep, ships: ShipsDep
) -> dict[str, Any]:
    return shown(await ships.get(caller, ship_id).view(), now=service.clock.now())


@router.delete("/ship/{ship_id}", status_code=204)
async def delete(ship_id: str, caller: CallerDep, service: ServiceDep, ships: ShipsDep) -> None:
    """Delete a ship and its files. The SDK has no call for it."""
    ship = ships.get(caller, ship_id)
    await service.sandboxes.delete(caller, ship.id)
    await service.recording.record(caller, "sandbox.delete", ship.id)


@router.post("/ship/{ship_id}/extend-ttl")
async def extend(
    ship_id: str, request: Request, caller: CallerDep, service: ServiceDep, ships: ShipsDep
) -> dict[str, Any]:
    """Let a ship expire `ttl` seconds after now, and after each later use."""
    new = await body_of(request, ShipExtension)
    ship = service.sandboxes.index.get_whole(caller, ships.get(caller, ship_id).id, "admin")
    try:
        await ship.set_expiry(new.ttl)
    except Conflict as error:
        raise NotFound("Ship not found or not running") from error
    await service.recording.record(caller, "sandbox.extend", ship.id, by_s=new.ttl)
    return shown(await ship.view(), now=service.clock.now())


@router.post("/ship/{ship_id}/exec")
async def execute(
    ship_id: str,
    request: Request,
    session: SessionName,
    caller: CallerDep,
    service: ServiceDep,
    ships: ShipsDep,
) -> Response:
    """Do one operation, see operations.py. Each failure of an operation is a 400."""
    operation = await body_of(request, ShipOperation)
    call = SessionCall(ships, service, caller, ship_id, session)
    return await operate(operation.type, operation.payload, call)


@router.post("/ship/{ship_id}/upload")
async def upload(
    ship_id: str,
    request: Request,
    session: SessionName,
    caller: CallerDep,
    service: ServiceDep,
    ships: ShipsDep,
) -> dict[str, Any]:
    """Store a file of any size."""
    with metrics.uploading() as counted, outside_is_denied():
        async with (
            ships.session(caller, ship_id, session, "files:write") as use,
            upload_slot(request, caller),
        ):
            form = FileForm(request, "file_path")
            most = use.active.policy.limits.file_size_max
            async with form.read(service.settings.data_dir, most) as (name, content):
                path = absolute(name)
                files = use.conversation(session).files
                counted.size = await files.write_stream(path, content)
    await service.recording.record(
        caller, "file.write", ship_id, conversation=session, path=path, size=counted.size
    )
    message = "File uploaded successfully"
    return {"success": True, "message": message, "file_path": path, "error": None}


@router.get("/ship/{ship_id}/download")
async def download(
    ship_id: str,
    file_path: Annotated[str, Query()],
    request: Request,
    session: SessionName,
    caller: CallerDep,
    ships: ShipsDep,
    stack: StackDep,
) -> Response:
    """Send a file of any size."""
    use = await stack.enter_async_context(ships.session(caller, ship_id, session, "files:read"))
    with outside_is_denied():
        opened = await use.conversation(session).files.open_stream(absolute(file_path))
    stream = await stack.enter_async_context(opened)
    return files_response(request, stream, name=stream.entry.name)
