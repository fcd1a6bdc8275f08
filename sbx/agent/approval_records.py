"""Where approvals and remembered rules are kept: in memory here, in the store of a service there
(`sbx.runtime.store.approvals.StoredApprovals`, which has these methods as they are)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from sbx.errors import Conflict
from sbx.protocol.approvals import Approval, Decision, Reach, Remembered


class Records(Protocol):
    """Bounds that are None do not bound. Lists are in the order of `seq`, above `after`."""

    async def add(self, approval: Approval) -> Approval:
        """Pending, in its place. Conflict for an id that was there already."""
        ...

    async def of_id(self, tool_call_id: str) -> Approval | None: ...

    async def settle(
        self, tool_call_id: str, decision: Decision, rule: Remembered | None = None
    ) -> tuple[Approval | None, bool]:
        """The approval as it is now decided, and whether by this decision: the first one counts,
        and only its rule is kept. None where there is none."""
        ...

    async def settle_all(self, decision: Decision, run_id: str | None = None) -> Sequence[Approval]:
        """Decide all that is pending, or what a run waits for; those that it decided."""
        ...

    async def pending(
        self,
        reach: Reach,
        *,
        now: float,
        after: int,
        limit: int,
    ) -> Sequence[Approval]:
        """Those that can still be decided; it may give fewer than there are, but not none."""
        ...

    async def rules(
        self,
        reach: Reach,
        *,
        project_id: str | None,
        after: int,
        limit: int,
    ) -> Sequence[Remembered]:
        """A user, an agent and a conversation have no rules of projects."""
        ...

    async def rules_for(
        self, reach: Reach, *, project_id: str | None, tool_name: str
    ) -> Sequence[Remembered]:
        """What was remembered for calls of this tool there, for the conversation or its project."""
        ...

    async def drop_rule(
        self,
        rule_id: str,
        reach: Reach,
    ) -> bool | None:
        """From now on the rule holds no longer. Return whether that is recorded, None where there
        was no such rule within these bounds."""
        ...


class MemoryRecords:
    """Kept by this object alone: it belongs to one agent, or to a few of the same process."""

    def __init__(self) -> None:
        self._approvals: dict[str, Approval] = {}
        self._rules: dict[str, tuple[Remembered, Approval]] = {}  # each with what it came of
        self._numbers = count(1)

    async def add(self, approval: Approval) -> Approval:
        if approval.tool_call_id in self._approvals:
            raise Conflict(f"the call {approval.tool_call_id} was asked about already")
        kept = replace(approval, seq=next(self._numbers))
        self._approvals[kept.tool_call_id] = kept
        return kept

    async def of_id(self, tool_call_id: str) -> Approval | None:
        return self._approvals.get(tool_call_id)

    async def settle(
        self, tool_call_id: str, decision: Decision, rule: Remembered | None = None
    ) -> tuple[Approval | None, bool]:
        there = self._approvals.get(tool_call_id)
        if there is None or there.decision is not None:
            return there, False
        if rule is not None:
            self._remember(rule, there)
        decided = self._approvals[tool_call_id] = replace(there, decision=decision)
        return decided, True

    async def settle_all(self, decision: Decision, run_id: str | None = None) -> Sequence[Approval]:
        decided = [
            replace(one, decision=decision)
            for one in self._approvals.values()
            if one.decision is None and run_id in (None, one.run_id)
        ]
        self._approvals |= {one.tool_call_id: one for one in decided}
        return decided

    async def pending(
        self,
        reach: Reach,
        *,
        now: float,
        after: int,
        limit: int,
    ) -> Sequence[Approval]:
        found = [
            one
            for one in self._approvals.values()
            if one.decision is None
            and one.expires_at > now
            and one.seq > after
            and reach.covers(one)
        ]
        return found[:limit]

    async def rules(
        self,
        reach: Reach,
        *,
        project_id: str | None,
        after: int,
        limit: int,
    ) -> Sequence[Remembered]:
        found = [
            rule
            for rule, source in self._rules.values()
            if rule.seq > after
            and _rule_within(reach, rule, source)
            and project_id in (None, rule.project_id)
        ]
        return found[:limit]

    async def rules_for(
        self, reach: Reach, *, project_id: str | None, tool_name: str
    ) -> Sequence[Remembered]:
        return [
            rule
            for rule, source in self._rules.values()
            if (rule.owner, rule.tool_name) == (reach.owner, tool_name)
            and (reach.covers(source) if rule.project_id is None else rule.project_id == project_id)
        ]

    async def drop_rule(
        self,
        rule_id: str,
        reach: Reach,
    ) -> bool | None:
        rule, source = self._rules.get(rule_id, (None, None))
        if rule is None or source is None or not _rule_within(reach, rule, source):
            return None
        del self._rules[rule_id]
        return True

    def _remember(self, rule: Remembered, source: Approval) -> None:
        if not any(_says(rule) == _says(other) for other, _ in self._rules.values()):
            self._rules[rule.id] = (replace(rule, seq=next(self._numbers)), source)


def _rule_within(reach: Reach, rule: Remembered, source: Approval) -> bool:
    if rule.project_id is not None:
        return reach.owner == rule.owner and not reach.is_bounded
    return reach.covers(source)


def _says(rule: Remembered) -> tuple[str | None, ...]:
    where = (rule.owner, rule.conversation_id, rule.project_id)
    return (*where, rule.tool_name, rule.kind, rule.text)
