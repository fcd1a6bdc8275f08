"""Sessions: ensure, show, stop, extend, delete. Their conversations: list, describe, delete."""

from fastapi import APIRouter, Response

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import ConversationBody
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionDep, SessionsDep, demand, demand_existing
from sbx.api.sessions_v1.models import (
    ConversationList,
    Limit,
    NewSession,
    Prompt,
    SessionBody,
    SessionExtension,
    SessionList,
    shown,
)
from sbx.service.caller import Caller
from sbx.service.ids import check_id
from sbx.service.models import SandboxView
from sbx.service.service import Service
from sbx.service.sessions import Sessions, SessionStatus
from sbx.workspace.uploads import uploads_told

router = APIRouter(prefix="/api/v1/sessions", tags=["sessions"])
of_conversations = APIRouter(
    prefix="/api/v1/sessions/{session_id}/conversations", tags=["conversations"]
)


@router.post(
    "",
    status_code=201,
    responses={**documented(404, 409, 429), 200: {"model": SessionBody}},
)
async def ensure(
    new: NewSession,
    response: Response,
    caller: CallerDep,
    service: ServiceDep,
    sessions: SessionsDep,
) -> SessionBody:
    """Return the session of a user with an agent: 201 if it is new, 200 if it existed."""
    view, done = await sessions.ensure(caller, new.ask())
    response.status_code = 201 if done == "created" else 200
    return await _shown(service, sessions, caller, view)


@router.get("", responses=documented())
async def list_(
    caller: CallerDep,
    service: ServiceDep,
    sessions: SessionsDep,
    limit: Limit = 50,
    cursor: str | None = None,
    status: SessionStatus | None = None,
) -> SessionList:
    """List the sessions of the caller, by the ids of their sandboxes."""
    items: list[SessionBody] = []
    while True:
        page = await service.sandboxes.list(caller, limit=limit, cursor=cursor, sessions_only=True)
        for view in page.items:
            if status is None or sessions.status(view) == status:
                items.append(await _shown(service, sessions, caller, view))
                if len(items) == limit:
                    last = view is page.items[-1] and page.next_cursor is None
                    return SessionList(items=items, next_cursor=None if last else view.id)
        cursor = page.next_cursor
        if cursor is None:
            return SessionList(items=items, next_cursor=None)


@router.get("/{session_id}", responses=documented(404))
async def get(
    view: SessionDep, caller: CallerDep, service: ServiceDep, sessions: SessionsDep
) -> SessionBody:
    return await _shown(service, sessions, caller, view)


@router.delete("/{session_id}", status_code=204, responses=documented(404, 409))
async def delete(
    session_id: str, caller: CallerDep, service: ServiceDep, sessions: SessionsDep
) -> None:
    """Delete a session with the files and the histories of all conversations."""
    await sessions.delete(caller, session_id)
    await service.recording.record(caller, "session.delete", session_id)


@router.post("/{session_id}/stop", responses=documented(404, 409))
async def stop(
    view: SessionDep, caller: CallerDep, service: ServiceDep, sessions: SessionsDep
) -> SessionBody:
    """End its kernels and the runs of its agents, and keep its files. Pending approvals are
    denied."""
    demand(caller, view, "execute")
    await service.sandboxes.stop(caller, view.id)
    await service.recording.record_session(caller, "session.stop", view)
    return await _shown(service, sessions, caller, await service.sandboxes.get(caller, view.id))


@router.post("/{session_id}/extend_ttl", responses=documented(404, 409))
async def extend_ttl(
    extension: SessionExtension,
    view: SessionDep,
    caller: CallerDep,
    service: ServiceDep,
    sessions: SessionsDep,
) -> SessionBody:
    """Expire `extend_by` seconds later than before, or later than now if that is later."""
    demand(caller, view, "admin")
    later = await service.sandboxes.extend(caller, view.id, extension.extend_by)
    await service.recording.record_session(caller, "session.extend", view, by=extension.extend_by)
    return await _shown(service, sessions, caller, later)


async def _shown(
    service: Service, sessions: Sessions, caller: Caller, view: SandboxView
) -> SessionBody:
    names = await service.sandboxes.conversation_names(caller, view.id)
    return shown(view, sessions.status(view), sessions.files(view), list(names))


# -- conversations --------------------------------------------------------------------------------


@of_conversations.get("", responses=documented(404, 409))
async def conversations(
    view: SessionDep, caller: CallerDep, service: ServiceDep
) -> ConversationList:
    """List the conversations within the bounds of the caller."""
    conversations = await service.sandboxes.conversations(caller, view.id)
    return ConversationList(items=[ConversationBody.of(each) for each in conversations])


@of_conversations.get("/{conversation_id}/prompt", responses=documented(404, 409))
async def prompt(
    conversation_id: str, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> Prompt:
    """Return a text about the files for the system prompt of a model, current at each call."""
    name = check_id("conversation_id", conversation_id)
    await demand_existing(service, caller, view, "files:read", name)
    async with service.sandboxes.using(caller, view.id, scope="files:read", starts=False) as use:
        conversation = use.conversation(name)
        uploads, around = await conversation.uploads.list(), await conversation.surroundings()
    return Prompt(prompt=uploads_told(uploads, around))


@of_conversations.delete("/{conversation_id}", status_code=204, responses=documented(404, 409))
async def delete_conversation(
    conversation_id: str, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> None:
    """End its kernel, and delete its files, its history and its chat, also after the session has
    expired. A token needs the scopes `files:write` and `execute`, because runs end."""
    name = check_id("conversation_id", conversation_id)
    demand(caller, view, "files:write", name)
    demand(caller, view, "execute", name)
    await service.sandboxes.delete_conversation(caller, view.id, name)
    await service.recording.record_session(caller, "conversation.delete", view, conversation=name)
