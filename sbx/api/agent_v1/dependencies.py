"""The agents, chats, projects and sessions that a request names, and the rights of its caller."""

import secrets
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request

from sbx.agent.profile import AgentProfile
from sbx.api.agent_v1.models import NewChat
from sbx.api.auth import CallerDep
from sbx.errors import (
    BadRequest,
    Broken,
    CannotEnforce,
    Denied,
    NotFound,
    PolicyError,
    SbxError,
    Unavailable,
)
from sbx.protocol.approvals import ApprovalScope
from sbx.service.agents import Agents, ChatRow, no_conversation
from sbx.service.caller import Caller
from sbx.service.ids import check_id, session_id
from sbx.service.models import SandboxView
from sbx.service.projects.projects import Project
from sbx.service.service import Service
from sbx.service.sessions import SessionAsk, Sessions, SessionStatus, reason_of


def agents_of(app: FastAPI) -> Agents:
    """Return the agents of an app, created at the first call."""
    state = app.state
    if not hasattr(state, "agents"):
        state.agents = Agents(state.service, state.agent_settings)
    agents: Agents = state.agents
    return agents


async def _agents(request: Request) -> Agents:
    agents = agents_of(request.app)
    await agents.start()
    return agents


AgentsDep = Annotated[Agents, Depends(_agents)]
Named = Annotated[str | None, Query(max_length=400)]


async def chat(
    conversation_id: str,
    caller: CallerDep,
    agents: AgentsDep,
    user_id: Named = None,
    agent_id: Named = None,
) -> ChatRow:
    """Return the conversation with an agent in the URL. See `Agents.find_chat`."""
    name = check_id("conversation_id", conversation_id)
    return await agents.find_chat(caller, name, user_id=user_id, agent_id=agent_id)


ChatDep = Annotated[ChatRow, Depends(chat)]


async def project_of(service: Service, caller: Caller, project_id: str) -> Project:
    """Return a project of the caller. Raise NotFound, also for a token."""
    check_projects(caller, project_id)
    return await service.projects.get(caller.owner, project_id)


def check_projects(caller: Caller, project_id: str) -> None:
    """Raise NotFound for a token: it belongs to one user, and a project to its owner."""
    if caller.via == "token":
        raise NotFound(f"project {project_id[:80]!r} does not exist")


async def session_of(
    sessions: Sessions, caller: Caller, new: NewChat, conversation_id: str
) -> SandboxView:
    """Return the session of the user and agent, created if need be. Raise as `Sessions.ensure`,
    BadRequest for another `sandbox_session_id`, and with the cause in `details` Broken
    `session_create_failed` if no session can be created on this host, and Unavailable
    `session_not_ready`."""
    key = session_id(check_id("user_id", new.user_id), check_id("agent_id", new.agent_id))
    if new.sandbox_session_id not in (None, key):
        raise BadRequest(
            f"the session of this user and agent has the id {key}",
            hint="leave sandbox_session_id out, or give this one",
            details={"field": "sandbox_session_id", "session_id": key},
        )
    if not caller.sees(new.user_id, new.agent_id, conversation_id) or not caller.may("execute"):
        raise no_conversation(conversation_id)
    ask = SessionAsk(new.user_id, new.agent_id, new.business_domain_id)
    try:
        view, _ = await sessions.ensure(caller, ask)
    except SbxError as error:
        # After each other error another try, or another request, succeeds; the status shows which.
        if not isinstance(error, PolicyError | CannotEnforce | Broken):
            raise
        raise Broken(
            f"the session {key} could not be created: {error.message}",
            code="session_create_failed",
            hint=error.hint,
            details={"session_id": key, "cause": error.code},
        ) from error
    if sessions.status(view) is SessionStatus.ERROR:
        raise Unavailable(
            f"the session {key} is not ready: {reason_of(view)}",
            code="session_not_ready",
            hint="send the message again, or look at the events of its sandbox",
            details={"session_id": key, "cause": (view.failure or {}).get("code", view.state)},
        )
    return view


def conversation_of(caller: Caller, new: NewChat) -> str:
    """Return the named conversation, else that of the token, else a new one."""
    name = new.conversation_id
    if name is None:
        name = caller.conversation_id or f"conversation-{secrets.token_hex(8)}"
    return check_id("conversation_id", name)


def check_model(profile: AgentProfile, requested: str | None) -> None:
    """Raise Denied `model_fixed` for another model than the one that a profile names."""
    if requested is not None and profile.model.name not in (None, requested):
        raise Denied(
            "the profile of this agent names its model",
            code="model_fixed",
            hint="leave model out",
            details={"field": "model"},
        )


def check_reads(caller: Caller, conversation_id: str) -> None:
    """Raise NotFound unless the caller may read messages."""
    if not _may_read(caller):
        raise no_conversation(conversation_id)


def check_lists(caller: Caller) -> None:
    """Raise Denied `forbidden` unless the caller may read messages."""
    if not _may_read(caller):
        raise Denied("this token may not read the work of agents", code="forbidden")


def _may_read(caller: Caller) -> bool:
    return caller.may("execute") or caller.may("files:read")


def check_runs(caller: Caller, conversation_id: str) -> None:
    """Raise NotFound unless the caller may give orders to an agent."""
    if not caller.may("execute"):
        raise no_conversation(conversation_id)


def approval_scope(caller: Caller) -> ApprovalScope:
    """Return the approvals that the caller may decide. Raise Denied `forbidden`.

    A token with the scope `execute` may approve within its bounds, also changes on the host: it is
    the front end in which the user decides. Only an unbounded caller may have a decision remembered
    as a rule. A token that must not approve is made without `execute`.
    """
    if not caller.may("execute"):
        raise Denied(
            "this token may not approve the actions of an agent",
            code="forbidden",
            hint="it takes the scope execute",
        )
    return ApprovalScope(caller.owner, caller.user_id, caller.agent_id, caller.conversation_id)
