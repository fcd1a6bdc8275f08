"""Approvals: pending calls, decisions, remembered rules, and the settings of a conversation.

Once a person has allowed the commands of a conversation in a project, they run in the project
itself, and Python may start processes there as well. That holds until it is revoked or the service
ends. The setting for changes of files is stored with the conversation.
"""

from dataclasses import asdict, replace

from fastapi import APIRouter, Response

from sbx.api.agent_v1.dependencies import AgentsDep, ChatDep, approval_scope, check_runs, project_of
from sbx.api.agent_v1.messages import Cursor
from sbx.api.agent_v1.models import (
    ApprovalBody,
    ApprovalItem,
    CommandPermission,
    CommandsChange,
    Decided,
    Decision,
    Limit,
    PendingBody,
    PendingList,
    RuleBody,
    RuleList,
)
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import REVOKED, revoked
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import Broken, Conflict
from sbx.protocol.changes import ChangeBudget, checked_budgets, checked_prefixes
from sbx.service.agents import Agents, ChatRow
from sbx.service.caller import Caller
from sbx.service.ids import session_id
from sbx.service.projects.projects import Project
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/approvals", tags=["approvals"])
of_conversations = APIRouter(
    prefix="/api/v1/conversations/{conversation_id}/commands", tags=["approvals"]
)


@router.get("", response_model_exclude_unset=True, responses=documented())
async def pending(
    caller: CallerDep, agents: AgentsDep, limit: Limit = 50, cursor: Cursor = None
) -> PendingList:
    """List the pending calls within the bounds of the caller, the oldest first."""
    approvals, after = await agents.approvals.pending(
        approval_scope(caller), limit=limit, cursor=cursor
    )
    items = [PendingBody(**approval.to_json()) for approval in approvals]
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
    """List the remembered rules of one conversation or project, or of all."""
    rules, after = await agents.approvals.rules(
        approval_scope(caller),
        conversation_id=conversation_id,
        project_id=project_id,
        limit=limit,
        cursor=cursor,
    )
    return RuleList(items=[RuleBody(**rule.to_json()) for rule in rules], next_cursor=after)


@router.delete("/rules/{rule_id}", status_code=204, responses={**documented(404), **REVOKED})
async def revoke(
    rule_id: str, caller: CallerDep, service: ServiceDep, agents: AgentsDep
) -> Response:
    """Revoke a rule: its commands need approvals again."""
    recorded = await agents.approvals.revoke(approval_scope(caller), rule_id)
    await service.recording.record(caller, "approval.rule.revoke", rule_id)
    return revoked(recorded)


@router.get("/{tool_call_id}", response_model_exclude_unset=True, responses=documented(404))
async def get(tool_call_id: str, caller: CallerDep, agents: AgentsDep) -> ApprovalItem:
    """Return one call, also a decided one, as long as its conversation exists."""
    approval = await agents.approvals.get(approval_scope(caller), tool_call_id)
    decision = approval.decision
    return ApprovalItem(
        **approval.to_json() | {"project_id": approval.project_id},
        decision=None if decision is None else Decision(**asdict(decision)),
    )


@router.post("/{tool_call_id}", responses=documented(404, 409))
async def decide(
    tool_call_id: str,
    answer: ApprovalBody,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
) -> Decided:
    """Approve or deny one call; the first answer counts. A token may not create a rule."""
    approval = await agents.approvals.decide(
        approval_scope(caller),
        tool_call_id,
        answer.approved,
        remember=answer.remember,
        prefix=answer.prefix,
        by=caller.who if caller.via == "token" else None,
    )
    decision = approval.decision
    if decision is None:
        raise Broken(f"the decision on {tool_call_id} was not stored")
    await service.recording.record(
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


@of_conversations.get("", responses=documented(404, 409))
async def get_commands(
    row: ChatDep, caller: CallerDep, service: ServiceDep, agents: AgentsDep
) -> CommandPermission:
    """Return what needs an approval now."""
    await _project(service, caller, row)
    return await _permission(service, agents, row)


@of_conversations.put("", responses=documented(404, 409))
async def set_commands(
    change: CommandsChange,
    row: ChatDep,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> CommandPermission:
    """Change which calls need an approval. A revocation of the permission for commands ends the
    runs of the conversation in its project."""
    project = await _project(service, caller, row)
    old = await agents.changes_setting(row)
    outside, budgets = change.ask_outside, change.budgets
    new = replace(
        old,
        mode=old.mode if change.changes is None else change.changes,
        ask_outside=old.ask_outside if outside is None else checked_prefixes(outside),
        budgets=old.budgets
        if budgets is None
        else checked_budgets(ChangeBudget(**each.model_dump()) for each in budgets),
    )
    if new != old:
        await agents.set_changes(row, new)
    if change.allowed:
        session = await sessions.get(caller, session_id(row.user_id, row.agent_id))
        await agents.allow_commands(caller, session, row, project)
    elif change.allowed is not None:
        await agents.chats.abort(row.key)
        await service.projects.close_conversation(row.owner, row.id)
    permission = await _permission(service, agents, row)
    await service.recording.record(
        caller, "conversation.commands", row.conversation_id, **permission.model_dump()
    )
    return permission


async def _project(service: Service, caller: Caller, row: ChatRow) -> Project:
    check_runs(caller, row.conversation_id)
    if row.project_id is None:
        raise Conflict(
            f"the conversation {row.conversation_id} is not in a project, so it needs no approvals",
            code="no_project",
        )
    return await project_of(service, caller, row.project_id)


async def _permission(service: Service, agents: Agents, row: ChatRow) -> CommandPermission:
    setting = await agents.changes_setting(row)
    return CommandPermission(
        allowed=service.projects.commands_allowed(row.owner, row.id),
        changes=setting.mode,
        ask_outside=list(setting.ask_outside),
        budgets=list(setting.budgets),
    )
