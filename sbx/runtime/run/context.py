"""One live kernel at most, over the files of its conversation; its runs, one after the other.

The kernel starts with the first run that needs it and dies with the conversation, with the limit
it crossed, or with a deadline it ignored; the next run then starts another one and says
`state_lost`. Shell commands run beside a busy cell, in the kernel's own jail.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sbx import errors
from sbx.aio import check_process, run_to_completion
from sbx.isolation.broker.client import JailExit
from sbx.isolation.receipt import Receipt
from sbx.kernels import frames
from sbx.kernels.kernel import Command, Kernel, KernelDied
from sbx.policy import Policy
from sbx.protocol.runs import Cause, Quarantined, Run, RunError, Status
from sbx.run_methods import RunCall, RunMethods
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.files.files import OpenFiles
from sbx.runtime.link_watch import LinkWatch
from sbx.runtime.processes.scripts import Program
from sbx.runtime.run import checks, verdict
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.relay import ForwardedRun, Tell
from sbx.runtime.run.stdin import InputRequests, OnInput, Stdin
from sbx.runtime.run.termination import GracefulTermination, StopReason
from sbx.workspace.quarantine import Quarantine

_log = logging.getLogger(__name__)
_TIME_TO_HIT_A_LIMIT_S = 0.1

CellEnd = frames.ReplyFrame | KernelDied | frames.MalformedFrame
_STOPPED = RunError("KernelStopped", "its kernel was stopped", "")
_EVICTED = RunError("KernelEvicted", "its kernel made room for others", "")
_CLOSED = RunError("SandboxClosed", "its sandbox was closed, or not used for too long", "")
Asked = tuple[str, Any]  # the type of a frame that begins a turn, its content
StartKernel = Callable[[str, OpenFiles], Awaitable[Kernel]]  # in this context, over these files


@dataclass(frozen=True, slots=True)
class ClosedReason:
    """What was closed, and what is lost with it; in words."""

    what: str
    lost: str


SANDBOX_GONE = ClosedReason("the sandbox", "its files and state are gone")


@dataclass(frozen=True, slots=True)
class ActiveCell:
    """A cell, or another request, that was begun. `lost`: an earlier kernel's state is gone."""

    live: ActiveRun
    kernel: Kernel
    lost: bool
    ladder: GracefulTermination
    questions: InputRequests | None

    async def end(self) -> CellEnd:
        """Follow it to its end, whatever that is. May be cancelled, and called again to go on."""
        kernel, live = self.kernel, self.live
        try:
            while True:
                frame = await self.ladder.next(kernel.next, at_once=kernel.has_next)
                if isinstance(frame.content, frames.ReplyFrame):
                    live.replied(frame.content)
                    return frame.content
                live.add(frame)
                if live.pass_on is not None and not self.ladder.deadline_near:
                    await live.pass_on()
                    await self.ladder.check_deadline()
                if live.over:
                    await self.ladder.stop(StopReason.OUTPUT)
                elif (
                    isinstance(frame.content, frames.InputRequestFrame)
                    and self.questions is not None
                ):
                    self.questions.ask(frame.content.prompt)
                    await asyncio.sleep(0)  # now, also when the next frame is there already
        except (KernelDied, frames.MalformedFrame) as error:
            return error


class Context(RunMethods[ActiveRun]):
    """A kernel with its turn and its runs. Its methods may be called concurrently from one event
    loop.

    `opened` gives the files of its conversation, and `start` launches a kernel over them. Whoever
    reads what the kernel says holds `turn`.
    """

    def __init__(
        self,
        name: str,
        conversation: str,
        policy: Policy,
        opened: Callable[[], Awaitable[OpenFiles]],
        start: StartKernel,
        grace_s: float,
        *,
        disk: DiskLimit,
        had_kernel: bool = False,
        ends_with_command: bool = False,
    ) -> None:
        """`had_kernel`: an earlier kernel ended unasked, so that the next run reports `state_lost`.
        `ends_with_command`: the jail is for one command, and has ended before the run has."""
        self.name = name
        self.conversation = conversation
        self._policy = policy
        self._opened = opened
        self._quarantine: Quarantine | None = None
        self._start = start
        self._grace_s = grace_s
        self._pid = os.getpid()
        self.turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._kernel: Kernel | None = None
        self._starter: asyncio.Task[object] | None = None
        self._had_kernel = had_kernel
        self._ends_with_command = ends_with_command
        self._left_elsewhere = False
        self._disk = disk
        self._links = LinkWatch()
        self._running: GracefulTermination | None = None
        self._beside = 0
        self._ladders: dict[ActiveRun, GracefulTermination] = {}
        self._tasks: dict[ActiveRun, asyncio.Task[None]] = {}
        self._halting: RunError | None = None
        self._background = 0
        self._gone: ClosedReason | None = None
        self.used_at = time.monotonic()

    @property
    def output_max(self) -> int:
        """Bytes that one run may write."""
        return self._policy.limits.output_max

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        return self._kernel.receipt if self._kernel is not None and self._kernel.alive else None

    async def read_receipt(self) -> Receipt | None:
        """The same, read back from the live jail now: what `changed` since it started is named."""
        kernel = self._kernel
        return await kernel.read_receipt() if kernel is not None and kernel.alive else None

    @property
    def alive(self) -> bool:
        """Whether it has a live kernel."""
        return self._kernel is not None and self._kernel.alive

    @property
    def processes(self) -> list[int]:
        """The host pids of what runs inside; none while there is no live kernel."""
        return self._kernel.processes() if self._kernel is not None and self.alive else []

    @property
    def busy(self) -> bool:
        """Whether something runs, waits to run, or a kernel is being started."""
        return (
            bool(self._tasks or self._ladders or self._beside)
            or self._starting.locked()
            or self.turn.locked()
        )

    @property
    def state_is_kept(self) -> bool:
        """Whether a kernel lives, or lived, whose variables the caller may count on."""
        return self._had_kernel

    def mark_state_lost(self) -> None:
        """Cells come here that had their variables in another context: the next one says
        `state_lost`."""
        self._left_elsewhere = True

    # -- runs -----------------------------------------------------------------------------------

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell."""
        kernel = self.free_kernel
        if on_input is not None or kernel is None:
            return await super().run(code, timeout=timeout, on_input=on_input)
        timeout_s = self.checked(code, timeout)
        return await self.run_inline(kernel, self.new_run(), code, timeout_s)

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        check_process(self._pid)
        if self._running is None:
            return False
        await self._running.stop(StopReason.CALLER)
        return True

    def start_run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        on_input: OnInput | None = None,
        live: ActiveRun | None = None,
    ) -> ActiveRun:
        """Queue a cell; the run goes on whether or not anybody follows it. `live` is told of it,
        where it was made before by `new_run`.

        Raises Denied, BadRequest (`invalid_timeout`, `limit_widened`, `invalid_code`), TooLarge
        `code_too_large`, Closed.
        """
        timeout_s = self.checked(code, timeout)
        return self._launch(lambda live: self._cell(live, code, timeout_s, on_input), live)

    def start_call(self, call: RunCall) -> ActiveRun:
        if call.kind == "python":
            return self.start_run(call.code, timeout=call.timeout, on_input=call.on_input)
        checks.require_capability(self._policy, "shell")
        checks.require_processes(self._policy)
        checks.check_command(call.code)
        if call.stdin is not None:
            checks.check_text(call.stdin, "stdin")
        timeout_s = checks.timeout_s(self._policy, call.timeout)
        shell = Program(
            argv=("/bin/bash", "-c", "--", call.code),
            cwd=checks.directory(call.cwd),
            env=checks.environment(call.env or {}),
            stdin=call.stdin or "",
        )
        self.check_open()
        live = self.new_run()
        if call.stdin_open:
            live.stdin = Stdin(shell.stdin)
        return self._launch(lambda live: self._command(live, shell, timeout_s), live)

    async def write_stdin(self, run_id: str, text: str | None) -> None:
        """Feed a command that runs, or is about to; see `ActiveRun.write`. Raises NotFound too."""
        live = next((live for live in self._tasks if live.run_id == run_id), None)
        if live is None:
            raise errors.NotFound(f"no run {run_id[:80]!r} goes on here")
        await live.write(text)

    def start_program(
        self, make: Callable[[str], Awaitable[Program]], timeout_s: float
    ) -> ActiveRun:
        """Start a program; `make` is told the id of the run, and what it raises is the run's.

        Raises Closed.
        """

        async def drive(live: ActiveRun) -> Run:
            return await self._command(live, await make(live.run_id), timeout_s)

        return self._launch(drive)

    def start_request(
        self,
        live: ActiveRun,
        kernel: Kernel,
        asked: Asked,
        timeout_s: float,
        on_input: OnInput | None = None,
    ) -> None:
        """Queue a request to this very kernel, as `start_run` does a cell: `live` is told of it.
        Where the kernel is gone by then the run raises Conflict `kernel_gone`. Raises Closed."""
        self._launch(lambda live: self._asked(live, kernel, asked, timeout_s, on_input), live)

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; its receipt."""
        kernel, _ = await self.ready()
        return kernel.receipt

    async def stop(self) -> None:
        """End the kernel and what runs in it; files stay, and the next run starts another."""
        check_process(self._pid)
        ending = list(self._ladders)
        for ladder in self._ladders.values():
            ladder.why = ladder.why or StopReason.CALLER
        async with self._starting:
            for live, ladder in self._ladders.items():  # of a kernel that started meanwhile
                ladder.why = ladder.why or StopReason.CALLER
                ending.append(live)
            await self._drop_kernel(_STOPPED if self._gone is None else _CLOSED)
            self._had_kernel = False
        for live in ending:
            await live.ended()

    def mark_killed(self, cause: Cause) -> None:
        """From now on nothing is run on its kernel, which ends for this; what runs is told so."""
        if self._kernel is not None and self._kernel.alive:
            self._kernel.killed_for = self._kernel.killed_for or cause
            self._kernel.close()

    async def kill_for(self, cause: Cause) -> None:
        """The same, and wait until nothing of it is left."""
        self.mark_killed(cause)
        if self._kernel is not None:
            await self._kernel.kill()

    async def restart(self) -> Receipt:
        """End the kernel and what runs or waits in it, and start another: a clean namespace. Files
        stay. Raises as `start` does; then the next run starts one, and nothing is `state_lost`."""
        self.check_open()
        told = RunError(
            "ContextRestarted", f"the context {self.name!r} was restarted meanwhile", ""
        )
        await self.halt(told)
        return await self.start()

    async def halt(self, told: RunError) -> None:
        """`stop`, and runs that wait to begin end too; `told` says why, in the results."""
        check_process(self._pid)
        self._halting = told
        for live in self._ladders:  # whoever closes the context meanwhile, that is their end
            live.halted = live.halted or told
        try:
            for live, task in list(self._tasks.items()):
                if not live.begun and not live.done:  # its task may take a while to go
                    live.finish(Status.INTERRUPTED, error=told)
                    task.cancel()
            starter = self._starter
            if starter is not None and starter not in self._tasks.values():
                self._starter = None
                starter.cancel()
            await run_to_completion(self.stop())
        finally:
            if self._halting is told:  # and not another halt that goes on
                self._halting = None

    async def end_if_idle(self) -> bool:
        """End the kernel if nothing goes on with it; the next run says `state_lost`."""
        if self.busy or self._background or not self.alive:
            return False
        async with self._starting:
            await run_to_completion(self._drop_kernel(_EVICTED))
        return True

    def background_began(self) -> None:
        """A background command runs in its jail: the kernel makes no room for others meanwhile, and
        the files are looked at."""
        self._background += 1
        self.used_at = time.monotonic()
        self._disk.run_began()

    def background_ended(self) -> None:
        self._background -= 1
        self.used_at = time.monotonic()
        self._disk.run_ended()

    def _last_use(self) -> float:
        return time.monotonic() if self.busy or self._background else self.used_at

    async def close(self, gone: ClosedReason = SANDBOX_GONE) -> None:
        """`stop`, for good: every later call raises Closed, which says what is gone."""
        self.leave(gone)
        await run_to_completion(self._end())

    def leave(self, gone: ClosedReason) -> None:
        """Take no more calls, as a first step of `close`."""
        check_process(self._pid)
        self._gone = self._gone or gone

    def release_files(self) -> None:
        """They are about to be closed, while nothing lives here."""
        self._disk.leave()  # of a kernel that died by itself
        self._links.leave()

    async def _end(self) -> None:
        ending = list(self._tasks.values())
        for task in ending:
            task.cancel()
        if self._starter is not None and self._starter not in ending:
            starter = self._starter
            self._starter = None
            starter.cancel()
        try:
            await self.stop()
        finally:
            if ending:
                await asyncio.wait(ending)

    # -- one run --------------------------------------------------------------------------------

    def require_capability(self) -> None:
        """Raises Denied where the policy allows no cells."""
        checks.require_capability(self._policy, "python")

    def checked(self, code: str, timeout: float | None) -> float:
        """The time-out of a cell in seconds; raises as `start_run` does."""
        self.require_capability()
        checks.check_text(code, "code")
        timeout_s = checks.timeout_s(self._policy, timeout)
        self.check_open()
        return timeout_s

    def _launch(
        self, drive: Callable[[ActiveRun], Awaitable[Run]], live: ActiveRun | None = None
    ) -> ActiveRun:
        self.check_open()
        live = live or self.new_run()
        self._drive_in_task(live, drive)
        return live

    def new_run(self) -> ActiveRun:
        """A run that is not begun: for `start_run` or `run_inline`."""
        live = ActiveRun(_run_id(), self.output_max)
        live.quarantined = self._newly_quarantined
        return live

    def new_forwarded(self, tell: Tell) -> ForwardedRun:
        """The same, of which `tell` is told what it shows: for `start_request`."""
        live = ForwardedRun(_run_id(), self.output_max, tell)
        live.quarantined = self._newly_quarantined
        return live

    def _newly_quarantined(self) -> tuple[Quarantined, ...]:
        return self._quarantine.unreported() if self._quarantine is not None else ()

    def _drive_in_task(
        self, live: ActiveRun, drive: Callable[[ActiveRun], Awaitable[Run]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._drive(live, drive))
        self._tasks[live] = task
        task.add_done_callback(lambda _: self._over(live))
        return task

    def _over(self, live: ActiveRun) -> None:
        del self._tasks[live]
        live.fail(self._closed("was closed before this ran"))  # if nothing came of it

    async def _drive(self, live: ActiveRun, drive: Callable[[ActiveRun], Awaitable[Run]]) -> None:
        try:
            await drive(live)
        except asyncio.CancelledError:
            if live.halted is None:
                live.fail(self._closed("was closed while this ran"))
            else:
                live.finish(Status.INTERRUPTED, error=live.halted)
            raise
        except Exception as error:  # noqa: BLE001  # the border: a task's failure is its run's
            live.fail(_as_ours(error))

    async def give_up(self, live: ActiveRun, /) -> None:
        """Nobody waits for this run any more: interrupt it, or forget it if it has not begun."""
        if ladder := self._ladders.get(live):
            await ladder.stop(StopReason.CALLER)
        elif (task := self._tasks.get(live)) and not live.begun and not live.done:
            live.finish(Status.INTERRUPTED)
            task.cancel()

    async def _cell(
        self, live: ActiveRun, code: str, timeout_s: float, on_input: OnInput | None
    ) -> Run:
        async with self.turn:
            kernel, lost = await self.ready()
            lost, self._left_elsewhere = lost or self._left_elsewhere, False
            begin = self._beginning(kernel, code, on_input)
            cell = await self._begun(live, kernel, begin, timeout_s, on_input, lost=lost)
            return await self._followed(cell)

    async def _asked(
        self,
        live: ActiveRun,
        kernel: Kernel,
        asked: Asked,
        timeout_s: float,
        on_input: OnInput | None,
    ) -> Run:
        async with self.turn:
            if kernel is not self._kernel or not kernel.alive:
                raise kernel_gone()
            begin = partial(kernel.ask, *asked, allow_stdin=on_input is not None)
            cell = await self._begun(live, kernel, begin, timeout_s, on_input, lost=False)
            return await self._followed(cell)

    def _beginning(
        self, kernel: Kernel, code: str, on_input: OnInput | None
    ) -> Callable[[], Awaitable[None]]:
        allow_stdin = on_input is not None
        return partial(kernel.begin, code, allow_stdin=allow_stdin, output_max=self.output_max)

    @property
    def free_kernel(self) -> Kernel | None:
        """The kernel, where a cell can begin on it at once."""
        kernel = self._kernel
        if kernel is None or not kernel.alive or self.turn.locked() or self._tasks:
            return None
        if self._left_elsewhere:
            return None
        return kernel

    async def run_inline(
        self,
        kernel: Kernel,
        live: ActiveRun,
        code: str,
        timeout_s: float,
        *,
        outlives: bool = False,
    ) -> Run:
        """As `_cell` on the free kernel, in the caller's own task: to switch to another one and
        back takes as long as the rest of a short cell does on this side. Nothing is awaited before
        the cell has begun.

        When the caller is cancelled the cell goes on in a task: until its interrupt ends it, or as
        if nothing had been where it `outlives` its caller.
        """
        self.check_open()
        await self.turn.acquire()
        rest = None
        try:
            begin = self._beginning(kernel, code, None)
            cell = await self._begun(live, kernel, begin, timeout_s, None, lost=False)
            try:
                end = await cell.end()
            except asyncio.CancelledError:
                rest = self._follow_in_task(cell)
                if not outlives:
                    await run_to_completion(cell.ladder.stop(StopReason.CALLER))
                raise
            finally:
                if rest is None:
                    self._let_go(cell)
            if isinstance(end, frames.ReplyFrame) and not _may_have_hit_a_limit(live, end):
                return self._replied(cell, end)
            return await run_to_completion(self._concluded(cell, end))
        except Exception as error:  # noqa: BLE001  # the border, as in `_drive`
            ours = _as_ours(error)
            live.fail(ours)
            raise ours  # noqa: B904  # which has its cause, where that is another one
        finally:
            if rest is None:
                self.turn.release()

    async def _begun(
        self,
        live: ActiveRun,
        kernel: Kernel,
        begin: Callable[[], Awaitable[None]],
        timeout_s: float,
        on_input: OnInput | None,
        *,
        lost: bool,
    ) -> ActiveCell:
        live.restart_clock()
        ladder = GracefulTermination(timeout_s, self._grace_s, kernel.interrupt, kernel.kill)
        questions = on_input and InputRequests(
            kernel, on_input, lambda: ladder.stop(StopReason.CALLER)
        )
        cell = ActiveCell(live, kernel, lost, ladder, questions or None)
        self._running = ladder
        self._begin(live, ladder)
        try:
            with contextlib.suppress(KernelDied):  # what follows in the cell says so again
                await begin()
        except BaseException:
            self._let_go(cell)
            raise
        return cell

    def _follow_in_task(self, cell: ActiveCell) -> asyncio.Task[None]:
        """Go on with a cell whose caller has gone; with the task the turn ends, whatever becomes of
        it: `_end` may cancel it before its first step."""

        def over(_: object) -> None:
            if cell.live in self._ladders:
                self._let_go(cell)
            self.turn.release()

        task = self._drive_in_task(cell.live, lambda _: self._followed(cell))
        task.add_done_callback(over)
        return task

    async def _followed(self, cell: ActiveCell) -> Run:
        try:
            end = await cell.end()
        finally:
            self._let_go(cell)
        return await self._concluded(cell, end)

    def _let_go(self, cell: ActiveCell) -> None:
        self._running = None
        self._finish(cell.live)
        if cell.questions is not None:
            cell.questions.close()

    async def _concluded(self, cell: ActiveCell, end: CellEnd) -> Run:
        if isinstance(end, frames.MalformedFrame):
            cell.kernel.cut_off = f"it sent what no kernel of ours sends: {end}"
            _log.warning("a kernel was cut off: %s", end)
        if not isinstance(end, frames.ReplyFrame):
            return await self._died(cell.live, cell.kernel, cell.ladder.why)
        refused = 0
        if _may_have_hit_a_limit(cell.live, end):
            # also so that a child that died of a limit is not told of the next run
            _, seen = cell.kernel.seen
            refused = (await cell.kernel.counters()).pids_max_hits - seen
        return self._replied(cell, end, pids_max_hits=refused)

    def _replied(
        self, cell: ActiveCell, reply: frames.ReplyFrame, *, pids_max_hits: int = 0
    ) -> Run:
        status, cause = verdict.replied(reply, cell.ladder.why, pids_max_hits=pids_max_hits)
        return self._told(cell.live, status, cause, state_lost=cell.lost)

    async def _command(self, live: ActiveRun, program: Program, timeout_s: float) -> Run:
        kernel, lost = await self.ready()
        live.restart_clock()
        stdin = program.stdin if live.stdin is None else None
        command = await kernel.spawn(
            program.argv, program.cwd, program.env, stdin=stdin, files=program.files
        )
        if live.stdin is not None:
            await live.stdin.attach(command)
        ladder = GracefulTermination(
            timeout_s,
            self._grace_s,
            lambda: command.signal(signal.SIGINT),
            lambda: command.signal(signal.SIGKILL),
        )
        self._begin(live, ladder)
        try:
            exited = await _follow_command(command, live, ladder)
        except (KernelDied, TimeoutError):
            return await self._died(live, kernel, ladder.why)
        finally:
            self._finish(live)
        return await self._exited(live, kernel, exited, ladder.why, lost=lost)

    @contextlib.asynccontextmanager
    async def borrow_kernel(self) -> AsyncIterator[Kernel]:
        """The live kernel, for work of ours in its jail that is no run: meanwhile it is busy, and
        its disk is watched."""
        self.check_open()
        self._beside += 1
        try:
            kernel, _ = await self.ready()
            self._disk.run_began()
            try:
                yield kernel
            finally:
                self._disk.run_ended()
        finally:
            self._beside -= 1
            self.used_at = time.monotonic()

    def _begin(self, live: ActiveRun, ladder: GracefulTermination) -> None:
        self._ladders[live] = ladder
        self.used_at = time.monotonic()
        self._disk.run_began()

    def _finish(self, live: ActiveRun) -> None:
        del self._ladders[live]
        self.used_at = time.monotonic()
        self._disk.run_ended()

    async def _died(self, live: ActiveRun, kernel: Kernel, why: StopReason | None) -> Run:
        if self._gone is not None and live.halted is None:
            closed = self._closed("was closed while this ran")
            live.fail(closed)
            raise closed
        seen = kernel.seen
        status, cause = _verdict_on(kernel, seen, await kernel.kill(), why)
        if cause is Cause.CRASHED and (error := _cut_off(kernel)) is not None:
            return live.finish(status, cause=cause, error=error, state_lost=True)
        return self._told(live, status, cause, state_lost=True)

    async def ended(self, kernel: Kernel) -> RunError:
        """Wait until this kernel has ended, whoever ended it; why, in words."""
        end = await kernel.ended()
        status, cause = _verdict_on(kernel, kernel.seen, end, None)
        if kernel.left is not None:
            return kernel.left
        if cause is Cause.CRASHED and (error := _cut_off(kernel)) is not None:
            return error
        words = verdict.explained((status, cause), self._policy.limits, "the kernel")
        assert words is not None  # nobody answered
        return words

    async def _exited(
        self,
        live: ActiveRun,
        kernel: Kernel,
        exited: frames.Exited,
        why: StopReason | None,
        *,
        lost: bool,
    ) -> Run:
        if exited.error is not None:
            error = RunError("CommandNotStarted", exited.error, exited.error)
            return live.finish(Status.KILLED, cause=Cause.PIDS, error=error, state_lost=lost)
        code = verdict.exit_code(exited)
        struck = refused = 0
        if code != 0:
            oom_kills, pids_max_hits = kernel.seen
            counters = await kernel.counters()
            struck = counters.oom_kills - oom_kills
            refused = counters.pids_max_hits - pids_max_hits
        if self._ends_with_command:  # and so does whatever it left running
            await kernel.kill()
        status, cause = verdict.exited(code, why, oom_kills=struck, pids_max_hits=refused)
        return self._told(live, status, cause, state_lost=lost, exit_code=code)

    def _told(
        self,
        live: ActiveRun,
        status: Status,
        cause: Cause | None,
        *,
        state_lost: bool,
        exit_code: int | None = None,
    ) -> Run:
        error = verdict.explained((status, cause), self._policy.limits)
        if status is Status.INTERRUPTED:
            error = live.halted or self._halting or error
        return live.finish(
            status, cause=cause, error=error, state_lost=state_lost, exit_code=exit_code
        )

    # -- the kernel -----------------------------------------------------------------------------

    async def ready(self) -> tuple[Kernel, bool]:
        """The live kernel, started where there is none; and whether an earlier state is lost."""
        async with self._starting:
            self.check_open()
            if self._kernel is not None and self._kernel.alive:
                return self._kernel, False
            await self._drop_kernel()
            opened = await self._opened()
            lost = self._had_kernel
            self._quarantine = opened.quarantine
            self._kernel = await self._started(opened)
            self._had_kernel = True
            self._disk.watch(self._kernel, opened)
            self._links.watch(opened, self._last_use)
            return self._kernel, lost

    async def _started(self, opened: OpenFiles) -> Kernel:
        """A new kernel; `close` does not wait for one, however long its start may take."""
        self._starter = task = asyncio.current_task()
        assert task is not None
        try:
            return await self._start(self.name, opened)
        except asyncio.CancelledError:
            if self._starter is None and task.uncancel() == 0:  # by us, and by nobody else
                raise self._start_ended() from None
            raise
        except errors.SbxError as error:
            # The broker kills the jail of a dropped sandbox, and reports that it did not start
            if self._gone is not None or self._halting is not None:
                raise self._start_ended() from error
            raise
        finally:
            self._starter = None

    def _start_ended(self) -> errors.Conflict:
        if self._halting is not None:
            return errors.Conflict(self._halting.value, code="stopped")
        return self._closed("was closed while its kernel started")

    async def _drop_kernel(self, why: RunError | None = None) -> None:
        kernel, self._kernel = self._kernel, None
        await self._disk.close()
        await self._links.close()
        if kernel is not None:
            kernel.left = kernel.left or self._halting or why
            await kernel.kill()

    def check_open(self) -> None:
        """Raises Closed."""
        check_process(self._pid)
        if self._gone is not None:
            raise self._closed("is closed")

    def _closed(self, how: str) -> errors.Closed:
        gone = self._gone or SANDBOX_GONE
        return errors.Closed(f"{gone.what} {how}", hint=f"make a new one: {gone.lost}")


def _run_id() -> str:
    return f"run-{secrets.token_hex(6)}"


def kernel_gone(how: str = "there is no live kernel") -> errors.Conflict:
    return errors.Conflict(how, code="kernel_gone", hint="restart the kernel")


def _verdict_on(
    kernel: Kernel, seen: tuple[int, int], end: JailExit, why: StopReason | None
) -> verdict.Verdict:
    oom_kills, pids_max_hits = seen
    return verdict.died(
        kernel.killed_for,
        why,
        oom_kills=end.oom_kills - oom_kills,
        pids_max_hits=end.pids_max_hits - pids_max_hits,
    )


def _cut_off(kernel: Kernel) -> RunError | None:
    if kernel.cut_off is None:
        return None
    return RunError("KernelCutOff", f"the kernel was ended: {kernel.cut_off}", "")


def _may_have_hit_a_limit(live: ActiveRun, reply: frames.ReplyFrame) -> bool:
    return reply.status == "error" or live.elapsed_s > _TIME_TO_HIT_A_LIMIT_S


async def _follow_command(
    command: Command, live: ActiveRun, ladder: GracefulTermination
) -> frames.Exited:
    while True:
        told = await ladder.next(command.next, at_once=command.has_next)
        if isinstance(told, frames.Exited):
            return told
        live.add(frames.Frame(told, None, len(told.text)))
        if live.over:
            await ladder.stop(StopReason.OUTPUT)


def _as_ours(error: Exception) -> errors.SbxError:
    """What a run raises for it."""
    if isinstance(error, errors.SbxError):
        return error
    if (refusal := errors.out_of_files(error)) is not None:
        return refusal
    _log.error("a run failed in sbx itself", exc_info=error)
    broken = errors.Broken(f"the run failed in sbx itself: {error!r}")
    broken.__cause__ = error
    return broken
