"""The user's yes or no to a tool call: requested, decided once, and possibly remembered.

    ask        record the call; only then is the request shown to anyone
    decision   wait for the user, or for the denial by `timeout`, `abort` or `restart`
    decide     make the first decision; later callers get this one

The records (sbx/store/approvals.py) settle which decision is first. The waiting objects in memory
only receive it. A caller cannot see or decide calls outside its bounds: for that caller they do not
exist.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from msgspec import Struct

from sbx.agent.tools.approval_rules import ApprovalRule, matches, rule_for, rule_kinds
from sbx.agent.tools.tool import Arguments
from sbx.aio import Clock, run_to_completion
from sbx.errors import BadRequest, Conflict, Denied, NotFound, SbxError
from sbx.protocol.approvals import (
    ABORT,
    RESTART,
    TIMEOUT,
    Approval,
    ApprovalDecision,
    ApprovalScope,
    Remember,
    StoredApprovalRule,
)

if TYPE_CHECKING:
    from sbx.store.approvals import ApprovalStore

TIMEOUT_S = 600.0
_LIST_MAX = 200
_CURSOR_MAX = 1 << 63  # numbers are below it


class AgentContext(Struct, frozen=True):
    """The owner and the conversation for which an agent works."""

    owner: str
    conversation_id: str
    user_id: str | None = None
    agent_id: str | None = None
    project_id: str | None = None


class Pending:
    """A call that waits for a decision. `Approvals.ask` creates it."""

    def __init__(self, approvals: "Approvals", approval: Approval) -> None:
        self.approval = approval
        self._approvals = approvals
        self._answer: asyncio.Future[ApprovalDecision] = asyncio.get_running_loop().create_future()

    async def decision(self) -> ApprovalDecision:
        """Wait for the decision, until `expires_at` at the latest. A second call returns the same
        decision.

        If this is cancelled, the call is denied by `abort`, because it would no longer be made.
        Raise the errors of the records: then there is no decision, and the call must not be made.
        """
        expiring = asyncio.ensure_future(self._approvals.expired(self.approval))
        try:
            await asyncio.wait((self._answer, expiring), return_when=asyncio.FIRST_COMPLETED)
            if not self._answer.done():
                await self._approvals.deny(self.approval, TIMEOUT)
            return self._answer.result()
        except asyncio.CancelledError:
            await run_to_completion(self._approvals.deny(self.approval, ABORT))
            raise
        finally:
            expiring.cancel()

    @property
    def current_decision(self) -> ApprovalDecision | None:
        return self._answer.result() if self._answer.done() else None

    def tell(self, decision: ApprovalDecision) -> None:
        if not self._answer.done():
            self._answer.set_result(decision)


class Approvals:
    """The approvals of one process. `records` may be those of a whole service; by default they are
    in memory."""

    def __init__(
        self,
        records: "ApprovalStore | None" = None,
        clock: Clock | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        on_change: Callable[[Approval, ApprovalDecision | None], None] = lambda *_: None,
    ) -> None:
        """`on_change`: called when a call waits for a decision, and when it got one."""
        self._records = _in_memory() if records is None else records
        self._clock: Clock = clock or Clock()
        self._timeout_s = timeout_s
        self._on_change = on_change
        # Weak: a caller that no longer waits is forgotten; the records keep the call.
        self._waiting: WeakValueDictionary[str, Pending] = WeakValueDictionary()

    # -- for the agent -----------------------------------------------------------------------------

    async def ask(
        self,
        place: AgentContext,
        *,
        run_id: str,
        tool_call_id: str,
        tool_name: str,
        tool_args: Arguments,
        dry_run: dict[str, Any] | None = None,
        remember_as: tuple[Remember, ...] | None = None,
    ) -> Pending:
        """Record the call and make it ready for a decision. Announce it only after this returns.

        `remember_as`: how an approval may count for longer than this call; None is `rule_kinds`. A
        call id is used for one question only: a late answer to a first question would answer the
        second. Raise Conflict, NotFound `no_conversation` for a deleted conversation, and TooLarge.
        """
        now = self._clock.now()
        if remember_as is None:
            remember_as = rule_kinds(tool_name, tool_args)
        approval = Approval(
            tool_call_id=tool_call_id,
            tool_name=tool_name,
            tool_args=tool_args,
            owner=place.owner,
            conversation_id=place.conversation_id,
            run_id=run_id,
            created_at=now,
            expires_at=now + self._timeout_s,
            user_id=place.user_id,
            agent_id=place.agent_id,
            project_id=place.project_id,
            dry_run=dry_run,
            remember_as=remember_as,
        )
        if tool_call_id in self._waiting:
            raise Conflict(f"the call {tool_call_id} already waits for a decision")
        pending = self._waiting[tool_call_id] = Pending(self, approval)
        try:
            added = await run_to_completion(self._records.add(approval))
            pending.approval = replace(added, remember_as=remember_as)
        except asyncio.CancelledError:
            await run_to_completion(self.deny(approval, ABORT))
            raise
        except SbxError:
            self._waiting.pop(tool_call_id, None)
            raise
        if (decision := pending.current_decision) is None:
            self._on_change(pending.approval, None)
        else:  # its run was aborted during the write
            await self._records.settle(tool_call_id, decision)
        return pending

    async def remembers(self, place: AgentContext, tool_name: str, subject: str) -> bool:
        """Return whether a rule allows this call without a question. `subject` is the value of
        `rules.subject`."""
        reach = ApprovalScope(place.owner, place.user_id, place.agent_id, place.conversation_id)
        rules = await self._records.rules_for(
            reach, project_id=place.project_id, tool_name=tool_name
        )
        return any(
            matches(ApprovalRule(rule.kind, rule.text, rule.tool_name), subject, tool_name)
            for rule in rules
        )

    async def abort(self, run_id: str, *, by: str = ABORT) -> Sequence[Approval]:
        """Deny all pending calls of a run and return them."""
        decision = ApprovalDecision(False, by, self._clock.now())
        try:
            denied = await self._records.settle_all(decision, run_id)
            for approval in denied:
                self._tell(approval.tool_call_id, decision)
            return denied
        finally:  # also calls whose conversation was deleted, or that could not be recorded
            for pending in list(self._waiting.values()):
                if pending.approval.run_id == run_id:
                    pending.tell(decision)

    async def recover(self) -> Sequence[Approval]:
        """Deny and return the calls that the previous process left pending: no agent waits for
        them. Call this at the start of a service, before any client can decide."""
        return await self._records.settle_all(ApprovalDecision(False, RESTART, self._clock.now()))

    # -- for people --------------------------------------------------------------------------------

    async def decide(
        self,
        reach: ApprovalScope,
        tool_call_id: str,
        approved: bool,
        *,
        remember: Remember | None = None,
        prefix: str | None = None,
        by: str | None = None,
    ) -> Approval:
        """Approve or deny a call. An approval can be remembered: for this exact call, or for
        commands that begin with `prefix`. The rule applies to the project of the call, or else its
        conversation. Access lasts for one run, or as `remember` says.

        `by` defaults to the owner. Raise NotFound; Conflict `already_decided`, whose details name
        the decider; BadRequest `prefix_missing`, `invalid_prefix`, and `not_remembered` for a call
        that is approved by its changes; Denied `rule_not_permitted` for a reach with bounds, which
        may not create a rule: the rule would outlive the token, and it would apply to a project
        outside the bounds. If this raises, nothing is decided.
        """
        approval = await self.get(reach, tool_call_id)
        now, by = self._clock.now(), by or reach.owner
        if approval.decision is not None:
            raise _already(tool_call_id, approval.decision)
        if now >= approval.expires_at:
            raise _already(tool_call_id, await self.deny(approval, TIMEOUT))
        if remember is not None and reach.is_bounded:
            raise Denied(
                "a token may approve one call, but may not create a rule",
                code="rule_not_permitted",
                hint="approve the call without remember, or decide with a key of the owner",
                details={"field": "remember"},
            )
        if remember is not None and remember not in approval.remember_as:
            raise BadRequest(
                f"an approval of this {approval.tool_name} cannot be remembered as {remember}",
                code="not_remembered",
                hint=f"approve it once, or as {' or '.join(approval.remember_as)}"
                if approval.remember_as
                else "approve it once; the setting changes, or ask_outside for some directories,"
                " allows changes without a question",
                details={"field": "remember", "possible": list(approval.remember_as)},
            )
        rule = _rule(approval, approved, remember, prefix, by, now)
        decision = ApprovalDecision(approved, by, now, remember)
        return await run_to_completion(self._decide(approval, decision, rule))

    async def get(self, reach: ApprovalScope, tool_call_id: str) -> Approval:
        """Return a call with its decision, if it has one. Raise NotFound."""
        approval = await self._records.get(tool_call_id)
        if approval is None or not reach.covers(approval):
            raise _unknown(tool_call_id)
        return self._with_remember_as(reach, approval)

    def _with_remember_as(self, reach: ApprovalScope, approval: Approval) -> Approval:
        """Return the approval as a caller with this reach may decide it. A caller with bounds may
        not create a rule."""
        if approval.decision is not None or reach.is_bounded:
            return approval
        pending = self._waiting.get(approval.tool_call_id)
        if pending is None:
            kinds = rule_kinds(approval.tool_name, approval.tool_args)
            return replace(approval, remember_as=kinds)
        return replace(approval, remember_as=pending.approval.remember_as)

    async def pending(
        self, reach: ApprovalScope, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[Sequence[Approval], str | None]:
        """Return the pending calls, the oldest first, and the cursor of the next page."""

        async def page(after: int, limit: int) -> Sequence[Approval]:
            return await self._records.pending(
                reach, now=self._clock.now(), after=after, limit=limit
            )

        approvals = await page(_after(cursor), max(1, min(limit, _LIST_MAX)))
        more = approvals and await page(approvals[-1].seq, 1)
        offered = [self._with_remember_as(reach, approval) for approval in approvals]
        return offered, str(approvals[-1].seq) if more else None

    async def rules(
        self,
        reach: ApprovalScope,
        *,
        conversation_id: str | None = None,
        project_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> tuple[Sequence[StoredApprovalRule], str | None]:
        """Return the remembered rules, the oldest first, and the cursor of the next page. A reach
        with bounds has the rules of its conversations, but no rules of projects."""
        bound = reach.conversation_id
        if bound is not None and conversation_id not in (None, bound):
            return (), None
        within = replace(reach, conversation_id=conversation_id or bound)

        async def page(after: int, limit: int) -> Sequence[StoredApprovalRule]:
            return await self._records.rules(
                within, project_id=project_id, after=after, limit=limit
            )

        rules = await page(_after(cursor), max(1, min(limit, _LIST_MAX)))
        more = rules and await page(rules[-1].seq, 1)
        return rules, str(rules[-1].seq) if more else None

    async def revoke(self, reach: ApprovalScope, rule_id: str) -> bool:
        """Revoke a rule at once. Return whether that is already recorded. Raise NotFound."""
        recorded = await run_to_completion(self._records.drop_rule(rule_id, reach))
        if recorded is None:
            raise NotFound(f"rule {rule_id} does not exist", code="rule_not_found")
        return recorded

    # -- for those who wait ------------------------------------------------------------------------

    async def expired(self, approval: Approval) -> None:
        """Wait until the approval expires."""
        while (remaining_s := approval.expires_at - self._clock.now()) > 0:
            await self._clock.sleep(remaining_s)

    async def deny(self, approval: Approval, by: str) -> ApprovalDecision:
        """Deny a call automatically. Return the decision that counts, which may be an earlier
        one."""
        denial = ApprovalDecision(False, by, self._clock.now())
        settled, _ = await self._records.settle(approval.tool_call_id, denial)
        stands = denial if settled is None or settled.decision is None else settled.decision
        self._tell(approval.tool_call_id, stands)
        return stands

    async def _decide(
        self, approval: Approval, decision: ApprovalDecision, rule: StoredApprovalRule | None
    ) -> Approval:
        settled, won = await self._records.settle(approval.tool_call_id, decision, rule)
        if settled is None or settled.decision is None:
            raise _unknown(approval.tool_call_id)
        self._tell(approval.tool_call_id, settled.decision)
        if not won:
            raise _already(approval.tool_call_id, settled.decision)
        return settled

    def _tell(self, tool_call_id: str, decision: ApprovalDecision) -> None:
        if (pending := self._waiting.pop(tool_call_id, None)) is not None:
            pending.tell(decision)
            self._on_change(pending.approval, decision)


def _in_memory() -> "ApprovalStore":
    from sbx.store.approvals import (
        ApprovalStore,  # here: an agent without approvals needs no SQLite
    )

    return ApprovalStore()


def _rule(
    approval: Approval,
    approved: bool,
    remember: Remember | None,
    prefix: str | None,
    by: str,
    at: float,
) -> StoredApprovalRule | None:
    if prefix is not None and remember != "prefix":
        raise _field("prefix", 'prefix is only valid with remember "prefix"')
    if remember is not None and not approved:
        raise _field("remember", "only an approval can be remembered")
    if remember not in ("exact", "prefix"):  # the sandbox remembers granted access
        return None
    rule = rule_for(approval.tool_name, approval.tool_args, remember, prefix)
    return StoredApprovalRule(
        id=f"rule-{secrets.token_hex(8)}",
        owner=approval.owner,
        tool_name=rule.tool,
        kind=rule.kind,
        text=rule.text,
        by=by,
        created_at=at,
        conversation_id=approval.conversation_id if approval.project_id is None else None,
        project_id=approval.project_id,
    )


def _after(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20):
        raise _field("cursor", "the cursor is invalid")
    return min(int(cursor), _CURSOR_MAX - 1)


def _field(field: str, sentence: str) -> BadRequest:
    return BadRequest(sentence, details={"field": field})


def _unknown(tool_call_id: str) -> NotFound:
    return NotFound(f"no call {tool_call_id} waits for a decision", code="approval_not_found")


def _already(tool_call_id: str, decision: ApprovalDecision) -> Conflict:
    outcome = "approved" if decision.approved else "denied"
    return Conflict(
        f"the call {tool_call_id} was already {outcome} by {decision.by}",
        code="already_decided",
        details={
            "approved": decision.approved,
            "by": decision.by,
            "at": decision.at,
            "decided_at": decision.at,
            "remembered": decision.remembered,
        },
    )
