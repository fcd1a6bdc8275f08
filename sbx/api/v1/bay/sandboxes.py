"""Sandboxes: create, list, extend, stop, delete; and their events."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from sbx import __version__
from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.errors import documented, iso
from sbx.api.v1.bay.idempotency import TAKES_KEY, Answer, answered, encoded
from sbx.api.v1.bay.models import (
    BayExtension,
    ContainerRuntime,
    EventList,
    Limit,
    NewSandbox,
    SandboxEvent,
    SandboxList,
    SandboxResponse,
    StopBody,
    iso_or_none,
)
from sbx.errors import NotFound, SbxError
from sbx.protocol.pages import Page
from sbx.protocol.usage import usage_to_json
from sbx.service.caller import Caller
from sbx.service.lifecycle import State
from sbx.service.models import SandboxView
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])
_ENDED_S = 30 * 86400.0
_ENDED_MAX = 200


class SandboxDetail(SandboxResponse):
    """`kernels`: live ones; `busy`: whether code runs. `usage` is null without a kernel."""

    owner: str
    session_id: str | None
    user_id: str | None
    agent_id: str | None
    conversations: int
    kernels: int
    busy: bool
    stopped: bool
    failure: dict[str, Any] | None
    usage: dict[str, Any] | None


class EndedSandboxBody(BaseModel):
    """`deleted_at` in seconds of the epoch."""

    id: str
    profile: str
    session_id: str | None
    deleted_at: float
    cause: str | None


class DetailedList(BaseModel):
    items: list[SandboxDetail]
    next_cursor: str | None
    ended: list[EndedSandboxBody]


@router.post(
    "",
    status_code=201,
    response_model=SandboxResponse,
    responses=documented(404, 409, 429),
    openapi_extra=TAKES_KEY,
)
async def create(
    new: NewSandbox, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Create a sandbox. Its kernel starts at the first use."""

    async def work() -> Answer:
        view = await service.sandboxes.create(
            caller,
            policy=new.profile,
            narrower=new.narrower,
            env=new.env,
            workspace_id=new.cargo_id,
            ttl_s=new.ttl if new.ttl is not None and new.ttl > 0 else None,
        )
        await service.recording.record(
            caller, "sandbox.create", view.id, profile=view.policy_name, cargo=new.cargo_id
        )
        return 201, encoded(shown(view))

    return await answered(request, service, caller, new, work)


@router.get("", responses=documented())
async def list_(
    caller: CallerDep,
    service: ServiceDep,
    limit: Limit = 50,
    cursor: str | None = None,
    status: str | None = None,
    detail: bool = False,
    ended: bool = False,
) -> SandboxList | DetailedList:
    """List the caller's sandboxes by id. Ignore an unknown status, as Bay does. `detail` adds their
    owners, kernels and usage, which does not count as a use; `ended` adds, with it, the records of
    those that were deleted within 30 days."""
    state = State.named(status)
    page = await service.sandboxes.list(caller, limit=limit, cursor=cursor, state=state)
    if detail:
        return await detailed(service, caller, page, ended=ended and cursor is None)
    return SandboxList(items=[shown(view) for view in page.items], next_cursor=page.next_cursor)


@router.get("/{sandbox_id}", responses=documented(404))
async def get(
    sandbox_id: str, caller: CallerDep, service: ServiceDep, detail: bool = False
) -> SandboxDetail | SandboxResponse:
    view = await service.sandboxes.get(caller, sandbox_id)
    return await _detail(service, caller, view) if detail else shown(view, containers=True)


@router.post(
    "/{sandbox_id}/extend_ttl",
    response_model=SandboxResponse,
    responses=documented(404, 409),
    openapi_extra=TAKES_KEY,
)
async def extend_ttl(
    sandbox_id: str,
    extension: BayExtension,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
) -> Response:
    """Extend the lifetime by `extend_by` seconds, from its end or from now if that is later."""

    async def work() -> Answer:
        view = await service.sandboxes.extend(caller, sandbox_id, extension.extend_by)
        await service.recording.record(caller, "sandbox.extend", view.id, by_s=extension.extend_by)
        return 200, encoded(shown(view))

    return await answered(request, service, caller, extension, work)


@router.post("/{sandbox_id}/keepalive", responses=documented(404, 409))
async def keepalive(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> OkBody:
    """Move the idle deadline, and nothing else."""
    await service.sandboxes.keepalive(caller, sandbox_id)
    return OkBody()


@router.post("/{sandbox_id}/stop", responses=documented(404, 409))
async def stop(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> StopBody:
    """Stop the kernels and keep the files. The next use starts a new kernel."""
    await service.sandboxes.stop(caller, sandbox_id)
    await service.recording.record(caller, "sandbox.stop", sandbox_id)
    return StopBody()


@router.post("/{sandbox_id}/resume", responses=documented(404, 409, 429))
async def resume(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> SandboxResponse:
    """Start the kernel now instead of at the next use."""
    view = await service.sandboxes.resume(caller, sandbox_id)
    await service.recording.record(caller, "sandbox.resume", view.id)
    return shown(view, containers=True)


@router.delete("/{sandbox_id}", status_code=204, responses=documented(404, 409))
async def delete(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Delete the sandbox and its files. Keep a cargo that was created separately. By the contract
    of Bay, a second call succeeds, and does nothing."""
    try:
        await service.sandboxes.delete(caller, sandbox_id)
    except NotFound:
        if not await service.events.has_ended(caller, sandbox_id):
            raise
        return
    await service.recording.record(caller, "sandbox.delete", sandbox_id)


@router.get(
    "/{sandbox_id}/events",
    response_model=EventList,
    responses={
        **documented(404),
        200: {"content": sse.DOCUMENTED},
    },
)
async def events(
    sandbox_id: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    limit: Limit = 50,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,15}$")] = None,
) -> Any:
    """List the events of the sandbox, or stream them if `Accept` requests a stream."""
    after = int(cursor) if cursor else sse.last_event_id(request)
    if sse.accepts_events(request):
        await service.sandboxes.get(caller, sandbox_id)
        return await sse.stream(_followed(service, caller, sandbox_id, after), request=request)
    page = await service.events.page(caller, sandbox_id, after=after, limit=limit)
    return EventList(items=[_event(event) for event in page.items], next_cursor=page.next_cursor)


async def _followed(
    service: ServiceDep, caller: CallerDep, sandbox_id: str, after: int
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    async with aclosing(service.events.follow(caller, sandbox_id, after=after)) as events:
        async for event in events:
            yield event.seq, _event(event).model_dump(mode="json")


def _event(row: Any) -> SandboxEvent:
    return SandboxEvent(
        id=row.seq, at=iso(row.at), type=row.type, cause=row.cause, details=row.details or {}
    )


def shown(view: SandboxView, *, containers: bool = False) -> SandboxResponse:
    """Return a sandbox in Bay's form. Its only container is the live kernel."""
    live = containers and view.state is State.READY
    return SandboxResponse(
        id=view.id,
        status=str(view.state),
        profile=view.policy_name,
        cargo_id=view.workspace_id,
        capabilities=list(view.policy.capabilities),
        created_at=iso(view.created_at),
        expires_at=iso_or_none(view.expires_at),
        idle_expires_at=iso_or_none(view.idle_expires_at),
        containers=[_kernel(view)] if live else None,
    )


def _kernel(view: SandboxView) -> ContainerRuntime:
    return ContainerRuntime(
        name="kernel",
        runtime_type="sbx",
        status="running",
        version=__version__,
        capabilities=list(view.policy.capabilities),
        healthy=True,
    )


async def detailed(
    service: Service, caller: Caller, page: Page[SandboxView], *, ended: bool
) -> DetailedList:
    """Return a page with details, and with `ended` the records of deleted sandboxes."""
    since = service.clock.now() - _ENDED_S
    records = await service.events.ended(caller, since=since, limit=_ENDED_MAX) if ended else ()
    return DetailedList(
        items=[await _detail(service, caller, view) for view in page],
        next_cursor=page.next_cursor,
        ended=[
            EndedSandboxBody(
                id=row.id,
                profile=row.policy_name,
                session_id=row.session_id,
                deleted_at=row.deleted_at or 0.0,
                cause=row.cause,
            )
            for row in records
        ],
    )


async def _detail(service: Service, caller: Caller, view: SandboxView) -> SandboxDetail:
    sandbox = service.sandboxes.index.get(caller, view.id)
    names = await service.sandboxes.conversation_names(caller, view.id)
    live = [
        context
        for context in service.sandboxes.live(view.id)
        if caller.sees(view.user_id, view.agent_id, context.conversation)
    ]
    return SandboxDetail(
        **shown(view, containers=True).model_dump(),
        owner=view.owner,
        session_id=view.session_id,
        user_id=view.user_id,
        agent_id=view.agent_id,
        conversations=len(names),
        kernels=len(live),
        busy=any(context.busy for context in live),
        stopped=view.stopped,
        failure=view.failure,
        usage=await usage_of(caller, sandbox) if caller.may("execute") else None,
    )


async def usage_of(caller: Caller, sandbox: ServiceSandbox) -> dict[str, Any] | None:
    """Return the usage of an open sandbox with a kernel in a conversation that the caller sees;
    None for any other."""
    if sandbox.active is None:
        return None
    row = sandbox.row
    conversations = [
        context.conversation
        for context in sandbox.active.live
        if caller.sees(row.user_id, row.agent_id, context.conversation)
    ]
    conversation = sandbox.active.existing(conversations[0]) if conversations else None
    if conversation is None:
        return None
    try:
        return usage_to_json(await conversation.usage())
    except SbxError:  # it ends just now
        return None
