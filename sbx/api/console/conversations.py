"""The conversations with agents: list, title, delete."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, StringConstraints

from sbx.api.agent_v1.dependencies import AgentsDep, ChatDep, Named, check_reads
from sbx.api.agent_v1.models import Limit
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented
from sbx.errors import BadRequest
from sbx.service.agents import Agents, ChatFilter, ChatRow, no_conversation
from sbx.service.ids import session_id
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/conversations", tags=["agent"])
Cursor = Annotated[str | None, Query(max_length=200)]
Search = Annotated[str | None, Query(min_length=1, max_length=200)]


class CurrentRun(BaseModel):
    """`waiting`: for the decision of a person."""

    run_id: str
    waiting: bool


class ChatBody(BaseModel):
    """Times are seconds of the epoch. `expires_at` is that of the session; null if it has none, or
    has ended. `pending`: the number of calls that wait for a decision."""

    conversation_id: str
    title: str
    session_id: str
    sandbox_id: str | None
    user_id: str
    agent_id: str
    project_id: str | None
    created_at: float
    last_used_at: float
    expires_at: float | None
    run: CurrentRun | None
    pending: int


class ChatList(BaseModel):
    items: list[ChatBody]
    next_cursor: str | None


class Titled(RequestBody):
    title: Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True)]


@router.get("", responses=documented())
async def list_(
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    limit: Limit = 50,
    cursor: Cursor = None,
    q: Search = None,
    project_id: Named = None,
    user_id: Named = None,
    agent_id: Named = None,
) -> ChatList:
    """List the conversations within the bounds of the caller, the last used first. `q` is a part
    of a title."""
    check_reads(caller, "")
    chosen = ChatFilter(
        owner=caller.owner,
        user_id=user_id,
        agent_id=agent_id,
        project_id=project_id,
        search=q,
        after=_place(cursor),
    )
    page = await agents.list_chats(caller, chosen, limit=limit)
    items = [_body(service, agents, row, pending) for row, pending in page]
    return ChatList(items=items, next_cursor=page.next_cursor)


@router.get("/{conversation_id}", responses=documented(404, 409))
async def get(row: ChatDep, caller: CallerDep, service: ServiceDep, agents: AgentsDep) -> ChatBody:
    check_reads(caller, row.conversation_id)
    return await _of(service, agents, caller, row)


@router.patch("/{conversation_id}", responses=documented(404, 409))
async def rename(
    titled: Titled, row: ChatDep, caller: CallerDep, service: ServiceDep, agents: AgentsDep
) -> ChatBody:
    """Set the title, which is the begin of the first message otherwise."""
    if not caller.may("execute"):
        raise no_conversation(row.conversation_id)
    await agents.rename(row, titled.title)
    return await _of(service, agents, caller, row)


@router.delete("/{conversation_id}", status_code=204, responses=documented(404, 409))
async def delete(
    conversation_id: str,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    user_id: Named = None,
    agent_id: Named = None,
) -> None:
    """Abort the run, and delete the messages, the kernel, the history and the files, also after the
    session has expired. The directory of a project stays. A token needs the scopes `files:write`
    and `execute`."""
    if not (caller.may("execute") and caller.may("files:write")):
        raise no_conversation(conversation_id)
    row = await agents.find_chat(caller, conversation_id, user_id=user_id, agent_id=agent_id)
    await agents.delete_chat(caller, row)
    await service.recording.record(caller, "conversation.delete", conversation_id)


async def _of(service: Service, agents: Agents, caller: "CallerDep", row: ChatRow) -> ChatBody:
    chosen = ChatFilter(
        owner=row.owner,
        user_id=row.user_id,
        agent_id=row.agent_id,
        conversation_id=row.conversation_id,
    )
    page = await agents.list_chats(caller, chosen, limit=1)
    if not page.items:  # it was deleted meanwhile
        raise no_conversation(row.conversation_id)
    return _body(service, agents, *page.items[0])


def _body(service: Service, agents: Agents, row: ChatRow, pending: int) -> ChatBody:
    sandbox = service.sandboxes.index.by_id(row.sandbox_id) if row.sandbox_id else None
    run = agents.chats.running(row.key)
    return ChatBody(
        conversation_id=row.conversation_id,
        title=row.title or row.conversation_id,
        session_id=session_id(row.user_id, row.agent_id),
        sandbox_id=row.sandbox_id,
        user_id=row.user_id,
        agent_id=row.agent_id,
        project_id=row.project_id,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=sandbox.row.expires_at if sandbox is not None and not sandbox.expired else None,
        run=CurrentRun(run_id=run.run_id, waiting=pending > 0) if run is not None else None,
        pending=pending,
    )


def _place(cursor: str | None) -> tuple[float, str] | None:
    """Return the time and the id in a cursor. Raise BadRequest."""
    if cursor is None:
        return None
    used, _, chat_id = cursor.partition(" ")
    try:
        return float(used), chat_id
    except ValueError:
        raise BadRequest("the cursor is invalid", details={"field": "cursor"}) from None
