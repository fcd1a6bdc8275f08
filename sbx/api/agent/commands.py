"""Whether the commands of one conversation in a project are made without asking.

Once a person has allowed them, Python may start processes there as well. That holds for the
conversation, until it is taken back or the service ends.
"""

from contextlib import AsyncExitStack

from fastapi import APIRouter

from sbx.api import acts
from sbx.api.agent.asked import AgentsDep, ChatDep, check_runs, project_of
from sbx.api.agent.models import Commands
from sbx.api.agent.talk import Talk
from sbx.api.callers import CallerDep, HouseDep
from sbx.api.errors import documented
from sbx.api.sessions.asked import SessionsDep
from sbx.errors import Conflict
from sbx.runtime.project_box import ProjectBox
from sbx.runtime.sessions import session_id

router = APIRouter(prefix="/api/v1/conversations/{conversation_id}/commands", tags=["approvals"])


@router.put("", responses=documented(404, 409))
async def allow(
    asked: Commands,
    row: ChatDep,
    caller: CallerDep,
    house: HouseDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> Commands:
    """Allow them, or take that back, which ends what lives of the conversation in its project."""
    name = row.conversation_id
    check_runs(caller, name)
    if row.project_id is None:
        raise Conflict(
            f"the conversation {name} is in no project, so nothing of it is asked",
            code="no_project",
        )
    project = await project_of(house, caller, row.project_id)
    if asked.allowed:
        session = await sessions.get(caller, session_id(row.user_id, row.agent_id))
        talk = Talk(
            row.owner, name, None, caller=caller, session=session, chat=row, project=project
        )
        async with AsyncExitStack() as held:
            box = await agents.opening.box(talk, held)
            if isinstance(box, ProjectBox):  # on the host itself nothing is asked
                await box.allow_commands()
    else:
        await agents.chats.abort(row.owner, name)
        await house.projects.close_conversation(row.owner, name)
    await acts.record(house, caller, "conversation.commands", name, allowed=asked.allowed)
    return Commands(allowed=asked.allowed)
