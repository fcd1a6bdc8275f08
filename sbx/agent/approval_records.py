"""Where approvals and remembered rules are kept: in memory here, in the store of a service in
`sbx.store.approvals.StoredApprovals`, which has the same methods."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from sbx.errors import Conflict
from sbx.protocol.approvals import Approval, ApprovalDecision, ApprovalScope, StoredApprovalRule


class ApprovalStore(Protocol):
    """A bound of None does not restrict. Lists are sorted by `seq` and start above `after`."""

    async def add(self, approval: Approval) -> Approval:
        """Record a pending approval and return it with its `seq`. Raise Conflict for a known id."""
        ...

    async def of_id(self, tool_call_id: str) -> Approval | None: ...

    async def settle(
        self, tool_call_id: str, decision: ApprovalDecision, rule: StoredApprovalRule | None = None
    ) -> tuple[Approval | None, bool]:
        """Decide the call. Return the approval with the decision that counts, and whether it is
        this one. The first decision counts, and only its rule is kept. Return None for an unknown
        id."""
        ...

    async def settle_all(
        self, decision: ApprovalDecision, run_id: str | None = None
    ) -> Sequence[Approval]:
        """Decide all pending calls, or those of one run. Return the calls that this decided."""
        ...

    async def pending(
        self,
        reach: ApprovalScope,
        *,
        now: float,
        after: int,
        limit: int,
    ) -> Sequence[Approval]:
        """Return the calls that can still be decided. The list may be incomplete, but is empty only
        if there are none."""
        ...

    async def rules(
        self,
        reach: ApprovalScope,
        *,
        project_id: str | None,
        after: int,
        limit: int,
    ) -> Sequence[StoredApprovalRule]:
        """Return the rules. A reach of a user, an agent or a conversation has no rules of
        projects."""
        ...

    async def rules_for(
        self, reach: ApprovalScope, *, project_id: str | None, tool_name: str
    ) -> Sequence[StoredApprovalRule]:
        """Return the rules for calls of this tool in the conversation or its project."""
        ...

    async def drop_rule(
        self,
        rule_id: str,
        reach: ApprovalScope,
    ) -> bool | None:
        """Revoke the rule at once. Return whether that is recorded, or None if there is no such
        rule within these bounds."""
        ...


class MemoryRecords:
    """Records in memory, for one agent or a few agents of the same process."""

    def __init__(self) -> None:
        self._approvals: dict[str, Approval] = {}
        self._rules: dict[
            str, tuple[StoredApprovalRule, Approval]
        ] = {}  # each with the approval that created it
        self._numbers = count(1)

    async def add(self, approval: Approval) -> Approval:
        if approval.tool_call_id in self._approvals:
            raise Conflict(f"the call {approval.tool_call_id} was already recorded")
        numbered = replace(approval, seq=next(self._numbers))
        self._approvals[numbered.tool_call_id] = numbered
        return numbered

    async def of_id(self, tool_call_id: str) -> Approval | None:
        return self._approvals.get(tool_call_id)

    async def settle(
        self, tool_call_id: str, decision: ApprovalDecision, rule: StoredApprovalRule | None = None
    ) -> tuple[Approval | None, bool]:
        approval = self._approvals.get(tool_call_id)
        if approval is None or approval.decision is not None:
            return approval, False
        if rule is not None:
            self._remember(rule, approval)
        decided = self._approvals[tool_call_id] = replace(approval, decision=decision)
        return decided, True

    async def settle_all(
        self, decision: ApprovalDecision, run_id: str | None = None
    ) -> Sequence[Approval]:
        decided = [
            replace(approval, decision=decision)
            for approval in self._approvals.values()
            if approval.decision is None and run_id in (None, approval.run_id)
        ]
        self._approvals |= {approval.tool_call_id: approval for approval in decided}
        return decided

    async def pending(
        self,
        reach: ApprovalScope,
        *,
        now: float,
        after: int,
        limit: int,
    ) -> Sequence[Approval]:
        approvals = [
            approval
            for approval in self._approvals.values()
            if approval.decision is None
            and approval.expires_at > now
            and approval.seq > after
            and reach.covers(approval)
        ]
        return approvals[:limit]

    async def rules(
        self,
        reach: ApprovalScope,
        *,
        project_id: str | None,
        after: int,
        limit: int,
    ) -> Sequence[StoredApprovalRule]:
        rules = [
            rule
            for rule, source in self._rules.values()
            if rule.seq > after
            and _rule_within(reach, rule, source)
            and project_id in (None, rule.project_id)
        ]
        return rules[:limit]

    async def rules_for(
        self, reach: ApprovalScope, *, project_id: str | None, tool_name: str
    ) -> Sequence[StoredApprovalRule]:
        return [
            rule
            for rule, source in self._rules.values()
            if (rule.owner, rule.tool_name) == (reach.owner, tool_name)
            and (reach.covers(source) if rule.project_id is None else rule.project_id == project_id)
        ]

    async def drop_rule(
        self,
        rule_id: str,
        reach: ApprovalScope,
    ) -> bool | None:
        rule, source = self._rules.get(rule_id, (None, None))
        if rule is None or source is None or not _rule_within(reach, rule, source):
            return None
        del self._rules[rule_id]
        return True

    def _remember(self, rule: StoredApprovalRule, source: Approval) -> None:
        if not any(_content(rule) == _content(other) for other, _ in self._rules.values()):
            self._rules[rule.id] = (replace(rule, seq=next(self._numbers)), source)


def _rule_within(reach: ApprovalScope, rule: StoredApprovalRule, source: Approval) -> bool:
    if rule.project_id is not None:
        return reach.owner == rule.owner and not reach.is_bounded
    return reach.covers(source)


def _content(rule: StoredApprovalRule) -> tuple[str | None, ...]:
    where = (rule.owner, rule.conversation_id, rule.project_id)
    return (*where, rule.tool_name, rule.kind, rule.text)
