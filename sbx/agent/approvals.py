"""A person's yes or no to a tool call: asked for, waited for, decided once, perhaps remembered.

    ask        the call is written down and waited for before anybody is told of it
    decision   a person's, or denied: by `timeout`, `abort` or `restart`
    decide     by whoever comes first; all others are told who did

Who decides first is settled by the records (approval_records.py), never here: what waits in memory
is only told of it. Nobody sees or decides what is beyond their bounds: there is no such thing then.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from sbx.agent.approval_records import MemoryRecords, Records
from sbx.agent.tools.rules import Rule, matches, rule_for
from sbx.agent.tools.tool import Arguments
from sbx.clock import Clock, SystemClock
from sbx.errors import BadRequest, Conflict, Denied, NotFound, SbxError, TooLarge
from sbx.isolation.patience import to_the_end
from sbx.protocol.approvals import (
    ABORT,
    RESTART,
    TIMEOUT,
    Approval,
    Decision,
    Reach,
    Remember,
    Remembered,
)

TIMEOUT_S = 600.0
_RULE_MAX = 16 << 10  # characters
_LIST_MAX = 200
_CURSOR_MAX = 1 << 63  # numbers are below it


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent is at work, and for whom."""

    owner: str
    conversation_id: str
    user_id: str | None = None
    agent_id: str | None = None
    project_id: str | None = None


class Pending:
    """A call that waits for an answer. Made by `Approvals.ask`."""

    def __init__(
        self, approvals: "Approvals", approval: Approval, *, may_be_remembered: bool
    ) -> None:
        self.approval = approval
        self.may_be_remembered = may_be_remembered
        self._approvals = approvals
        self._answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()

    async def decision(self) -> Decision:
        """The answer, by `expires_at` at the latest; asked again, the same.

        Cancelled, the call is denied by `abort`, as nobody would make it any more. Raises what the
        records raise: then there is no answer, and the call must not be made.
        """
        expiring = asyncio.ensure_future(self._approvals.expired(self.approval))
        try:
            await asyncio.wait((self._answer, expiring), return_when=asyncio.FIRST_COMPLETED)
            if not self._answer.done():
                await self._approvals.deny(self.approval, TIMEOUT)
            return self._answer.result()
        except asyncio.CancelledError:
            await to_the_end(self._approvals.deny(self.approval, ABORT))
            raise
        finally:
            expiring.cancel()

    @property
    def told(self) -> Decision | None:
        return self._answer.result() if self._answer.done() else None

    def tell(self, decision: Decision) -> None:
        if not self._answer.done():
            self._answer.set_result(decision)


class Approvals:
    """The approvals of one process; its records may be those of a whole service."""

    def __init__(
        self,
        records: Records | None = None,
        clock: Clock | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._records: Records = MemoryRecords() if records is None else records
        self._clock: Clock = clock or SystemClock()
        self._timeout_s = timeout_s
        # Weak: whoever asked and does not wait any more is forgotten; the records keep the call.
        self._waiting: WeakValueDictionary[str, Pending] = WeakValueDictionary()

    # -- for the agent -----------------------------------------------------------------------------

    async def ask(
        self,
        place: Place,
        *,
        run_id: str,
        tool_call_id: str,
        tool_name: str,
        tool_args: Arguments,
        rehearsal: dict[str, Any] | None = None,
        may_be_remembered: bool = True,
    ) -> Pending:
        """Known, and ready to be decided, when this returns: only then tell anybody.

        `may_be_remembered`: whether a rule would answer the same question the next time.
        A call is asked about once: a late answer to a first question would answer the second.
        Raises Conflict; NotFound `no_conversation` for one that was deleted; TooLarge.
        """
        now = self._clock.now()
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
            rehearsal=rehearsal,
        )
        if tool_call_id in self._waiting:
            raise Conflict(f"the call {tool_call_id} waits for an answer already")
        pending = self._waiting[tool_call_id] = Pending(
            self, approval, may_be_remembered=may_be_remembered
        )
        try:
            pending.approval = await to_the_end(self._records.add(approval))
        except asyncio.CancelledError:
            await to_the_end(self.deny(approval, ABORT))
            raise
        except SbxError:
            self._waiting.pop(tool_call_id, None)
            raise
        if (told := pending.told) is not None:  # its run was aborted while it was written down
            await self._records.settle(tool_call_id, told)
        return pending

    async def remembers(self, place: Place, tool_name: str, subject: str) -> bool:
        """Whether a rule allows this call without a question; `subject` as of `rules.subject`."""
        reach = Reach(place.owner, place.user_id, place.agent_id, place.conversation_id)
        rules = await self._records.rules_for(
            reach, project_id=place.project_id, tool_name=tool_name
        )
        return any(
            matches(Rule(rule.kind, rule.text, rule.tool_name), subject, tool_name)
            for rule in rules
        )

    async def abort(self, run_id: str, *, by: str = ABORT) -> Sequence[Approval]:
        """Deny all that a run waits for; what that was."""
        decision = Decision(False, by, self._clock.now())
        try:
            denied = await self._records.settle_all(decision, run_id)
            for one in denied:
                self._tell(one.tool_call_id, decision)
            return denied
        finally:  # also what went with its conversation, or could not be written down
            for pending in list(self._waiting.values()):
                if pending.approval.run_id == run_id:
                    pending.tell(decision)

    async def recover(self) -> Sequence[Approval]:
        """At the start of a service, before anybody can decide: deny what its forerunner left
        pending, as nobody waits for it any more; what that was."""
        return await self._records.settle_all(Decision(False, RESTART, self._clock.now()))

    # -- for people --------------------------------------------------------------------------------

    async def decide(
        self,
        reach: Reach,
        tool_call_id: str,
        approved: bool,
        *,
        remember: Remember | None = None,
        prefix: str | None = None,
        by: str | None = None,
    ) -> Approval:
        """Say yes or no, and with a yes perhaps "always": to this exact call, or to commands that
        begin with `prefix`; in the call's project, or else in its conversation.

        `by` is the owner unless told otherwise. Raises NotFound; Conflict `already_decided`, whose
        details say who did; BadRequest `prefix_missing`, `invalid_prefix`, and
        `not_remembered` for a call whose changes are asked about; Denied
        `rule_not_permitted` for a reach with bounds, which makes no rule: the rule would hold after
        the token has ended, and in a project beyond its bounds. What raises decides nothing.
        """
        approval = await self._records.of_id(tool_call_id)
        if approval is None or not reach.covers(approval):
            raise _unknown(tool_call_id)
        now, by = self._clock.now(), by or reach.owner
        if approval.decision is not None:
            raise _already(tool_call_id, approval.decision)
        if now >= approval.expires_at:
            raise _already(tool_call_id, await self.deny(approval, TIMEOUT))
        if remember is not None and reach.is_bounded:
            raise Denied(
                "a token may approve one call, and may not have the approval remembered",
                code="rule_not_permitted",
                hint="approve the call without remember, or decide with a key of the owner",
                details={"field": "remember"},
            )
        pending = self._waiting.get(tool_call_id)
        if remember is not None and pending is not None and not pending.may_be_remembered:
            raise BadRequest(
                f"{approval.tool_name} is asked about by its changes, which differ each time",
                code="not_remembered",
                hint="approve it for this once; the setting changes, or ask_outside for some"
                " directories, allows changes without a question",
                details={"field": "remember"},
            )
        rule = _rule(approval, approved, remember, prefix, by, now)
        decision = Decision(approved, by, now, remember)
        return await to_the_end(self._decide(approval, decision, rule))

    async def pending(
        self, reach: Reach, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[Sequence[Approval], str | None]:
        """Those that wait for an answer, the oldest first, and the cursor of what follows."""

        async def page(after: int, limit: int) -> Sequence[Approval]:
            return await self._records.pending(
                reach,
                now=self._clock.now(),
                after=after,
                limit=limit,
            )

        found = await page(_after(cursor), max(1, min(limit, _LIST_MAX)))
        more = found and await page(found[-1].seq, 1)
        return found, str(found[-1].seq) if more else None

    async def rules(
        self,
        reach: Reach,
        *,
        conversation_id: str | None = None,
        project_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> tuple[Sequence[Remembered], str | None]:
        """What is remembered, the oldest first, and the cursor of what follows. A reach with bounds
        has the rules of its conversations, and none of projects."""
        if reach.conversation_id is not None and conversation_id not in (
            None,
            reach.conversation_id,
        ):
            return (), None
        within = replace(reach, conversation_id=conversation_id or reach.conversation_id)

        async def page(after: int, limit: int) -> Sequence[Remembered]:
            return await self._records.rules(
                within,
                project_id=project_id,
                after=after,
                limit=limit,
            )

        found = await page(_after(cursor), max(1, min(limit, _LIST_MAX)))
        more = found and await page(found[-1].seq, 1)
        return found, str(found[-1].seq) if more else None

    async def revoke(self, reach: Reach, rule_id: str) -> bool:
        """From now on it is asked again; whether that is recorded yet. Raises NotFound."""
        recorded = await to_the_end(self._records.drop_rule(rule_id, reach))
        if recorded is None:
            raise NotFound(f"there is no rule {rule_id}", code="rule_not_found")
        return recorded

    # -- for those who wait ------------------------------------------------------------------------

    async def expired(self, approval: Approval) -> None:
        """Return when its time is over."""
        while (left := approval.expires_at - self._clock.now()) > 0:
            await self._clock.sleep(left)

    async def deny(self, approval: Approval, by: str) -> Decision:
        """On nobody's behalf; the decision that stands, which may be another's."""
        denial = Decision(False, by, self._clock.now())
        settled, _ = await self._records.settle(approval.tool_call_id, denial)
        stands = denial if settled is None or settled.decision is None else settled.decision
        self._tell(approval.tool_call_id, stands)
        return stands

    async def _decide(
        self, approval: Approval, decision: Decision, rule: Remembered | None
    ) -> Approval:
        settled, won = await self._records.settle(approval.tool_call_id, decision, rule)
        if settled is None or settled.decision is None:
            raise _unknown(approval.tool_call_id)
        self._tell(approval.tool_call_id, settled.decision)
        if not won:
            raise _already(approval.tool_call_id, settled.decision)
        return settled

    def _tell(self, tool_call_id: str, decision: Decision) -> None:
        if (pending := self._waiting.pop(tool_call_id, None)) is not None:
            pending.tell(decision)


def _rule(
    approval: Approval,
    approved: bool,
    remember: Remember | None,
    prefix: str | None,
    by: str,
    at: float,
) -> Remembered | None:
    if prefix is not None and remember != "prefix":
        raise _field("prefix", 'a prefix is given with remember "prefix" only')
    if remember is None:
        return None
    if not approved:
        raise _field("remember", "only a yes can be remembered")
    rule = rule_for(approval.tool_name, approval.tool_args, remember, prefix)
    if len(rule.text) > _RULE_MAX:
        raise TooLarge(
            f"a call that is remembered may have {_RULE_MAX} characters",
            hint="approve it for this once",
            details={"limit": _RULE_MAX},
        )
    return Remembered(
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
        raise _field("cursor", "the cursor is none that was given out")
    return min(int(cursor), _CURSOR_MAX - 1)


def _field(field: str, sentence: str) -> BadRequest:
    return BadRequest(sentence, details={"field": field})


def _unknown(tool_call_id: str) -> NotFound:
    return NotFound(f"no call {tool_call_id} waits for an answer", code="approval_not_found")


def _already(tool_call_id: str, decision: Decision) -> Conflict:
    what = "approved" if decision.approved else "denied"
    return Conflict(
        f"the call {tool_call_id} was {what} by {decision.by} already",
        code="already_decided",
        details={
            "approved": decision.approved,
            "by": decision.by,
            "decided_at": decision.at,
            "remembered": decision.remembered,
        },
    )
