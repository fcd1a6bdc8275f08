"""One execution in a kernel, from its start to its result: a cell, a request, or a command.

The output of a run is recorded, or passed on at once (`ForwardedRun`).
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied
from sbx.kernels.kernel import Kernel
from sbx.protocol.runs import Cause, Run, RunError, Status
from sbx.run_methods import OnInput
from sbx.runtime.run import notes
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context_kernel import ContextKernel
from sbx.runtime.run.stdin import InputRequests
from sbx.runtime.run.termination import (
    Ending,
    GracefulTermination,
    StopReason,
    cut_off,
    ending_in_kernel,
    ending_of_command,
    ending_of_program,
    ending_of_reply,
    exit_code,
    explanation,
)

_log = logging.getLogger(__name__)
_TIME_TO_HIT_A_LIMIT_S = 0.1
Published = (
    frames.Stream
    | frames.DisplayData
    | frames.ExecuteResult
    | frames.ErrorFrame
    | frames.ClearOutput
    | frames.InputRequestFrame
    | frames.CommOpenFrame
    | frames.CommMsgFrame
)
OnPublished = Callable[[Published], Awaitable[None]]
CellEnd = frames.ReplyFrame | KernelDied | frames.MalformedFrame


class ActiveExecution:
    """`lost`: the state of an earlier kernel is lost."""

    def __init__(
        self,
        context: ContextKernel,
        live: ActiveRun,
        kernel: Kernel,
        termination: GracefulTermination,
        *,
        lost: bool,
    ) -> None:
        self.live = live
        self.kernel = kernel
        self.termination = termination
        self._context = context
        self._lost = lost

    def _finish(self, ending: Ending, *, state_lost: bool, exit_code: int | None = None) -> Run:
        status, cause = ending
        grants = self._context.grants
        error = explanation(ending, grants.limits)
        if status is Status.INTERRUPTED:
            error = self.live.halted or self._context.halting or error
        # No program has tried a connection in a shorter time.
        is_long = self.live.elapsed_s > _TIME_TO_HIT_A_LIMIT_S
        if is_long and self._context.policy.network.mode == "none":
            self.live.note(notes.NO_NETWORK, notes.lacks_network)
        if self._context.git_outside:
            self.live.note(notes.NO_REPOSITORY, notes.lacks_repository)
        self.live.note(notes.NO_INTERPRETER, notes.lacks_interpreter)
        run = self.live.finish(
            status, cause=cause, error=error, state_lost=state_lost, exit_code=exit_code
        )
        grants.note_end(run)
        return run

    async def _finish_without_kernel(self) -> Run:
        """Return the result of a run during which the kernel ended."""
        live, kernel = self.live, self.kernel
        if self._context.gone is not None and live.halted is None:
            closed = self._context.closed("was closed while this ran")
            live.fail(closed)
            raise closed
        why, seen = self.termination.why, kernel.seen  # before the kill
        ending = ending_in_kernel(kernel, seen, await kernel.kill(), why)
        if ending[1] is Cause.CRASHED and (error := cut_off(kernel)) is not None:
            return live.finish(Status.KILLED, cause=Cause.CRASHED, error=error, state_lost=True)
        return self._finish(ending, state_lost=True)


class ActiveCell(ActiveExecution):
    """A cell, or another request to the kernel."""

    def __init__(
        self,
        context: ContextKernel,
        live: ActiveRun,
        kernel: Kernel,
        timeout_s: float,
        grace_s: float,
        on_input: OnInput | None = None,
        *,
        lost: bool = False,
    ) -> None:
        termination = GracefulTermination(timeout_s, grace_s, kernel.interrupt, kernel.kill)
        super().__init__(context, live, kernel, termination, lost=lost)
        self._questions: InputRequests | None = None
        if on_input is not None:
            self._questions = InputRequests(
                kernel, on_input, lambda: termination.stop(StopReason.CALLER)
            )

    async def follow(self) -> CellEnd:
        """Read the frames up to the end. A cancelled call can be repeated, and continues."""
        kernel, live = self.kernel, self.live
        try:
            while True:
                frame = await self.termination.next(kernel.next, at_once=kernel.has_next)
                if isinstance(frame.content, frames.ReplyFrame):
                    live.replied(frame.content)
                    return frame.content
                live.add(frame)
                if live.pass_on is not None and not self.termination.deadline_near:
                    await live.pass_on()
                    await self.termination.check_deadline()
                if live.over:
                    await self.termination.stop(StopReason.OUTPUT)
                elif (
                    isinstance(frame.content, frames.InputRequestFrame)
                    and self._questions is not None
                ):
                    self._questions.ask(frame.content.prompt)
                    await asyncio.sleep(0)  # now, also when the next frame is there already
        except (KernelDied, frames.MalformedFrame) as error:
            return error

    def close(self) -> None:
        if self._questions is not None:
            self._questions.close()

    def conclude_at_once(self, end: CellEnd) -> Run | None:
        """Return the result if nothing has to be read or rendered for it."""
        if isinstance(end, frames.ReplyFrame) and not (
            self.live.is_long or self._may_have_hit_a_limit(end)
        ):
            return self._reply(end)
        return None

    async def conclude(self, end: CellEnd) -> Run:
        await self.live.render()
        if isinstance(end, frames.MalformedFrame):
            self.kernel.cut_off = f"it sent an invalid frame: {end}"
            _log.warning("a kernel was cut off: %s", end)
        if not isinstance(end, frames.ReplyFrame):
            return await self._finish_without_kernel()
        hits = 0
        if self._may_have_hit_a_limit(end):
            # also so that the next run does not report a child that died of a limit in this one
            _, seen = self.kernel.seen
            hits = (await self.kernel.counters()).pids_max_hits - seen
        return self._reply(end, pids_max_hits=hits)

    def _may_have_hit_a_limit(self, reply: frames.ReplyFrame) -> bool:
        return reply.status == "error" or self.live.elapsed_s > _TIME_TO_HIT_A_LIMIT_S

    def _reply(self, reply: frames.ReplyFrame, *, pids_max_hits: int = 0) -> Run:
        why = self.termination.why
        ending = ending_of_reply(reply, why, pids_max_hits=pids_max_hits)
        code = reply.exit_code if isinstance(reply, frames.ExecuteReply) else None
        # A reply can arrive in the moment of the kill
        lost = self._lost or self.termination.killed
        return self._finish(ending, state_lost=lost, exit_code=code)


class ActiveProgram(ActiveCell):
    """A file of Python, in a process of its own, or in that of the kernel if the policy allows no
    other. Its finalisation belongs to the run."""

    def __init__(
        self,
        context: ContextKernel,
        live: ActiveRun,
        kernel: Kernel,
        timeout_s: float,
        grace_s: float,
        on_input: OnInput | None = None,
        *,
        lost: bool,
        ends_kernel: bool,
    ) -> None:
        super().__init__(context, live, kernel, timeout_s, grace_s, on_input, lost=lost)
        self._ends_kernel = ends_kernel
        if not ends_kernel:
            self.termination.kill_by(kernel.kill_program)

    async def follow(self) -> CellEnd:
        try:
            end = await super().follow()
            if self._ends_kernel and isinstance(end, frames.ReplyFrame):
                rest = await super().follow()  # the output of finalisers
                if not isinstance(rest, KernelDied) or self.termination.why is not None:
                    return rest
            return end
        except TimeoutError:
            return KernelDied("it outlived the kill of its program")

    def conclude_at_once(self, end: CellEnd) -> Run | None:
        return None

    async def conclude(self, end: CellEnd) -> Run:
        if not isinstance(end, frames.ProgramReply):
            return await super().conclude(end)
        await self.live.render()
        code, why = end.exit_code, self.termination.why
        oom_kills = hits = 0
        if code != 0:
            seen = self.kernel.seen
            counters = await self.kernel.counters()
            oom_kills, hits = counters.oom_kills - seen[0], counters.pids_max_hits - seen[1]
        if self._ends_kernel:
            await self.kernel.kill()
        ending = ending_of_program(code, why, oom_kills=oom_kills, pids_max_hits=hits)
        return self._finish(ending, state_lost=self._lost, exit_code=code)


class ActiveCommand(ActiveExecution):
    """A command that was started in the jail."""

    def __init__(
        self,
        context: ContextKernel,
        live: ActiveRun,
        kernel: Kernel,
        command: Command,
        timeout_s: float,
        grace_s: float,
        *,
        lost: bool,
        ends_jail: bool,
    ) -> None:
        """`ends_jail`: the jail ends with the command."""
        termination = GracefulTermination(
            timeout_s,
            grace_s,
            lambda: command.signal(signal.SIGINT),
            lambda: command.signal(signal.SIGKILL),
        )
        super().__init__(context, live, kernel, termination, lost=lost)
        self._command = command
        self._ends_jail = ends_jail

    async def follow(self) -> frames.Exited | None:
        """Read the output up to the end. Return None if the kernel ended first."""
        command = self._command
        try:
            while True:
                frame = await self.termination.next(command.next, at_once=command.has_next)
                if isinstance(frame, frames.Exited):
                    return frame
                self.live.add(frames.Frame(frame, None, len(frame.text)))
                if self.live.over:
                    await self.termination.stop(StopReason.OUTPUT)
        except (KernelDied, TimeoutError):
            return None

    async def conclude(self, exited: frames.Exited | None) -> Run:
        await self.live.render()
        if exited is None:
            return await self._finish_without_kernel()
        if exited.error is not None:
            error = RunError("CommandNotStarted", exited.error, exited.error)
            return self.live.finish(
                Status.KILLED, cause=Cause.PIDS, error=error, state_lost=self._lost
            )
        code = exit_code(exited)
        oom_kills = hits = 0
        if code != 0:
            seen = self.kernel.seen
            counters = await self.kernel.counters()
            oom_kills = counters.oom_kills - seen[0]
            hits = counters.pids_max_hits - seen[1]
        if self._ends_jail:  # with the processes that the command left
            await self.kernel.kill()
        ending = ending_of_command(
            code, self.termination.why, oom_kills=oom_kills, pids_max_hits=hits
        )
        return self._finish(ending, state_lost=self._lost, exit_code=code)


class ForwardedRun(ActiveRun):
    """A run that passes its output on at once, and keeps none of it.

    The output counts as that of any run, and beyond `output_max` it ends the run: a stream is cut
    there, and nothing follows. `reply` is the last frame of the kernel, if there was one. For a
    cell, `payload` and `expressions` are its decoded parts.
    """

    def __init__(self, run_id: str, output_max: int, publish: OnPublished) -> None:
        super().__init__(run_id, output_max)
        self.reply: frames.ReplyFrame | None = None
        self.payload: Sequence[Mapping[str, Any]] = ()
        self.expressions: Mapping[str, Mapping[str, Any]] = {}
        self.pass_on = self._pass_on
        self._publish = publish
        self._due: Published | None = None

    def add(self, frame: frames.Frame) -> None:
        if self.over:
            return
        self._room -= frame.cost
        self.over = self._room < 0 or isinstance(frame.content, frames.OutputLimit)
        content = frame.content
        if isinstance(content, frames.ErrorFrame):
            self._error = RunError(content.ename, content.evalue, "\n".join(content.traceback))
        if self.over and isinstance(content, frames.Stream):
            content = frames.Stream(content.name, self._in_room(content.text))
        elif self.over and not isinstance(content, frames.ErrorFrame):
            return
        if isinstance(content, Published):
            self._due = content

    def replied(self, reply: frames.ReplyFrame) -> None:
        super().replied(reply)
        match reply:
            case frames.ExecuteReply():
                payload, expressions = map(frames.loose, (reply.payload, reply.user_expressions))
                if not isinstance(payload, list) or not isinstance(expressions, dict):
                    raise frames.MalformedFrame(
                        "a reply with an invalid payload or invalid expressions"
                    )
                self.payload = [frames.as_object(item) for item in payload]
                self.expressions = {n: frames.as_object(item) for n, item in expressions.items()}
            case frames.CompleteReply(metadata=metadata):
                frames.as_object(frames.loose(metadata))
            case frames.InspectReply(data=data, metadata=metadata):
                frames.bundle(data)
                frames.as_object(frames.loose(metadata))
        self.reply = reply

    @property
    def fatal(self) -> RunError | None:
        """The reason for the end of the kernel, if it ended in this run."""
        run = self._outcome
        return run.error if isinstance(run, Run) and run.state_lost else None

    async def _pass_on(self) -> None:
        due, self._due = self._due, None
        if due is not None and self.halted is None:
            await publish(self._publish, due)


async def publish(on_published: OnPublished, content: Published) -> None:
    """Pass output on, and wait for the listener. Raise frames.MalformedFrame, which the listener
    may raise for the content."""
    try:
        await on_published(content)
    except frames.MalformedFrame:
        raise
    except Exception:  # noqa: BLE001  # the border: a bug of the listener ends no kernel
        _log.exception("output of a kernel could not be passed on")
