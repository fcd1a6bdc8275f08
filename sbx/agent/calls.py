"""The tool calls of one answer. They run in parallel, except for calls that wait for an approval.

    parse → permission → tool_start → (approval) → the tool → tool_end
    parse → permission → tool_start → the tool, on a copy → (tool_pending) → commit → tool_end

The second sequence applies to each call that may change files of a project (changing.py). A call
that changed nothing needs no approval. A call that changed files needs an approval of its effect,
unless the setting of the conversation allows it. Commands that follow each other are tried at the
same time, each on its own copy; other calls see the changes of all calls before them. Questions
and commits come one at a time, in the order of the calls. If an earlier call has changed the same
files since the trial, the call is tried again before the user is asked.

`tool_start` events and results are in the order of the calls. If a call needs an approval,
`approvals` has recorded it as pending before its `tool_start` or `tool_pending` is emitted.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal

from msgspec.structs import replace

from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.call_events import (
    NOT_BEGUN,
    AgentCall,
    CallAction,
    CallEvents,
    CallQuestions,
    EmitEvent,
)
from sbx.agent.changing import (
    DROPPED,
    DROPPED_BUT_VARIABLES,
    ChangeTrial,
    DryRunCommand,
    ReadSetting,
    TrialTurn,
    TrialTurns,
    ask_always,
    command_of,
    compared,
    dry_run_or_none,
    reaches_out,
    trial_from_dry_run,
)
from sbx.agent.compaction import IMAGES_TOLD_SIZE
from sbx.agent.history import ENDED, ENDED_AFTER, ENDED_ON_COPY
from sbx.agent.messages import TokenUsage, ToolCall, carried
from sbx.agent.sandbox import ToolChanges, ToolSandbox, commands_allowed, is_sandboxed
from sbx.agent.tools import access
from sbx.agent.tools.approval_rules import COMMAND_TOOL, Permissions, rule_kinds, subject
from sbx.agent.tools.execution import EXECUTE_COMMAND
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import (
    FORBIDDEN,
    MISSED_CHANGES,
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
    Effect,
    Ruling,
    Tool,
    ToolCallRequest,
    ToolResult,
)
from sbx.aio import run_to_completion
from sbx.errors import Denied, SbxError, TooLarge, Unavailable
from sbx.policy.grants import Grants
from sbx.protocol.approvals import ABORT, ApprovalDecision
from sbx.telemetry import spans

HERE = AgentContext("local", "default")
CHECK = "completion_check"  # the name of the check of a task in events
CALLS_MAX = 128  # per answer
AT_ONCE = 16  # the limit of waiting runs in a conversation
_TRIED_AGAIN = "\n[sbx] An earlier call has changed the same files: this call is tried again.\n"

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
        self._sandboxed = is_sandboxed(sandbox)
        self._events = CallEvents(emit, self._sandboxed)
        self._questions = CallQuestions(approvals, place, run_id, self._events)
        self._rulings = _Rulings(sandbox, permissions or Permissions(), self._questions)
        self._changes = changes
        self._grants = access.grants_of(sandbox)
        self._trials = TrialTurns()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._images_left = 0
        self._calls: list[AgentCall] = []
        self.usage = TokenUsage()  # of sub-agents

    async def make_all(
        self, calls: Sequence[ToolCall], results: list[ToolResult] | None = None
    ) -> Sequence[ToolResult]:
        """Make the calls and return their results in order. A failure of a call is its result.

        Cancelling this interrupts running calls and denies pending ones. `results`, if passed, then
        holds the results that are available, and for each other call how far it came.
        """
        results = [] if results is None else results
        results[:] = [NOT_BEGUN for _ in calls]
        self._images_left = IMAGES_TOLD_SIZE
        self._calls.clear()
        self._trials = TrialTurns()
        states: list[AgentCall] = []
        tasks: list[asyncio.Task[None]] = []

        async def act(place: int, action: CallAction) -> None:
            results[place] = await self._run_action(states[place], action)

        try:
            for place, call in enumerate(calls):
                states.append(call_state := AgentCall(call, of=min(len(calls), CALLS_MAX)))
                self._calls.append(call_state)
                if place < CALLS_MAX:
                    action = await self._start(call_state)
                else:
                    action = self._events.refused(call_state, TOO_MANY_CALLS)
                tasks.append(asyncio.create_task(act(place, action)))
            if tasks:
                await _all(tasks)
        except BaseException:
            await run_to_completion(self._ended(tasks))
            for place, call_state in enumerate(states):
                if results[place] is NOT_BEGUN:
                    results[place] = call_state.ended
            raise
        return results

    async def check(self, command: str) -> ToolResult:
        """Run the check of a task; events show it as a call. It has the permissions of a command.
        In a project it runs on a copy, and its changes are dropped; where that is impossible, a
        person must approve it. Raise the errors of `start_shell`, and Denied `check_denied`."""
        call = AgentCall(ToolCall(f"check-{secrets.token_hex(8)}", CHECK, ""), of=1)
        call.arguments = {"command": command}
        self._calls[:] = [call]
        try:
            result = await self._checked(call, await self._rulings.of(call, EXECUTE_COMMAND))
            self._events.end(call, result)
            return result
        finally:
            await run_to_completion(self._ended([]))

    async def _checked(self, call: AgentCall, ruling: Ruling) -> ToolResult:
        if ruling == "deny":
            raise _check_denied("this check may not run here")
        kept = _trial_of(self._sandbox, call, ruling, EXECUTE_COMMAND)
        if kept and (result := await _check_copy(self._events, call, kept[0])) is not None:
            return result
        if ruling != "allow":
            if not self._questions.possible:
                raise _check_denied("a person must approve this check, and none can be asked")
            call.remember_as = ()  # a rule would name a tool that no model can call
            call.decision = await self._questions.answer(call)
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
                decision = call.pending.current_decision or ApprovalDecision(False, ABORT, 0.0)
                self._events.decision(call, decision)
                if not decision.approved:
                    call.ended = denied(decision, call.dropped)
            if call.open:
                self._events.end(call, call.ended)

    # -- one call --------------------------------------------------------------------------------

    async def _start(self, call: AgentCall) -> CallAction:
        """Emit the start of a call. Return the rest as an action."""
        arguments = self._tools.parse(call.call)
        if isinstance(arguments, ToolResult):
            return self._events.refused(call, arguments)
        call.arguments = arguments
        try:
            tool = self._tools.get(call.call.name)
            ruling = await self._rulings.of(call, tool)
            if ruling == "deny":
                return self._events.refused(call, FORBIDDEN)
            if (kept := _trial_of(self._sandbox, call, ruling, tool)) is not None:
                return await self._start_trial(call, ruling, tool, *kept)
            if ruling == "allow":
                call.turn = self._trials.read() if tool.confined else None
                return self._events.started(call, partial(self._make, call))
            if not self._questions.possible:
                return self._events.refused(call, NO_APPROVER)
            first = ruling == "ask_first" or not self._sandboxed
            command = None if first else command_of(call.call.name, arguments)
            if command is not None and hasattr(self._sandbox, "dry_run"):
                call.turn = self._trials.enter()
                dry_run = partial(self._run_after_dry_run, call, ruling, command)
                return self._events.started(call, dry_run, approval_required=None)
            await self._questions.ask(call)
            return partial(self._make_after_approval, call, tool, ruling)
        except SbxError as error:
            return self._events.refused(call, failed(error))

    async def _start_trial(
        self, call: AgentCall, ruling: Ruling, tool: Tool, begin: _Begin, effect: _TrialKind
    ) -> CallAction:
        allowed = ruling == "allow" or (await self._changes()).mode == "allow"
        # A tool that only writes files may create a host executable, which no setting allows.
        is_known = allowed and ruling != "ask" and effect != "write"
        trial = self._trial(call, ruling, tool, begin, effect)
        return self._events.started(call, trial, approval_required=False if is_known else None)

    def _trial(
        self, call: AgentCall, ruling: Ruling, tool: Tool, begin: _Begin, effect: _TrialKind
    ) -> CallAction:
        call.turn = self._trials.enter(parallel=effect == "command" or tool.independent)
        call.dropped = DROPPED_BUT_VARIABLES if effect == "code" else DROPPED
        return partial(self._make_after_trial, call, call.turn, ruling, tool, begin, effect)

    async def _run_action(self, call: AgentCall, action: CallAction) -> ToolResult:
        with spans.span("sbx.tool", tool=call.call.name, tool_call=call.call.id):
            try:
                result = await action()
            except SbxError as error:
                result = failed(error)
            finally:
                if call.turn is not None:
                    call.turn.leave()
            spans.annotate(is_error=result.is_error)
        if result.usage is not None:
            self.usage += result.usage
        if call.turn is not None and call.turn.missed_changes:
            result = replace(result, text=f"{result.text}{MISSED_CHANGES}")
        self._events.end(call, result)
        if call.call.name == access.NAME or self._grants is None or not self._questions.possible:
            return result
        return await self._with_requests(result, self._grants)

    async def _make(self, call: AgentCall, copy: ToolSandbox | None = None) -> ToolResult:
        """Let the tool act on the sandbox itself, or on a copy."""
        async with self._turns:
            call.ended = ToolResult(ENDED if copy is None else ENDED_ON_COPY + call.dropped, True)
            with call.timed():
                result = await self._tools.make(
                    call.call,
                    call.arguments,
                    copy or self._sandbox,
                    partial(self._events.output, call),
                    of=call.of,
                    decision=call.decision,
                )
        self._images_left -= sum(len(image.data) for image in result.images)
        if self._images_left < 0:  # more than the model would receive
            result = replace(result, images=())
        return result

    # -- calls that need an approval -------------------------------------------------------------

    async def _make_after_approval(
        self, call: AgentCall, tool: Tool | None = None, ruling: Ruling = "ask"
    ) -> ToolResult:
        call.decision = await self._questions.answer(call)
        if not call.decision.approved:
            return denied(call.decision)
        if tool is None or ruling != "ask_first":
            return await self._make(call)
        kept = _trial_of(self._sandbox, call, "allow", tool)
        return await (self._trial(call, "allow", tool, *kept)() if kept else self._make(call))

    async def _with_requests(self, result: ToolResult, grants: Grants) -> ToolResult:
        """Ask a person about the access that was refused during a call. Return its result with the
        answers."""
        answers = [result.text]
        for refused in grants.take_refused():
            self._calls.append(call := AgentCall(access.request_for(refused), of=1))
            answer = await self._run_action(call, await self._start(call))
            answers.append(f"[sbx] The sandbox refused {refused}. {answer.text}")
        return replace(result, text="\n".join(answers))

    async def _run_after_dry_run(
        self, call: AgentCall, ruling: Ruling, command: DryRunCommand
    ) -> ToolResult:
        """Dry-run a command and commit its changes after approval, without a second run. If the
        workspace has changed meanwhile, change nothing: a second yes to the same call id must never
        approve an effect that the user has not seen."""
        assert call.turn is not None
        await call.turn.may_try()
        with call.timed():
            dry_run = await dry_run_or_none(self._sandbox, command)
        if dry_run is None:
            return await self._make_after_approval(call)
        result = partial(self._tools.describe, call.call, dry_run.run, self._sandbox, of=call.of)
        call.dropped = DROPPED
        try:
            return await self._apply(call, ruling, trial_from_dry_run(dry_run, result))
        finally:
            await run_to_completion(dry_run.discard())

    async def _make_after_trial(
        self,
        call: AgentCall,
        turn: TrialTurn,
        ruling: Ruling,
        tool: Tool,
        begin: _Begin,
        effect: _TrialKind,
    ) -> ToolResult:
        """Run any other tool on a copy of the project. If an earlier call of the answer has changed
        the same files meanwhile, run it once more; no earlier call is left then."""
        while True:
            await turn.may_try()
            try:
                with call.timed():
                    changes = await begin(effect)
            except (TooLarge, Unavailable):
                await turn.may_change()
                return await self._make_untried(call, ruling)
            try:
                result = await self._make(call, changes.sandbox)
                with call.timed():
                    trial = await compared(changes, result)
                turn.changed = not trial.is_empty
                if turn.changed or ruling == "ask":
                    await turn.may_change()
                if not turn.conflicts(trial.paths):
                    return await self._apply(call, ruling, trial)
                if not tool.confined:  # it may have acted elsewhere, too
                    return WORKSPACE_CHANGED
                self._events.output(call, "stderr", _TRIED_AGAIN)
            finally:
                await run_to_completion(changes.rollback())

    async def _make_untried(self, call: AgentCall, ruling: Ruling) -> ToolResult:
        """Make a call in a project that cannot be copied. It is approved before it runs in the
        project itself."""
        if ruling == "allow" or (ruling != "ask" and (await self._changes()).mode == "allow"):
            return await self._make(call)
        if not self._questions.possible:
            return NO_APPROVER_FOR_CHANGES
        call.dropped = ""
        return await self._make_after_approval(call)

    async def _apply(self, call: AgentCall, ruling: Ruling, trial: ChangeTrial) -> ToolResult:
        """Decide about the changes of a call, then make exactly these changes or none."""
        setting = await self._changes()
        allowed = ruling == "allow" or (ruling != "ask" and trial.allowed_by(setting))
        if not allowed or trial.always_asked:
            if not self._questions.possible:
                return NO_APPROVER_FOR_CHANGES
            decision = await self._questions.answer(call, trial.shown)
            if not decision.approved:
                return denied(decision, call.dropped)
        with call.timed():
            if not await run_to_completion(_commit(call, trial)):
                return WORKSPACE_CHANGED
            return await trial.result()


class _Rulings:
    """Decides which calls need an approval, by permissions and the rules of the user."""

    def __init__(
        self, sandbox: ToolSandbox, permissions: Permissions, questions: CallQuestions
    ) -> None:
        self._sandbox = sandbox
        self._permissions = permissions
        self._questions = questions
        self._grants = access.grants_of(sandbox)

    async def of(self, call: AgentCall, tool: Tool) -> Ruling:
        if call.call.name == access.NAME and self._grants is not None:
            call.arguments = access.question(self._grants, call.arguments)
            call.remember_as = access.durations(call.arguments)
            return "ask"  # no rule and no permission answers this question
        ruling = self._permissions.of(tool, call.arguments)
        # "Always" has a meaning for commands, and for calls that are approved as a call. Others are
        # approved by their changes, which may differ the next time.
        asks = ruling in ("ask", "ask_first")
        as_call = asks and _trial_of(self._sandbox, call, ruling, tool) is None
        as_command = tool.name == COMMAND_TOOL and (asks or ruling == "changes")
        kinds = rule_kinds(tool.name, call.arguments) if as_call or as_command else ()
        call.remember_as = kinds
        text = subject(tool.name, call.arguments) if kinds else None
        if text is not None and await self._questions.is_remembered(tool.name, text):
            return "allow"
        return ruling


def _trial_of(
    sandbox: ToolSandbox, call: AgentCall, ruling: Ruling, tool: Tool
) -> tuple[_Begin, _TrialKind] | None:
    """Return the function that starts a trial of this call on a copy, and its kind. Return None
    for a call that only reads, a command that is allowed or needs the network, and a call that
    may act outside the sandbox and must be approved before it runs."""
    begin, effect = getattr(sandbox, "begin", None), tool.effect(call.arguments)
    if effect == "read" or begin is None or not is_sandboxed(sandbox) or commands_allowed(sandbox):
        return None
    if effect == "command" and (ruling == "allow" or reaches_out(call.arguments)):
        return None
    if ruling == "ask_first" or (ruling == "ask" and not tool.confined):
        return None
    return begin, effect


async def _commit(call: AgentCall, trial: ChangeTrial) -> bool:
    """Return whether the changes were applied."""
    call.ended = ToolResult(ENDED, is_error=True)
    if applied := await trial.committed():
        call.ended = ToolResult(ENDED_AFTER, is_error=True)
        if call.turn is not None:
            call.turn.applied = trial.paths
    else:
        call.ended = WORKSPACE_CHANGED
    return applied


async def _run_check(
    events: CallEvents, call: AgentCall, sandbox: ToolSandbox, *, is_dropped: bool = False
) -> ToolResult:
    if not call.open:
        events.start(call)
    call.ended = ToolResult(ENDED, is_error=True)
    emit = partial(events.output, call)
    live = ToolCallRequest(call.call.id, sandbox, emit, is_dropped=is_dropped)
    with call.timed():
        output = await EXECUTE_COMMAND.act(live, call.arguments)
    result = output if isinstance(output, ToolResult) else ToolResult(output)
    return replace(result, text=carried(cut(result.text, RESULT_MAX)))


async def _check_copy(events: CallEvents, call: AgentCall, begin: _Begin) -> ToolResult | None:
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
