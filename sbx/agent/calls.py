"""The tool calls of one answer: all at once, but for those that wait for a person.

    parse → permission → tool_start → (approval) → the tool → tool_end

`tool_start` comes in the order of the calls, and so do the results. A call that needs an approval
is pending, and known to `approvals`, before its `tool_start` leaves; each waits for its own. A
command that can be rehearsed is asked for with what it would do (rehearsing.py), one after another:
the second is to see what the first changed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from sbx.agent.approvals import Approvals, Pending, Place
from sbx.agent.compaction import IMAGES_TOLD_SIZE
from sbx.agent.events import Tell
from sbx.agent.history import ENDED
from sbx.agent.messages import ToolCall
from sbx.agent.rehearsing import Command, command_of, committed, rehearsed, shown
from sbx.agent.sandbox import Rehearsal, Rehearses, Sandbox, is_sandboxed
from sbx.agent.tools.permissions import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.results import failed
from sbx.agent.tools.rules import subject
from sbx.agent.tools.tool import Arguments, ToolResult
from sbx.errors import SbxError
from sbx.isolation.patience import to_the_end
from sbx.protocol.agent import Json, ToolApproval, ToolEnd, ToolOutput, ToolStart
from sbx.protocol.approvals import ABORT, Decision

HERE = Place("local", "default")
_FORBIDDEN = ToolResult("Error (denied): this call is not allowed here.", is_error=True)
_NOBODY = ToolResult("Error (denied): a person must approve this, and none can be asked.", True)
_CHANGED = ToolResult(
    "Error (workspace_changed): nothing was done. What the command does was tried on a copy of the "
    "workspace and approved, but the workspace changed before that, or the copy was too old. Call "
    "it again to have it tried again.",
    is_error=True,
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
    ) -> None:
        self._sandbox = sandbox
        self._tools = tools
        self._permissions = permissions or Permissions()
        self._approvals = approvals
        self._place = place
        self._run_id = run_id
        self._tell = tell
        self._sandboxed = is_sandboxed(sandbox)
        self._rehearsing = asyncio.Lock()
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
        """Tell that it begins, unless it must be rehearsed before that; what is to be done then."""
        arguments = self._tools.parse(one.call)
        if isinstance(arguments, ToolResult):
            return self._started(one, lambda: _now(arguments))
        one.arguments = arguments
        try:
            match await self._permission(one):
                case "allow":
                    return self._started(one, partial(self._made, one))
                case "deny":
                    return self._started(one, lambda: _now(_FORBIDDEN))
            if self._approvals is None:
                return self._started(one, lambda: _now(_NOBODY))
            command = command_of(one.call.name, arguments) if self._sandboxed else None
            if command is not None and isinstance(self._sandbox, Rehearses):
                return partial(self._made_after_rehearsal, one, command, self._sandbox)
            return partial(self._made_after_approval, one, await self._asked(one))
        except SbxError as error:
            refused = failed(error)
            return self._started(one, lambda: _now(refused))

    async def _permission(self, one: "_Call") -> str:
        tool = self._tools.get(one.call.name)
        permission = self._permissions.of(tool, one.arguments)
        if permission == "ask" and self._approvals is not None:
            text = subject(tool.name, one.arguments)
            if await self._approvals.remembers(self._place, tool.name, text):
                return "allow"
        return permission

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

    async def _made(self, one: "_Call") -> ToolResult:
        def emit(stream: str, text: str) -> None:
            self._tell(ToolOutput(one.call.id, "stderr" if stream == "stderr" else "stdout", text))

        async with self._turns:
            with one.timed():
                result = await self._tools.make(
                    one.call, one.arguments, self._sandbox, emit, of=one.of
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
        self, one: "_Call", command: Command, sandbox: Rehearses
    ) -> ToolResult:
        """What was approved is what the rehearsal changed, and that is made so: the command does
        not run again. Where the workspace changed meanwhile nothing is done. To rehearse it anew is
        another call with another id: a second yes to this one, sent twice or late, is never a yes
        to an effect that was not seen."""
        async with self._rehearsing:
            with one.timed():
                rehearsal = await rehearsed(sandbox, command)
            if rehearsal is None:
                return await self._made_after_approval(one, await self._asked(one))
            try:
                decision = await self._decided(one, await self._asked(one, rehearsal))
                if not decision.approved:
                    return _denied(decision)
                with one.timed():
                    if not await committed(rehearsal):
                        return _CHANGED
                    return await self._tools.told(one.call, rehearsal.run, self._sandbox, of=one.of)
            finally:
                await to_the_end(rehearsal.discard())

    async def _asked(self, one: "_Call", rehearsal: Rehearsal | None = None) -> Pending:
        assert self._approvals is not None
        told = None if rehearsal is None else shown(rehearsal)
        pending = await self._approvals.ask(
            self._place,
            run_id=self._run_id,
            tool_call_id=one.call.id,
            tool_name=one.call.name,
            tool_args=one.arguments,
            rehearsal=told,
        )
        one.pending = pending
        self._tell_start(one, rehearsal=told)
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
        self.took_s = 0.0

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


def _denied(decision: Decision) -> ToolResult:
    return ToolResult(f"Error (denied): {decision.why}", is_error=True)
