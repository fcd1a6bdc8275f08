"""Sandboxes with all that a person wants to see of them at once, without a use of them."""

from typing import Any

from pydantic import BaseModel

from sbx.api.v1.bay.models import SandboxResponse, shown
from sbx.errors import SbxError
from sbx.protocol.pages import Page
from sbx.protocol.usage import usage_to_json
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

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


async def detailed(
    service: Service, caller: Caller, page: Page[SandboxView], *, ended: bool
) -> DetailedList:
    """Return a page with details, and with `ended` the records of deleted sandboxes."""
    since = service.clock.now() - _ENDED_S
    records = await service.sandboxes.ended(caller, since=since, limit=_ENDED_MAX) if ended else ()
    return DetailedList(
        items=[await _detail(service, caller, view) for view in page],
        next_cursor=page.next_cursor,
        ended=[
            EndedSandboxBody(
                id=row.id,
                profile=row.profile,
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
        usage=await usage_of(sandbox) if caller.may("execute") else None,
    )


async def usage_of(sandbox: ServiceSandbox) -> dict[str, Any] | None:
    """Return the usage of an open sandbox with a kernel; None for any other."""
    if sandbox.active is None:
        return None
    conversations = [context.conversation for context in sandbox.active.live]
    conversation = sandbox.active.existing(conversations[0]) if conversations else None
    if conversation is None:
        return None
    try:
        return usage_to_json(await conversation.usage())
    except SbxError:  # it ends just now
        return None
