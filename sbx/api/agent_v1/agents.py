"""The profiles of agents: instructions, model, tools, policy, approvals, limits."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from sbx.agent.profile import AgentProfile
from sbx.api.agent_v1.models import Json, Name
from sbx.api.auth import CallerDep, OwnerDep, ServiceDep
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented
from sbx.service.agent_profiles import BrokenProfile, StoredProfile, no_profile
from sbx.service.caller import Caller

router = APIRouter(prefix="/api/v1/agents", tags=["agent"])


class NewAgent(RequestBody):
    agent_id: Name
    profile: AgentProfile


class AgentBody(BaseModel):
    """`version` counts the changes of the profile; 0 is a file that no conversation has used yet.
    `is_file`: the operator has it as a file, and it cannot be changed here. `profile` is null with
    a `problem`; a token sees the description, the welcome and the starters only."""

    agent_id: str
    version: int | None
    is_file: bool
    created_at: float | None
    profile: AgentProfile | None
    problem: Json | None = None

    @classmethod
    def of(cls, entry: StoredProfile | BrokenProfile, caller: Caller) -> "AgentBody":
        if isinstance(entry, BrokenProfile):
            problem = {"code": entry.error.code, "message": entry.error.message}
            return cls(
                agent_id=entry.agent_id,
                version=None,
                is_file=True,
                created_at=None,
                profile=None,
                problem=problem,
            )
        is_user = caller.via == "token"
        return cls(
            agent_id=entry.agent_id,
            version=entry.version,
            is_file=entry.is_file,
            created_at=entry.created_at,
            profile=entry.profile.for_users if is_user else entry.profile,
        )


class AgentList(BaseModel):
    items: Annotated[list[AgentBody], Field(max_length=2000)]


@router.get("", responses=documented())
async def list_(caller: CallerDep, service: ServiceDep) -> AgentList:
    """List the agents that have a profile. A token sees its own agent."""
    entries = await service.agent_profiles.list_for(caller.owner)
    visible = [each for each in entries if caller.agent_id in (None, each.agent_id)]
    return AgentList(items=[AgentBody.of(each, caller) for each in visible])


@router.post("", status_code=201, responses=documented(409))
async def create(new: NewAgent, caller: OwnerDep, service: ServiceDep) -> AgentBody:
    """Give an agent a profile. New conversations use it; older ones have none."""
    stored = await service.agent_profiles.add(caller.owner, new.agent_id, new.profile)
    await service.recording.record(caller, "agent.create", new.agent_id, version=stored.version)
    return AgentBody.of(stored, caller)


@router.get("/{agent_id}", responses=documented(404))
async def get(agent_id: str, caller: CallerDep, service: ServiceDep) -> AgentBody:
    """Return the profile of an agent. A token sees its own agent."""
    if caller.agent_id not in (None, agent_id):
        raise no_profile(agent_id)
    return AgentBody.of(await service.agent_profiles.get(caller.owner, agent_id), caller)


@router.put("/{agent_id}", responses=documented(404, 409))
async def replace(
    agent_id: str, profile: AgentProfile, caller: OwnerDep, service: ServiceDep
) -> AgentBody:
    """Replace the whole profile. Conversations keep the version that they began with."""
    stored = await service.agent_profiles.replace(caller.owner, agent_id, profile)
    await service.recording.record(caller, "agent.change", agent_id, version=stored.version)
    return AgentBody.of(stored, caller)


@router.delete("/{agent_id}", status_code=204, responses=documented(409))
async def delete(agent_id: str, caller: OwnerDep, service: ServiceDep) -> None:
    """Delete the profile; a second time does nothing. Conversations keep their version."""
    await service.agent_profiles.delete(caller.owner, agent_id)
    await service.recording.record(caller, "agent.delete", agent_id)
