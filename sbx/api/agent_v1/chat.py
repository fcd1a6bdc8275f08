"""Send a message to an agent, follow its events, abort its run."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.agent.chats import ChatRun
from sbx.agent.profile import NO_PROFILE
from sbx.api import sse
from sbx.api.agent_v1.dependencies import (
    AgentsDep,
    ChatDep,
    check_model,
    check_runs,
    conversation_of,
    project_of,
    session_of,
)
from sbx.api.agent_v1.models import Aborted, NewChat, StartedChat
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import Conflict, Denied, NotFound
from sbx.service.agent_runs import AgentRequest
from sbx.service.agents import Agents, ChatRow, no_conversation, profile_of, undoing
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/chat", tags=["agent"])
_LAST = {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}
_STREAM: dict[str, Any] = {
    "response_class": Response,
    "responses": {**documented(404, 409, 429), 200: {"content": sse.DOCUMENTED}},
    "openapi_extra": {"parameters": [_LAST]},
}


_DETACHED: dict[int, Any] = {202: {"model": StartedChat, "description": "It has started"}}


@router.post("", **{**_STREAM, "responses": _STREAM["responses"] | _DETACHED})
async def chat(
    new: NewChat,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> Response:
    """Send a message to the agent of a conversation, and stream its events. The run continues if
    the client disconnects. With `Last-Event-ID`, the same body follows the current run. With
    `detach`, the reply is a 202 with the ids of the run, at once."""
    name = conversation_of(caller, new)
    if "last-event-id" in request.headers:
        run = _find_run(agents, caller, new, name)
        return await sse.stream(_events(run, sse.last_event_id(request)), request=request)
    agents.models.settings  # noqa: B018  # it raises before anything is created
    if not new.detach:
        sse.reserve(request)
    if new.project_id is not None:
        await project_of(service, caller, new.project_id)
    await check_chat(service, caller, new, name)
    session = await session_of(sessions, caller, new, name)
    run = await begin(service, agents, caller, session, new, name)
    if new.detach:
        started = StartedChat(
            run_id=run.run_id,
            conversation_id=name,
            session_id=session.session_id,
            sandbox_id=session.id,
        )
        return Response(started.model_dump_json(), 202, media_type="application/json")
    return await sse.stream(_events(run, 0), request=request)


async def check_chat(service: Service, caller: Caller, new: NewChat, name: str) -> None:
    """Raise Denied for a message that would be refused once its session and its conversation are
    created."""
    stored, project_id = await profile_of(service, caller, new.user_id, new.agent_id, name)
    if new.completion_check is not None and project_id is not None and caller.via == "token":
        raise Denied(
            "a token cannot choose a command for a project",
            code="forbidden",
            hint="leave completion_check out, or call with a key of the owner",
        )
    check_model(NO_PROFILE if stored is None else stored.profile, new.model)


async def begin(
    service: Service, agents: Agents, caller: Caller, session: SandboxView, new: NewChat, name: str
) -> ChatRun:
    """Start the run of a message in a conversation of a session. Raise the errors of `Chats.start`,
    Unavailable `model_not_configured` and `invalid_profile`, and as `check_chat`."""
    settings = agents.models.settings
    await check_chat(service, caller, new, name)
    row, project = await agents.ensure_chat(caller, session, name, new.project_id, new.message)
    async with undoing(service, row):
        stored = await service.agent_profiles.of_chat(row.profile_id)
        profile = NO_PROFILE if stored is None else stored.profile
        run = await agents.chats.start(
            AgentRequest(
                caller.owner,
                name,
                new.message,
                max_steps=profile.max_steps(new.max_steps, settings.max_steps),
                model=new.model,
                caller=caller,
                session=session,
                chat=row,
                project=project,
                profile=profile,
                check_command=new.completion_check,
                profile_version=None if stored is None else stored.version,
                after_seq=await agents.messages.last_seq(row.id),
            )
        )
    await service.recording.record(caller, "chat.start", name, run=run.run_id, sandbox=session.id)
    return run


@router.get("/{conversation_id}/events", **_STREAM)
async def follow(
    row: ChatDep,
    request: Request,
    caller: CallerDep,
    agents: AgentsDep,
    run_id: str | None = None,
) -> Response:
    """Follow the current run of a conversation, or one that ended within the last minute, after
    `Last-Event-ID`. `run_id`: only this run, not a later one."""
    check_runs(caller, row.conversation_id)
    try:
        run = agents.chats.find(row.key, run_id)
    except NotFound as error:
        raise await _interrupted(agents, row) or error from None
    return await sse.stream(_events(run, sse.last_event_id(request)), request=request)


@router.post("/{conversation_id}/abort", responses=documented(404))
async def abort(row: ChatDep, caller: CallerDep, service: ServiceDep, agents: AgentsDep) -> Aborted:
    """Abort the current run: deny its pending approvals and interrupt its code."""
    check_runs(caller, row.conversation_id)
    aborted = await agents.chats.abort(row.key)
    if aborted:
        await service.recording.record(caller, "chat.abort", row.conversation_id)
    return Aborted(aborted=aborted)


async def _events(run: ChatRun, after: int) -> AsyncIterator[tuple[int, dict[str, Any]]]:
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
                hint="its actions are in the messages: send a message, or resume",
                details={"run_id": last.id},
            )
    return None


def _find_run(agents: Agents, caller: Caller, new: NewChat, name: str) -> ChatRun:
    """Return the run that this same request began. Raise NotFound, Conflict `another_run`."""
    check_runs(caller, name)
    if not caller.sees(new.user_id, new.agent_id, name):
        raise no_conversation(name)
    run = agents.chats.find((caller.owner, new.user_id, new.agent_id, name))
    if run.ask.message != new.message:
        raise Conflict(
            "the agent of this conversation has another request",
            code="another_run",
            hint="send the same body, or follow /chat/{conversation_id}/events",
            details={"run_id": run.run_id},
        )
    return run
