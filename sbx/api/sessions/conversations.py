"""Conversations: listed, told to a model, deleted."""

from fastapi import APIRouter

from sbx.api.callers import CallerDep, HouseDep
from sbx.api.errors import documented
from sbx.api.sessions.asked import SessionDep, demand, no_conversation, record
from sbx.api.sessions.models import ConversationBody, ConversationList, Prompt
from sbx.runtime.sessions import check_id
from sbx.runtime.store import uploads
from sbx.workspace import Upload

router = APIRouter(prefix="/api/v1/sessions/{session_id}/conversations", tags=["conversations"])
_ROOT = "/workspace/uploads/temparea/"
_GENERATED = "/workspace/uploads/generated/"
_TOLD = 500  # files in one prompt


@router.get("", responses=documented(404, 409))
async def list_(view: SessionDep, caller: CallerDep, house: HouseDep) -> ConversationList:
    """All of them, or the one that a token is for."""
    found = await house.sandboxes.conversations(caller, view.id)
    return ConversationList(
        items=[
            ConversationBody(
                conversation_id=one.name,
                created_at=one.created_at,
                status=one.status,
                files=one.files,
                bytes=one.bytes,
            )
            for one in found
            if caller.sees(view.user_id, view.agent_id, one.name)
        ]
    )


@router.get("/{conversation_id}/prompt", responses=documented(404, 409))
async def prompt(
    conversation_id: str, view: SessionDep, caller: CallerDep, house: HouseDep
) -> Prompt:
    """What a model should be told of the files; made anew at each call."""
    name = check_id("conversation_id", conversation_id)
    demand(caller, view, "files:read", name)
    if not await uploads.conversation_exists(house.store, view.id, name):
        raise no_conversation(name)
    async with house.sandboxes.using(caller, view.id, scope="files:read", starts=False) as use:
        found = await use.conversation(name).uploads.list()
    return Prompt(prompt=told(found))


@router.delete("/{conversation_id}", status_code=204, responses=documented(404, 409))
async def delete(
    conversation_id: str, view: SessionDep, caller: CallerDep, house: HouseDep
) -> None:
    """Ends its kernel and removes its files, not to be recovered; again, it does nothing."""
    name = check_id("conversation_id", conversation_id)
    demand(caller, view, "files:write", name)
    await house.sandboxes.delete_conversation(caller, view.id, name)
    await record(house, caller, "conversation.delete", view, conversation=name)


def told(found: tuple[Upload, ...]) -> str:
    """The text for a system prompt. Names are the user's: each is a line of its own, and what does
    not print is escaped, so that none of them reads as a sentence of ours."""
    lines = [f"The files that the user uploaded are in {_ROOT}, which is read-only."]
    if found:
        lines.append("These are all of them, with their full paths:")
        lines += [f"- {_plain(upload.path)} ({upload.size} bytes)" for upload in found[:_TOLD]]
        if len(found) > _TOLD:
            lines.append(f"- and {len(found) - _TOLD} more: list {_ROOT}")
    else:
        lines.append("There are none yet.")
    lines.append(f"Write the files that you generate to {_GENERATED}.")
    lines.append("The working directory is /workspace; what is written there is kept as well.")
    return "\n".join(lines)


def _plain(path: str) -> str:
    return path if path.isprintable() else ascii(path)
