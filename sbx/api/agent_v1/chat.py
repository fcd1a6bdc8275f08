"""A message to an agent; following what it does; ending that."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.agent.chats import ChatRun
from sbx.api import sse
from sbx.api.agent_v1.dependencies import (
    AgentsDep,
    ChatDep,
    check_runs,
    conversation_of,
    project_of,
    session_of,
)
from sbx.api.agent_v1.models import Aborted, NewChat
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import Conflict, NotFound
from sbx.service.agent_runs import AgentRequest
from sbx.service.agents import Agents, ChatRow, no_conversation
from sbx.service.auth import Caller

router = APIRouter(prefix="/api/v1/chat", tags=["agent"])
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": sse.DOCUMENTED}}
_LAST: dict[str, Any] = {
    "parameters": [{"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}]
}


@router.post(
    "",
    response_class=Response,
    responses={**documented(404, 409, 429), **_STREAM},
    openapi_extra=_LAST,
)
async def chat(
    asked: NewChat,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> Response:
    """Ask the agent of a conversation; its events as they come. It goes on when nobody follows. The
    same body with `Last-Event-ID` asks nothing anew: it follows what goes on, from there."""
    name = conversation_of(caller, asked)
    if "last-event-id" in request.headers:
        run = _again(agents, caller, asked, name)
        return await sse.stream(told(run, sse.last_event_id(request)), request=request)
    settings = agents.models.settings  # what is refused is refused before anything is made
    if asked.project_id is not None:
        await project_of(service, caller, asked.project_id)
    session = await session_of(sessions, caller, asked, name)
    row, project = await agents.ensure_chat(caller, session, name, asked.project_id)
    run = await agents.chats.start(
        AgentRequest(
            caller.owner,
            name,
            asked.message,
            max_steps=asked.max_steps or settings.max_steps,
            model=asked.model,
            caller=caller,
            session=session,
            chat=row,
            project=project,
        )
    )
    await service.recording.record(caller, "chat.start", name, run=run.run_id, sandbox=session.id)
    return await sse.stream(told(run, 0), request=request)


@router.get(
    "/{conversation_id}/events",
    response_class=Response,
    responses={**documented(404, 409, 429), **_STREAM},
    openapi_extra=_LAST,
)
async def follow(
    row: ChatDep,
    request: Request,
    caller: CallerDep,
    agents: AgentsDep,
    run_id: str | None = None,
) -> Response:
    """The events of what goes on in a conversation, or ended there within the last minute, after
    `Last-Event-ID`. With a `run_id` of this run and no later one."""
    check_runs(caller, row.conversation_id)
    try:
        run = agents.chats.find(row.key, run_id)
    except NotFound as error:
        raise await _interrupted(agents, row) or error from None
    return await sse.stream(told(run, sse.last_event_id(request)), request=request)


@router.post("/{conversation_id}/abort", responses=documented(404))
async def abort(row: ChatDep, caller: CallerDep, service: ServiceDep, agents: AgentsDep) -> Aborted:
    """End what goes on: what waits for approval is denied, what runs is interrupted."""
    check_runs(caller, row.conversation_id)
    aborted = await agents.chats.abort(row.key)
    if aborted:
        await service.recording.record(caller, "chat.abort", row.conversation_id)
    return Aborted(aborted=aborted)


async def told(run: ChatRun, after: int) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    async with aclosing(run.events(after)) as events:
        async for number, event in events:
            yield number, event


async def _interrupted(agents: Agents, row: ChatRow) -> NotFound | None:
    """Return the error for a last run that the end of an earlier service interrupted."""
    for last in await agents.runs(row, limit=1):
        if last.status == "interrupted":
            return NotFound(
                f"the run {last.id} was interrupted by the end of the service",
                code="run_interrupted",
                hint="what it had done is in the messages: say something, or resume",
                details={"run_id": last.id},
            )
    return None


def _again(agents: Agents, caller: Caller, asked: NewChat, name: str) -> ChatRun:
    """The run that this very request began. Raises NotFound, Conflict `another_run`."""
    check_runs(caller, name)
    if not caller.sees(asked.user_id, asked.agent_id, name):
        raise no_conversation(name)
    run = agents.chats.find((caller.owner, asked.user_id, asked.agent_id, name))
    talk = run.ask
    if talk.message != asked.message:
        raise Conflict(
            "the agent of this conversation is at something else",
            code="another_run",
            hint="send the same body, or follow /chat/{conversation_id}/events",
            details={"run_id": run.run_id},
        )
    return run
