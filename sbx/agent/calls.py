"""The tool calls of one answer: all at once, but for those that wait for a person.

    parse → permission → tool_start → (approval) → the tool → tool_end
    parse → permission → the tool, on a copy → tool_start → (approval) → commit → tool_end

The second is the way of every call that may change files of a project (changing.py): what changed
nothing is never asked about, what changed something is asked about by its effect, unless the
conversation's setting allows it. Such calls are made one after another: the second is to see what
the first changed. `tool_start` comes in the order of the calls otherwise, and so do the results. A
call that needs an approval is pending, and known to `approvals`, before its `tool_start` leaves.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from sbx.agent.approvals import Approvals, Pending, Place
from sbx.agent.changing import ReadSetting, Trial, ask_always, compared, of_rehearsal
from sbx.agent.compaction import IMAGES_TOLD_SIZE
from sbx.agent.events import Tell
from sbx.agent.history import ENDED
from sbx.agent.messages import ToolCall
from sbx.agent.rehearsing import Command, command_of, needs_network, rehearsed
from sbx.agent.sandbox import InProject, KeepsChanges, Rehearses, Sandbox, is_sandboxed
from sbx.agent.tools.permissions import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import failed
from sbx.agent.tools.rules import COMMAND_TOOL, subject
from sbx.agent.tools.tool import Arguments, Emit, Ruling, ToolResult
from sbx.errors import SbxError, TooLarge, Unavailable
from sbx.isolation.patience import to_the_end
from sbx.protocol.agent import Json, ToolApproval, ToolEnd, ToolOutput, ToolStart
from sbx.protocol.approvals import ABORT, Decision

HERE = Place("local", "default")
_FORBIDDEN = ToolResult("Error (denied): this call is not allowed here.", is_error=True)
_NOBODY = ToolResult("Error (denied): a person must approve this, and none can be asked.", True)
_NOBODY_FOR_CHANGES = ToolResult(
    "Error (denied): this call changes files of the project, which a person must approve, and none"
    " can be asked. Its changes were dropped. The setting `changes` of the conversation (or"
    " `ask_outside`, for some directories) allows changes without a question.",
    is_error=True,
)
_CHANGED = ToolResult(
    "Error (workspace_changed): no file was changed. The call was tried on a copy of the workspace,"
    " but other changes of the same files came before its own could be made, or the copy was too"
    " old. Look at the files, and call it again to have it tried again.",
    is_error=True,
)
_NOBODY_AT_ALL = (
    " The setting `changes` of the conversation (or `ask_outside`, for some directories) allows"
    " changes without a question."
)
_TOO_MANY = ToolResult("Error (too_many_calls): this was not done. Make fewer calls at once.", True)
CALLS_MAX = 128  # of one answer
AT_ONCE = 16  # as many runs as may wait in a conversation

_Act = Callable[[], Awaitable[ToolResult]]


class Calls:
    """Makes the calls of one run. `tell` gets the events, as they happen."""

    def __init__(
        self,
        sandbox: Sandbox,
        tools: Tools,
        *,
        tell: Tell,
        run_id: str,
        permissions: Permissions | None = None,
        approvals: Approvals | None = None,
        place: Place = HERE,
        changes: ReadSetting = ask_always,
    ) -> None:
        """`changes` reads which changes of files are asked about now."""
        self._sandbox = sandbox
        self._tools = tools
        self._permissions = permissions or Permissions()
        self._approvals = approvals
        self._place = place
        self._run_id = run_id
        self._tell = tell
        self._sandboxed = is_sandboxed(sandbox)
        self._changes = changes
        self._trying = asyncio.Lock()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._images_left = 0

    async def made(
        self, calls: Sequence[ToolCall], results: list[ToolResult] | None = None
    ) -> Sequence[ToolResult]:
        """The results, in the order of the calls; what goes wrong with one is its result.

        Cancelling it ends what runs and denies what is pending; `results`, where given, then holds
        those there are, and says of the others that they were ended.
        """
        results = [] if results is None else results
        results[:] = [ToolResult(ENDED, is_error=True) for _ in calls]
        self._images_left = IMAGES_TOLD_SIZE
        begun: list[_Call] = []
        tasks: list[asyncio.Task[None]] = []

        async def act(place: int, one: _Call, what: _Act) -> None:
            results[place] = await self._acted(one, what)

        try:
            await self._tools.ready()
            for place, call in enumerate(calls):
                begun.append(one := _Call(call, of=min(len(calls), CALLS_MAX)))
                if place < CALLS_MAX:
                    what = await self._begun(one)
                else:
                    what = self._started(one, lambda: _now(_TOO_MANY))
                tasks.append(asyncio.create_task(act(place, one, what)))
            if tasks:
                await _all(tasks)
        except BaseException:
            await to_the_end(self._ended(begun, tasks))
            raise
        return results

    async def _ended(self, begun: Sequence["_Call"], tasks: Sequence["asyncio.Task[None]"]) -> None:
        """A call that is cancelled denies what it waits for, and gives up what it runs."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in begun:
            if one.pending is not None:
                self._tell_decision(one, one.pending.told or Decision(False, ABORT, 0.0))
            if one.open:
                self._tell_end(one, ToolResult(ENDED, is_error=True))

    # -- one call --------------------------------------------------------------------------------

    async def _begun(self, one: "_Call") -> _Act:
        """Tell that it begins, unless it must be tried before that; what is to be done then."""
        arguments = self._tools.parse(one.call)
        if isinstance(arguments, ToolResult):
            return self._started(one, lambda: _now(arguments))
        one.arguments = arguments
        try:
            ruling = await self._ruling(one)
            if ruling == "deny":
                return self._started(one, lambda: _now(_FORBIDDEN))
            if (kept := self._trying_it(one, ruling)) is not None:
                return partial(self._made_after_trial, one, ruling, *kept)
            if ruling == "allow":
                return self._started(one, partial(self._made, one))
            if self._approvals is None:
                return self._started(one, lambda: _now(_NOBODY))
            command = command_of(one.call.name, arguments) if self._sandboxed else None
            if command is not None and isinstance(self._sandbox, Rehearses):
                return partial(self._made_after_rehearsal, one, ruling, command, self._sandbox)
            return partial(self._made_after_approval, one, await self._asked(one))
        except SbxError as error:
            refused = failed(error)
            return self._started(one, lambda: _now(refused))

    async def _ruling(self, one: "_Call") -> Ruling:
        tool = self._tools.get(one.call.name)
        ruling = self._permissions.of(tool, one.arguments)
        one.may_be_remembered = self._may_be_remembered(one, ruling)
        if one.may_be_remembered and self._approvals is not None:
            text = subject(tool.name, one.arguments)
            if await self._approvals.remembers(self._place, tool.name, text):
                return "allow"
        return ruling

    def _may_be_remembered(self, one: "_Call", ruling: Ruling) -> bool:
        """Whether "always" has a meaning: for a command, and for a call that is asked about as a
        call. Other calls are asked about by their changes, and the same code or file is another
        change next time, so no rule answers that question."""
        if one.call.name == COMMAND_TOOL:
            return ruling in ("ask", "changes")
        return ruling == "ask" and self._trying_it(one, ruling) is None

    def _trying_it(
        self, one: "_Call", ruling: Ruling
    ) -> tuple[KeepsChanges, Literal["write", "code", "command"]] | None:
        """What tries the call on a copy, and as what. None: the call is made as it is. That is a
        call that only reads, a command that is allowed or needs the network, and whatever may act
        on more than the sandbox and has to be approved before."""
        box, tool = self._sandbox, self._tools.get(one.call.name)
        effect = tool.effect(one.arguments)
        if effect == "read" or not isinstance(box, KeepsChanges) or not self._sandboxed:
            return None
        if isinstance(box, InProject) and box.commands_allowed:
            return None
        if effect == "command" and (ruling == "allow" or _reaches_out(one)):
            return None
        if ruling == "ask" and not tool.confined:
            return None
        return box, effect

    def _started(self, one: "_Call", act: _Act) -> _Act:
        self._tell_start(one)
        return act

    async def _acted(self, one: "_Call", act: _Act) -> ToolResult:
        try:
            result = await act()
        except SbxError as error:
            result = failed(error)
        if not one.open:  # it could not be begun
            self._tell_start(one)
        self._tell_end(one, result)
        return result

    async def _made(
        self, one: "_Call", sandbox: Sandbox | None = None, emit: Emit | None = None
    ) -> ToolResult:
        async with self._turns:
            with one.timed():
                result = await self._tools.make(
                    one.call,
                    one.arguments,
                    sandbox or self._sandbox,
                    emit or partial(self._tell_output, one),
                    of=one.of,
                )
        self._images_left -= sum(len(image.data) for image in result.images)
        if self._images_left < 0:  # more than a model would be told
            result = replace(result, images=())
        return result

    # -- one that a person is asked about --------------------------------------------------------

    async def _made_after_approval(self, one: "_Call", pending: Pending) -> ToolResult:
        decision = await self._decided(one, pending)
        return await self._made(one) if decision.approved else _denied(decision)

    async def _made_after_rehearsal(
        self, one: "_Call", ruling: Ruling, command: Command, sandbox: Rehearses
    ) -> ToolResult:
        """What was approved is what the rehearsal changed, and that is made so: the command does
        not run again. Where the workspace changed meanwhile nothing is done. To rehearse it anew is
        another call with another id: a second yes to this one, sent twice or late, is never a yes
        to an effect that was not seen."""
        async with self._trying:
            with one.timed():
                rehearsal = await rehearsed(sandbox, command)
            if rehearsal is None:
                return await self._made_after_approval(one, await self._asked(one))
            told = partial(self._tools.told, one.call, rehearsal.run, self._sandbox, of=one.of)
            try:
                return await self._settled(one, ruling, of_rehearsal(rehearsal, told))
            finally:
                await to_the_end(rehearsal.discard())

    async def _made_after_trial(
        self,
        one: "_Call",
        ruling: Ruling,
        sandbox: KeepsChanges,
        effect: Literal["write", "code", "command"],
    ) -> ToolResult:
        """The same for every tool: it acts on a copy of the project. What it prints is told once
        it is known whether it needs an approval, as that rides in `tool_start`."""
        async with self._trying:
            allowed = ruling == "allow" or (await self._changes()).mode == "allow"
            try:
                with one.timed():
                    changes = await sandbox.begin(effect)
            except (TooLarge, Unavailable):
                return await self._made_untried(one, allowed=allowed and ruling != "ask")
            try:
                # A tool that only writes files prints nothing, and may have to be asked about.
                if allowed and ruling != "ask" and effect != "write":
                    self._tell_start(one)
                emit = partial(self._tell_output, one) if one.open else one.later
                result = await self._made(one, changes.sandbox, emit)
                with one.timed():
                    kept = effect == "code"
                    trial = await compared(changes, result, keeps_variables=kept)
                return await self._settled(one, ruling, trial)
            finally:
                await to_the_end(changes.rollback())

    async def _made_untried(self, one: "_Call", *, allowed: bool) -> ToolResult:
        """Of a project that cannot be copied: the call is approved before it is made in the
        project itself."""
        if allowed:
            self._tell_start(one)
            return await self._made(one)
        if self._approvals is None:
            return _NOBODY_FOR_CHANGES
        return await self._made_after_approval(one, await self._asked(one))

    async def _settled(self, one: "_Call", ruling: Ruling, trial: Trial) -> ToolResult:
        """Decide about the changes of a call, and make exactly these or none."""
        setting = await self._changes()
        allowed = ruling == "allow" or (ruling != "ask" and trial.allowed_by(setting))
        allowed = allowed and not trial.always_asked
        if not allowed:
            if self._approvals is None:
                return _NOBODY_FOR_CHANGES
            decision = await self._decided(one, await self._asked(one, trial.shown))
            if not decision.approved:
                return _denied(decision, trial.denied)
        elif not one.open:
            self._tell_start(one)
            for stream, text in one.held_back():
                self._tell_output(one, stream, text)
        with one.timed():
            if not await trial.committed():
                return _CHANGED
            return await trial.result()

    async def _asked(self, one: "_Call", shown: Json | None = None) -> Pending:
        assert self._approvals is not None
        pending = await self._approvals.ask(
            self._place,
            run_id=self._run_id,
            tool_call_id=one.call.id,
            tool_name=one.call.name,
            tool_args=one.arguments,
            rehearsal=shown,
            may_be_remembered=one.may_be_remembered,
        )
        one.pending = pending
        self._tell_start(one, rehearsal=shown)
        return pending

    async def _decided(self, one: "_Call", pending: Pending) -> Decision:
        decision = await pending.decision()
        self._tell_decision(one, decision)
        return decision

    def _tell_decision(self, one: "_Call", decision: Decision) -> None:
        one.pending = None
        self._tell(ToolApproval(one.call.id, decision.approved, decision.by, decision.remembered))

    def _tell_start(self, one: "_Call", *, rehearsal: Json | None = None) -> None:
        one.open = True
        expires_at = None if one.pending is None else one.pending.approval.expires_at
        self._tell(
            ToolStart(
                one.call.id,
                one.call.name,
                one.arguments,
                approval_required=expires_at is not None,
                expires_at=expires_at,
                rehearsal=rehearsal,
                sandboxed=self._sandboxed,
            )
        )

    def _tell_output(self, one: "_Call", stream: str, text: str) -> None:
        self._tell(ToolOutput(one.call.id, "stderr" if stream == "stderr" else "stdout", text))

    def _tell_end(self, one: "_Call", result: ToolResult) -> None:
        one.open = False
        took_ms = round(one.took_s * 1000, 3)
        self._tell(ToolEnd(one.call.id, result.text, result.is_error, took_ms))


class _Call:
    """One call on its way, `of` so many: `open` between its tool_start and its tool_end, `pending`
    while it waits for a person. `took_s` is its work: nobody's thinking is counted."""

    def __init__(self, call: ToolCall, *, of: int) -> None:
        self.call = call
        self.of = of
        self.arguments: Arguments = {}
        self.open = False
        self.pending: Pending | None = None
        self.may_be_remembered = False
        self.took_s = 0.0
        self._held_back: list[tuple[str, str]] = []

    def later(self, stream: str, text: str) -> None:
        """Keep what the call prints until its `tool_start` has left."""
        self._held_back.append((stream, text))

    def held_back(self) -> list[tuple[str, str]]:
        """What was kept, once."""
        kept, self._held_back = self._held_back, []
        return kept

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.took_s += time.monotonic() - began


async def _all(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for all; the first that fails, by a bug of ours, is raised at once."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _now(result: ToolResult) -> ToolResult:
    return result


def _denied(decision: Decision, more: str = "") -> ToolResult:
    """`more`: of a call that was made on a copy, what became of that."""
    why = decision.why
    if more:
        hint = _NOBODY_AT_ALL if decision.by == "nobody" else ""
        why = f"{why.removesuffix(' It was not made.')}{more}{hint}"
    return ToolResult(f"Error (denied): {why}", is_error=True)


def _reaches_out(one: "_Call") -> bool:
    """Whether a command needs the network, which it has not on a copy."""
    of_bash = one.arguments.get("language") == "bash"
    command = one.arguments.get("code" if of_bash else "command")
    return isinstance(command, str) and needs_network(command)
