"""Conversations of a session: list, describe to a model, delete."""

from fastapi import APIRouter

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import ConversationBody
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionDep, demand, demand_existing
from sbx.api.sessions_v1.models import ConversationList, Prompt
from sbx.service.ids import check_id
from sbx.workspace.uploads import uploads_told

router = APIRouter(prefix="/api/v1/sessions/{session_id}/conversations", tags=["conversations"])


@router.get("", responses=documented(404, 409))
async def list_(view: SessionDep, caller: CallerDep, service: ServiceDep) -> ConversationList:
    """List the conversations within the bounds of the caller."""
    conversations = await service.sandboxes.conversations(caller, view.id)
    return ConversationList(items=[ConversationBody.of(each) for each in conversations])


@router.get("/{conversation_id}/prompt", responses=documented(404, 409))
async def prompt(
    conversation_id: str, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> Prompt:
    """Return a text about the files for the system prompt of a model, current at each call."""
    name = check_id("conversation_id", conversation_id)
    await demand_existing(service, caller, view, "files:read", name)
    async with service.sandboxes.using(caller, view.id, scope="files:read", starts=False) as use:
        uploads = await use.conversation(name).uploads.list()
    return Prompt(prompt=uploads_told(uploads))


@router.delete("/{conversation_id}", status_code=204, responses=documented(404, 409))
async def delete(
    conversation_id: str, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> None:
    """End its kernel and remove its files. A second call does nothing. A token needs the scopes
    `files:write` and `execute`, because runs end."""
    name = check_id("conversation_id", conversation_id)
    demand(caller, view, "files:write", name)
    demand(caller, view, "execute", name)
    await service.sandboxes.delete_conversation(caller, view.id, name)
    await service.recording.record_session(caller, "conversation.delete", view, conversation=name)
