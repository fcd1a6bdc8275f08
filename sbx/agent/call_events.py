"""One tool call in progress: its state, its events and its question to the user."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from sbx.agent.approvals import AgentContext, Approvals, Pending
from sbx.agent.changing import TrialTurn
from sbx.agent.history import ENDED_BEFORE
from sbx.agent.messages import ToolCall
from sbx.agent.tools.tool import Arguments, ToolResult
from sbx.protocol.agent import (
    AgentEvent,
    Json,
    ToolApproval,
    ToolEnd,
    ToolOutput,
    ToolPending,
    ToolStart,
)
from sbx.protocol.approvals import Approval, ApprovalDecision, Remember
from sbx.telemetry import spans

NOT_BEGUN = ToolResult(ENDED_BEFORE, is_error=True)
EmitEvent = Callable[[AgentEvent], None]
CallAction = Callable[[], Awaitable[ToolResult]]


class AgentCall:
    """The state of one call, one `of` several in an answer. It is `open` from its tool_start to its
    tool_end. `pending` is set while it waits for an approval; `took_s` excludes this time. `ended`
    is the result of the call if the run ends now. `dropped` is a sentence about its changes if they
    are not applied."""

    def __init__(self, call: ToolCall, *, of: int) -> None:
        self.call = call
        self.of = of
        self.arguments: Arguments = {}
        self.open = False
        self.pending: Pending | None = None
        self.remember_as: tuple[Remember, ...] = ()
        self.decision: ApprovalDecision | None = None
        self.turn: TrialTurn | None = None
        self.ended = NOT_BEGUN
        self.dropped = ""
        self.took_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.took_s += time.monotonic() - started_at


class CallEvents:
    """Emits the events of calls."""

    def __init__(self, emit: EmitEvent, sandboxed: bool) -> None:
        self._emit = emit
        self._sandboxed = sandboxed

    def decision(self, call: AgentCall, decision: ApprovalDecision) -> None:
        call.pending = None
        self._emit(ToolApproval(call.call.id, decision.approved, decision.by, decision.remembered))

    def start(self, call: AgentCall, approval_required: bool | None = False) -> None:
        call.open = True
        approval = None if call.pending is None else call.pending.approval
        self._emit(
            ToolStart(
                call.call.id,
                call.call.name,
                call.arguments,
                approval_required=approval_required,
                expires_at=None if approval is None else approval.expires_at,
                sandboxed=self._sandboxed,
                remember_as=() if approval is None else approval.remember_as,
            )
        )

    def started(
        self, call: AgentCall, action: CallAction, *, approval_required: bool | None = False
    ) -> CallAction:
        self.start(call, approval_required)
        return action

    def refused(self, call: AgentCall, result: ToolResult) -> CallAction:
        """Emit the start of a call that is not made."""

        async def refuse() -> ToolResult:
            return result

        return self.started(call, refuse)

    def ask(self, call: AgentCall, approval: Approval, dry_run: Json | None) -> None:
        """Emit the question about a recorded call: its start, or a question after its trial."""
        if not call.open:
            self.start(call, True)
            return
        self._emit(
            ToolPending(
                call.call.id,
                call.call.name,
                call.arguments,
                approval.expires_at,
                dry_run,
                approval.remember_as,
            )
        )

    def output(self, call: AgentCall, stream: str, text: str) -> None:
        self._emit(ToolOutput(call.call.id, "stderr" if stream == "stderr" else "stdout", text))

    def end(self, call: AgentCall, result: ToolResult) -> None:
        call.open = False
        took_ms = round(call.took_s * 1000, 3)
        outputs, error, cached = result.outputs, result.error, result.cached
        self._emit(
            ToolEnd(call.call.id, result.text, result.is_error, took_ms, outputs, error, cached)
        )


class CallQuestions:
    """Asks a person about calls of one run. Without `approvals` no person can be asked."""

    def __init__(
        self, approvals: Approvals | None, place: AgentContext, run_id: str, events: CallEvents
    ) -> None:
        self.possible = approvals is not None
        self._approvals = approvals
        self._place = place
        self._run_id = run_id
        self._events = events

    async def is_remembered(self, tool_name: str, text: str) -> bool:
        """Return whether a rule of the user allows this call."""
        if self._approvals is None:
            return False
        return await self._approvals.remembers(self._place, tool_name, text)

    async def ask(self, call: AgentCall, dry_run: Json | None = None) -> Pending:
        assert self._approvals is not None
        pending = await self._approvals.ask(
            self._place,
            run_id=self._run_id,
            tool_call_id=call.call.id,
            tool_name=call.call.name,
            tool_args=call.arguments,
            dry_run=dry_run,
            remember_as=call.remember_as,
        )
        call.pending = pending
        self._events.ask(call, pending.approval, dry_run)
        return pending

    async def answer(self, call: AgentCall, dry_run: Json | None = None) -> ApprovalDecision:
        """Ask unless that is done, and wait for the decision. `dry_run`: the result of a trial."""
        pending = call.pending or await self.ask(call, dry_run)
        with spans.span("sbx.approval", tool_call=call.call.id):
            decision = await pending.decision()
            spans.annotate(approved=decision.approved, by=decision.by)
        self._events.decision(call, decision)
        return decision
