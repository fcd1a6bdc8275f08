"""What waits for a person's yes or no, the answer, and the answers that are remembered."""

from fastapi import APIRouter, Response

from sbx.api import acts
from sbx.api.agent_v1.asked import AgentsDep, deciding
from sbx.api.agent_v1.messages import Cursor
from sbx.api.agent_v1.models import (
    ApprovalBody,
    Decided,
    Limit,
    PendingBody,
    PendingList,
    RuleBody,
    RuleList,
)
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.errors import Broken

router = APIRouter(prefix="/api/v1/approvals", tags=["approvals"])


@router.get("", response_model_exclude_unset=True, responses=documented())
async def pending(
    caller: CallerDep, agents: AgentsDep, limit: Limit = 50, cursor: Cursor = None
) -> PendingList:
    """The calls that wait, of all conversations that the caller reaches, the oldest first."""
    found, after = await agents.approvals.pending(deciding(caller), limit=limit, cursor=cursor)
    items = [PendingBody(**one.to_json()) for one in found]
    return PendingList(items=items, next_cursor=after)


@router.get("/rules", response_model_exclude_unset=True, responses=documented())
async def rules(
    caller: CallerDep,
    agents: AgentsDep,
    conversation_id: str | None = None,
    project_id: str | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> RuleList:
    """What is allowed without asking again, of one conversation or project or of all."""
    found, after = await agents.approvals.rules(
        deciding(caller),
        conversation_id=conversation_id,
        project_id=project_id,
        limit=limit,
        cursor=cursor,
    )
    return RuleList(items=[RuleBody(**one.to_json()) for one in found], next_cursor=after)


@router.delete("/rules/{rule_id}", status_code=204, responses={**documented(404), **acts.REVOKED})
async def revoke(
    rule_id: str, caller: CallerDep, service: ServiceDep, agents: AgentsDep
) -> Response:
    """From now on it is asked again."""
    recorded = await agents.approvals.revoke(deciding(caller), rule_id)
    await acts.record(service, caller, "approval.rule.revoke", rule_id)
    return acts.revoked(recorded)


@router.post("/{tool_call_id}", responses=documented(404, 409))
async def decide(
    tool_call_id: str,
    verdict: ApprovalBody,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
) -> Decided:
    """Say yes or no to one call; the first answer counts. A token may not have it remembered."""
    approval = await agents.approvals.decide(
        deciding(caller),
        tool_call_id,
        verdict.approved,
        remember=verdict.remember,
        prefix=verdict.prefix,
        by=caller.who if caller.via == "token" else None,
    )
    decision = approval.decision
    if decision is None:
        raise Broken(f"the decision on {tool_call_id} was not kept")
    await acts.record(
        service,
        caller,
        "approval.decide",
        tool_call_id,
        approved=decision.approved,
        tool=approval.tool_name,
        conversation=approval.conversation_id,
        remembered=decision.remembered,
    )
    return Decided(
        tool_call_id=tool_call_id,
        approved=decision.approved,
        by=decision.by,
        remembered=decision.remembered,
    )
