"""The tool calls of one answer. They run in parallel, except for calls that wait for an approval.

    parse → permission → tool_start → (approval) → the tool → tool_end
    parse → permission → the tool, on a copy → tool_start → (approval) → commit → tool_end

The second sequence applies to each call that may change files of a project (changing.py). A call
that changed nothing needs no approval. A call that changed files needs an approval of its effect,
unless the setting of the conversation allows it. These calls are made one after another, so that
each sees the changes of the previous one. Otherwise `tool_start` events and results are in the
order of the calls. If a call needs an approval, `approvals` has recorded it as pending before its
`tool_start` is emitted.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from msgspec.structs import replace

from sbx.agent.approvals import AgentContext, Approvals, Pending
from sbx.agent.changing import (
    ChangeTrial,
    DryRunCommand,
    ReadSetting,
    ask_always,
    command_of,
    compared,
    dry_run_or_none,
    reaches_out,
    trial_from_dry_run,
)
from sbx.agent.compaction import IMAGES_TOLD_SIZE
from sbx.agent.history import ENDED
from sbx.agent.messages import TokenUsage, ToolCall, carried
from sbx.agent.sandbox import ToolChanges, ToolSandbox, commands_allowed, is_sandboxed
from sbx.agent.tools import access
from sbx.agent.tools.approval_rules import COMMAND_TOOL, Permissions, rule_kinds, subject
from sbx.agent.tools.execution import EXECUTE_COMMAND
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import (
    FORBIDDEN,
    NO_APPROVER,
    NO_APPROVER_FOR_CHANGES,
    RESULT_MAX,
    TOO_MANY_CALLS,
    WORKSPACE_CHANGED,
    cut,
    denied,
    failed,
)
from sbx.agent.tools.tool import (
    Arguments,
    Effect,
    Emit,
    Ruling,
    Tool,
    ToolCallRequest,
    ToolResult,
)
from sbx.aio import run_to_completion
from sbx.errors import Denied, SbxError, TooLarge, Unavailable
from sbx.policy.grants import Grants
from sbx.protocol.agent import AgentEvent, Json, ToolApproval, ToolEnd, ToolOutput, ToolStart
from sbx.protocol.approvals import ABORT, ApprovalDecision, Remember
from sbx.telemetry import spans

HERE = AgentContext("local", "default")
CHECK = "completion_check"  # the name of the check of a task in events
CALLS_MAX = 128  # per answer
AT_ONCE = 16  # the limit of waiting runs in a conversation

EmitEvent = Callable[[AgentEvent], None]
_Action = Callable[[], Awaitable[ToolResult]]
_Begin = Callable[[Effect], Awaitable[ToolChanges]]
_TrialKind = Literal["write", "code", "command"]


class AgentToolCalls:
    """Makes the calls of one run. `emit` receives each event when it happens."""

    def __init__(
        self,
        sandbox: ToolSandbox,
        tools: Tools,
        *,
        emit: EmitEvent,
        run_id: str,
        permissions: Permissions | None = None,
        approvals: Approvals | None = None,
        place: AgentContext = HERE,
        changes: ReadSetting = ask_always,
    ) -> None:
        """Create the calls. `changes` reads the current setting for changes that need approval."""
        self._sandbox = sandbox
        self._tools = tools.with_access(sandbox)
        self._permissions = permissions or Permissions()
        self._approvals = approvals
        self._place = place
        self._run_id = run_id
        self._sandboxed = is_sandboxed(sandbox)
        self._events = _CallEvents(emit, self._sandboxed)
        self._changes = changes
        self._grants = access.grants_of(sandbox)
        self._trying = asyncio.Lock()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._images_left = 0
        self._calls: list[_Call] = []
        self.usage = TokenUsage()  # of sub-agents

    async def make_all(
        self, calls: Sequence[ToolCall], results: list[ToolResult] | None = None
    ) -> Sequence[ToolResult]:
        """Make the calls and return their results in order. A failure of a call is its result.

        Cancelling this interrupts running calls and denies pending ones. `results`, if passed, then
        holds the results that are available and marks the other calls as ended.
        """
        results = [] if results is None else results
        results[:] = [ToolResult(ENDED, is_error=True) for _ in calls]
        self._images_left = IMAGES_TOLD_SIZE
        self._calls.clear()
        tasks: list[asyncio.Task[None]] = []

        async def act(place: int, call_state: _Call, action: _Action) -> None:
            results[place] = await self._run_action(call_state, action)

        try:
            for place, call in enumerate(calls):
                self._calls.append(call_state := _Call(call, of=min(len(calls), CALLS_MAX)))
                if place < CALLS_MAX:
                    action = await self._start(call_state)
                else:
                    action = self._events.started(call_state, lambda: _now(TOO_MANY_CALLS))
                tasks.append(asyncio.create_task(act(place, call_state, action)))
            if tasks:
                await _all(tasks)
        except BaseException:
            await run_to_completion(self._ended(tasks))
            raise
        return results

    async def check(self, command: str) -> ToolResult:
        """Run the check of a task; events show it as a call. It has the permissions of a command.
        In a project it runs on a copy, and its changes are dropped; where that is impossible, a
        person must approve it. Raise the errors of `start_shell`, and Denied `check_denied`."""
        call = _Call(ToolCall(f"check-{secrets.token_hex(8)}", CHECK, ""), of=1)
        call.arguments = {"command": command}
        self._calls[:] = [call]
        try:
            result = await self._checked(call, await self._ruling_of(call, EXECUTE_COMMAND))
            self._events.end(call, result)
            return result
        finally:
            await run_to_completion(self._ended([]))

    async def _checked(self, call: "_Call", ruling: Ruling) -> ToolResult:
        if ruling == "deny":
            raise _check_denied("this check may not run here")
        if (kept := _trial_of(self._sandbox, call, ruling, EXECUTE_COMMAND)) is not None:
            async with self._trying:
                if (result := await _check_copy(self._events, call, kept[0])) is not None:
                    return result
        if ruling != "allow":
            if self._approvals is None:
                raise _check_denied("a person must approve this check, and none can be asked")
            call.remember_as = ()  # a rule would name a tool that no model can call
            call.decision = await self._await_decision(call, await self._ask(call))
            if not call.decision.approved:
                raise _check_denied("the check was denied")
        return await _run_check(self._events, call, self._sandbox)

    async def _ended(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        """Cancel the tasks. A cancelled call denies its pending approval and interrupts its run."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in self._calls:
            if call.pending is not None:
                self._events.decision(
                    call, call.pending.current_decision or ApprovalDecision(False, ABORT, 0.0)
                )
            if call.open:
                self._events.end(call, ToolResult(ENDED, is_error=True))

    # -- one call --------------------------------------------------------------------------------

    async def _start(self, call: "_Call") -> _Action:
        """Emit the start of a call, unless it must be tried first. Return the rest as an action."""
        arguments = self._tools.parse(call.call)
        if isinstance(arguments, ToolResult):
            return self._events.started(call, lambda: _now(arguments))
        call.arguments = arguments
        try:
            ruling = await self._ruling(call)
            if ruling == "deny":
                return self._events.started(call, lambda: _now(FORBIDDEN))
            tool = self._tools.get(call.call.name)
            if (kept := _trial_of(self._sandbox, call, ruling, tool)) is not None:
                return partial(self._make_after_trial, call, ruling, *kept)
            if ruling == "allow":
                return self._events.started(call, partial(self._make, call))
            if self._approvals is None:
                return self._events.started(call, lambda: _now(NO_APPROVER))
            command = command_of(call.call.name, arguments) if self._sandboxed else None
            if command is not None and hasattr(self._sandbox, "dry_run"):
                return partial(self._run_after_dry_run, call, ruling, command)
            return partial(self._make_after_approval, call, await self._ask(call))
        except SbxError as error:
            refused = failed(error)
            return self._events.started(call, lambda: _now(refused))

    async def _ruling(self, call: "_Call") -> Ruling:
        if call.call.name == access.NAME and self._grants is not None:
            call.arguments = access.question(self._grants, call.arguments)
            call.remember_as = access.durations(call.arguments)
            return "ask"  # no rule and no permission answers this question
        return await self._ruling_of(call, self._tools.get(call.call.name))

    async def _ruling_of(self, call: "_Call", tool: Tool) -> Ruling:
        ruling = self._permissions.of(tool, call.arguments)
        # Others are approved by their changes, which may differ the next time.
        as_call = ruling == "ask" and _trial_of(self._sandbox, call, ruling, tool) is None
        as_command = tool.name == COMMAND_TOOL and ruling in ("ask", "changes")
        if as_call or as_command:
            call.remember_as = rule_kinds(tool.name, call.arguments)
        if call.remember_as and self._approvals is not None:
            text = subject(tool.name, call.arguments)
            if await self._approvals.remembers(self._place, tool.name, text):
                return "allow"
        return ruling

    async def _run_action(self, call: "_Call", action: _Action) -> ToolResult:
        with spans.span("sbx.tool", tool=call.call.name, tool_call=call.call.id):
            try:
                result = await action()
            except SbxError as error:
                result = failed(error)
            spans.annotate(is_error=result.is_error)
        if result.usage is not None:
            self.usage += result.usage
        if not call.open:  # it failed before its start
            self._events.start(call)
        self._events.end(call, result)
        if call.call.name == access.NAME or self._grants is None or self._approvals is None:
            return result
        return await self._with_requests(result, self._grants)

    async def _make(
        self, call: "_Call", sandbox: ToolSandbox | None = None, emit: Emit | None = None
    ) -> ToolResult:
        async with self._turns:
            with call.timed():
                result = await self._tools.make(
                    call.call,
                    call.arguments,
                    sandbox or self._sandbox,
                    emit or partial(self._events.output, call),
                    of=call.of,
                    decision=call.decision,
                )
        self._images_left -= sum(len(image.data) for image in result.images)
        if self._images_left < 0:  # more than the model would receive
            result = replace(result, images=())
        return result

    # -- calls that need an approval -------------------------------------------------------------

    async def _make_after_approval(self, call: "_Call", pending: Pending) -> ToolResult:
        call.decision = await self._await_decision(call, pending)
        return await self._make(call) if call.decision.approved else denied(call.decision)

    async def _with_requests(self, result: ToolResult, grants: Grants) -> ToolResult:
        """Ask a person about the access that was refused during a call. Return its result with the
        answers."""
        answers = [result.text]
        for refused in grants.take_refused():
            self._calls.append(call := _Call(access.request_for(refused), of=1))
            answer = await self._run_action(call, await self._start(call))
            answers.append(f"[sbx] The sandbox refused {refused}. {answer.text}")
        return replace(result, text="\n".join(answers))

    async def _run_after_dry_run(
        self, call: "_Call", ruling: Ruling, command: DryRunCommand
    ) -> ToolResult:
        """Dry-run a command and commit the changes of the dry run after approval. The command
        does not run a second time. If the workspace has changed meanwhile, change nothing. A second
        dry run would need another call with another id: a second yes to this id, sent twice or
        late, must never approve an effect that the user has not seen."""
        async with self._trying:
            with call.timed():
                dry_run = await dry_run_or_none(self._sandbox, command)
            if dry_run is None:
                return await self._make_after_approval(call, await self._ask(call))
            result = partial(
                self._tools.describe, call.call, dry_run.run, self._sandbox, of=call.of
            )
            try:
                return await self._apply(call, ruling, trial_from_dry_run(dry_run, result))
            finally:
                await run_to_completion(dry_run.discard())

    async def _make_after_trial(
        self, call: "_Call", ruling: Ruling, begin: _Begin, effect: _TrialKind
    ) -> ToolResult:
        """Run any other tool on a copy of the project. Hold its output back until it is clear
        whether the call needs an approval, because `tool_start` carries that information."""
        async with self._trying:
            allowed = ruling == "allow" or (await self._changes()).mode == "allow"
            try:
                with call.timed():
                    changes = await begin(effect)
            except (TooLarge, Unavailable):
                return await self._make_untried(call, allowed=allowed and ruling != "ask")
            try:
                # A tool that only writes files prints nothing, and may need an approval.
                if allowed and ruling != "ask" and effect != "write":
                    self._events.start(call)
                emit = partial(self._events.output, call) if call.open else call.later
                result = await self._make(call, changes.sandbox, emit)
                with call.timed():
                    kept = effect == "code"
                    trial = await compared(changes, result, keeps_variables=kept)
                return await self._apply(call, ruling, trial)
            finally:
                await run_to_completion(changes.rollback())

    async def _make_untried(self, call: "_Call", *, allowed: bool) -> ToolResult:
        """Make a call in a project that cannot be copied. It is approved before it runs in the
        project itself."""
        if allowed:
            self._events.start(call)
            return await self._make(call)
        if self._approvals is None:
            return NO_APPROVER_FOR_CHANGES
        return await self._make_after_approval(call, await self._ask(call))

    async def _apply(self, call: "_Call", ruling: Ruling, trial: ChangeTrial) -> ToolResult:
        """Decide about the changes of a call, then make exactly these changes or none."""
        setting = await self._changes()
        allowed = ruling == "allow" or (ruling != "ask" and trial.allowed_by(setting))
        allowed = allowed and not trial.always_asked
        if not allowed:
            if self._approvals is None:
                return NO_APPROVER_FOR_CHANGES
            decision = await self._await_decision(call, await self._ask(call, trial.shown))
            if not decision.approved:
                return denied(decision, trial.denied)
        elif not call.open:
            self._events.start(call)
            for stream, text in call.held_back():
                self._events.output(call, stream, text)
        with call.timed():
            if not await trial.committed():
                return WORKSPACE_CHANGED
            return await trial.result()

    async def _ask(self, call: "_Call", dry_run: Json | None = None) -> Pending:
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
        self._events.start(call, dry_run=dry_run)
        return pending

    async def _await_decision(self, call: "_Call", pending: Pending) -> ApprovalDecision:
        with spans.span("sbx.approval", tool_call=call.call.id):
            decision = await pending.decision()
            spans.annotate(approved=decision.approved, by=decision.by)
        self._events.decision(call, decision)
        return decision


class _Call:
    """The state of one call, one `of` several in an answer. It is `open` from its tool_start to its
    tool_end. `pending` is set while it waits for an approval; `took_s` excludes this time."""

    def __init__(self, call: ToolCall, *, of: int) -> None:
        self.call = call
        self.of = of
        self.arguments: Arguments = {}
        self.open = False
        self.pending: Pending | None = None
        self.remember_as: tuple[Remember, ...] = ()
        self.decision: ApprovalDecision | None = None
        self.took_s = 0.0
        self._held_back: list[tuple[str, str]] = []

    def later(self, stream: str, text: str) -> None:
        """Keep output of the call until its `tool_start` has been emitted."""
        self._held_back.append((stream, text))

    def held_back(self) -> list[tuple[str, str]]:
        """Return the kept output and forget it."""
        output, self._held_back = self._held_back, []
        return output

    @contextmanager
    def timed(self) -> Iterator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.took_s += time.monotonic() - started_at


class _CallEvents:
    """Emits the events of calls."""

    def __init__(self, emit: EmitEvent, sandboxed: bool) -> None:
        self._emit = emit
        self._sandboxed = sandboxed

    def decision(self, call: "_Call", decision: ApprovalDecision) -> None:
        call.pending = None
        self._emit(ToolApproval(call.call.id, decision.approved, decision.by, decision.remembered))

    def start(self, call: "_Call", *, dry_run: Json | None = None) -> None:
        call.open = True
        approval = None if call.pending is None else call.pending.approval
        self._emit(
            ToolStart(
                call.call.id,
                call.call.name,
                call.arguments,
                approval_required=approval is not None,
                expires_at=None if approval is None else approval.expires_at,
                dry_run=dry_run,
                sandboxed=self._sandboxed,
                remember_as=() if approval is None else approval.remember_as,
            )
        )

    def started(self, call: "_Call", action: _Action) -> _Action:
        self.start(call)
        return action

    def output(self, call: "_Call", stream: str, text: str) -> None:
        self._emit(ToolOutput(call.call.id, "stderr" if stream == "stderr" else "stdout", text))

    def end(self, call: "_Call", result: ToolResult) -> None:
        call.open = False
        took_ms = round(call.took_s * 1000, 3)
        outputs, error, cached = result.outputs, result.error, result.cached
        self._emit(
            ToolEnd(call.call.id, result.text, result.is_error, took_ms, outputs, error, cached)
        )


def _trial_of(
    sandbox: ToolSandbox, call: _Call, ruling: Ruling, tool: Tool
) -> tuple[_Begin, _TrialKind] | None:
    """Return the function that starts a trial of this call on a copy, and its kind. Return None
    for a call that only reads, a command that is allowed or needs the network, and a call that
    may act outside the sandbox and must be approved before it runs."""
    begin, effect = getattr(sandbox, "begin", None), tool.effect(call.arguments)
    if effect == "read" or begin is None or not is_sandboxed(sandbox) or commands_allowed(sandbox):
        return None
    if effect == "command" and (ruling == "allow" or reaches_out(call.arguments)):
        return None
    if ruling == "ask" and not tool.confined:
        return None
    return begin, effect


async def _run_check(
    events: _CallEvents, call: _Call, sandbox: ToolSandbox, *, is_dropped: bool = False
) -> ToolResult:
    if not call.open:
        events.start(call)
    emit = partial(events.output, call)
    live = ToolCallRequest(call.call.id, sandbox, emit, is_dropped=is_dropped)
    with call.timed():
        output = await EXECUTE_COMMAND.act(live, call.arguments)
    result = output if isinstance(output, ToolResult) else ToolResult(output)
    return replace(result, text=carried(cut(result.text, RESULT_MAX)))


async def _check_copy(events: _CallEvents, call: _Call, begin: _Begin) -> ToolResult | None:
    """Run a check on a copy, and drop its changes. Return None if there can be no copy."""
    try:
        changes = await begin("command")
    except (TooLarge, Unavailable):
        return None
    try:
        return await _run_check(events, call, changes.sandbox, is_dropped=True)
    finally:
        await run_to_completion(changes.rollback())


async def _all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for all tasks. If one fails because of a bug in sbx, raise its error at once."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def _check_denied(sentence: str) -> Denied:
    return Denied(sentence, code="check_denied", hint="approve it, or leave the check out")


async def _now(result: ToolResult) -> ToolResult:
    return result
