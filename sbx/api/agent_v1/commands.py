"""What one conversation in a project asks about: its commands, and its changes of files.

Once a person has allowed commands, they run in the project itself, and Python may start processes
there as well. That holds until it is taken back or the service ends. Which changes of files are
asked about is kept with the conversation.
"""

from contextlib import AsyncExitStack
from dataclasses import replace

from fastapi import APIRouter

from sbx.api import acts
from sbx.api.agent_v1.agents import Agents
from sbx.api.agent_v1.asked import AgentsDep, ChatDep, check_runs, project_of
from sbx.api.agent_v1.models import CommandPermission, CommandsChange
from sbx.api.agent_v1.talk import AgentRequest
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.sessions_v1.asked import SessionsDep
from sbx.errors import Conflict
from sbx.protocol.changes import checked_prefixes
from sbx.service.auth import Caller
from sbx.service.projects.box import ProjectSession
from sbx.service.projects.client import RemoteBox
from sbx.service.projects.projects import Project
from sbx.service.service import Service
from sbx.service.sessions import Sessions, session_id
from sbx.store import chats
from sbx.store.chats import ChatRow

router = APIRouter(prefix="/api/v1/conversations/{conversation_id}/commands", tags=["approvals"])


@router.get("", responses=documented(404, 409))
async def get(row: ChatDep, caller: CallerDep, service: ServiceDep) -> CommandPermission:
    """What is asked about now."""
    await _project(service, caller, row)
    return await _told(service, row)


@router.put("", responses=documented(404, 409))
async def allow(
    asked: CommandsChange,
    row: ChatDep,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> CommandPermission:
    """Change that. To take back that commands are allowed ends what lives of the conversation in
    its project."""
    project = await _project(service, caller, row)
    kept = await chats.changes_setting(service.store, row.id)
    wanted = replace(
        kept,
        mode=kept.mode if asked.changes is None else asked.changes,
        ask_outside=(
            kept.ask_outside if asked.ask_outside is None else checked_prefixes(asked.ask_outside)
        ),
    )
    if wanted != kept:
        await chats.set_changes(service.store, row.id, wanted)
    if asked.allowed:
        await _allow(agents, sessions, caller, row, project)
    elif asked.allowed is not None:
        await agents.chats.abort(row.key)
        await service.projects.close_conversation(row.owner, row.id)
    told = await _told(service, row)
    await acts.record(
        service, caller, "conversation.commands", row.conversation_id, **told.model_dump()
    )
    return told


async def _project(service: Service, caller: Caller, row: ChatRow) -> Project:
    check_runs(caller, row.conversation_id)
    if row.project_id is None:
        raise Conflict(
            f"the conversation {row.conversation_id} is in no project, so nothing of it is asked",
            code="no_project",
        )
    return await project_of(service, caller, row.project_id)


async def _allow(
    agents: Agents, sessions: Sessions, caller: Caller, row: ChatRow, project: Project
) -> None:
    session = await sessions.get(caller, session_id(row.user_id, row.agent_id))
    talk = AgentRequest(
        row.owner,
        row.conversation_id,
        None,
        caller=caller,
        session=session,
        chat=row,
        project=project,
    )
    async with AsyncExitStack() as held:
        box = await agents.opening.box(talk, held)
        if isinstance(box, ProjectSession | RemoteBox):  # on the host itself nothing is asked
            await box.allow_commands()


async def _told(service: Service, row: ChatRow) -> CommandPermission:
    setting = await chats.changes_setting(service.store, row.id)
    return CommandPermission(
        allowed=service.projects.commands_allowed(row.owner, row.id),
        changes=setting.mode,
        ask_outside=list(setting.ask_outside),
    )
