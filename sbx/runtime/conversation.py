"""One workspace and at most one live kernel; its runs, one after the other.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from sbx import errors
from sbx.isolation.forked import check_process
from sbx.isolation.patience import to_the_end
from sbx.isolation.receipt import Receipt
from sbx.kernels import frames
from sbx.kernels.kernel import Command, Kernel, KernelDied
from sbx.policy import Policy
from sbx.protocol.runs import Cause, Event, Run, RunError, Status
from sbx.runtime import request, verdict
from sbx.runtime.disk import DiskWatch
from sbx.runtime.files import OpenFiles, WorkspaceFiles, WorkspaceUploads
from sbx.runtime.live import LiveRun
from sbx.runtime.open_limit import OpenLimit
from sbx.runtime.questions import OnInput, Questions
from sbx.runtime.stop import Ladder, Why

_log = logging.getLogger(__name__)
_TIME_TO_HIT_A_LIMIT_S = 0.1

CellEnd = frames.ExecuteReply | KernelDied | frames.Malformed


@dataclass(frozen=True, slots=True)
class _Shell:
    """A command as it will be started."""

    command: str
    cwd: str
    env: Mapping[str, str]
    stdin: str | None


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell that was begun. `lost`: the state of an earlier kernel is gone."""

    live: LiveRun
    kernel: Kernel
    lost: bool
    ladder: Ladder
    questions: Questions | None

    async def end(self) -> CellEnd:
        """Follow it to its end, whatever that is. May be cancelled, and called again to go on."""
        kernel, live = self.kernel, self.live
        try:
            while True:
                frame = await self.ladder.next(kernel.next, at_once=kernel.has_next)
                if isinstance(frame.content, frames.ExecuteReply):
                    return frame.content
                live.add(frame)
                if live.over:
                    await self.ladder.stop(Why.OUTPUT)
                elif isinstance(frame.content, frames.InputRequest) and self.questions is not None:
                    self.questions.ask(frame.content.prompt)
                    await asyncio.sleep(0)  # now, also when the next frame is there already
        except (KernelDied, frames.Malformed) as error:
            return error


class Conversation:
    """A workspace with a kernel. Its methods may be called concurrently from one event loop.

    `open_files` and `start` are its sandbox's: how files are opened, how a kernel is launched.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        open_files: Callable[[], Awaitable[OpenFiles]],
        start: Callable[[OpenFiles], Awaitable[Kernel]],
        grace_s: float,
        *,
        had_kernel: bool = False,
        limit: OpenLimit | None = None,
    ) -> None:
        """`had_kernel`: one that was ended unasked, so that the next run says `state_lost`.
        `limit`: its files may be put away while nobody uses them, and `open_files` is asked again.
        """
        self.name = name
        self.files = WorkspaceFiles(self.opened, policy)
        self.uploads = WorkspaceUploads(self.opened, policy)
        self._policy = policy
        self._open_files = open_files
        self._start = start
        self._grace_s = grace_s
        self._limit = limit
        self._pid = os.getpid()
        self._opened: OpenFiles | None = None
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._kernel: Kernel | None = None
        self._starter: asyncio.Task[object] | None = None
        self._had_kernel = had_kernel
        self._disk = DiskWatch(policy.limits)
        self._running: Ladder | None = None
        self._ladders: dict[LiveRun, Ladder] = {}
        self._tasks: dict[LiveRun, asyncio.Task[None]] = {}
        self._halting: RunError | None = None
        self._closed = False
        self.used_at = time.monotonic()

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        return self._kernel.receipt if self._kernel is not None and self._kernel.alive else None

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
        return bool(self._tasks or self._ladders) or self._starting.locked() or self._turn.locked()

    @property
    def state_is_kept(self) -> bool:
        """Whether a kernel lives, or lived, whose variables the caller may count on."""
        return self._had_kernel

    # -- runs -----------------------------------------------------------------------------------

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell."""
        kernel = self.free_kernel
        if on_input is not None or kernel is None:
            return await self._awaited(self.start_run(code, timeout=timeout, on_input=on_input))
        timeout_s = self.checked(code, timeout)
        return await self.run_here(kernel, self.new_run(), code, timeout_s)

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncIterator[Event]:
        """Run a cell and follow it live; the last event carries the result. It runs from now on,
        whether or not it is followed to its end."""
        return self.start_run(code, timeout=timeout, on_input=on_input).events()

    async def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run `/bin/bash -c command` beside the kernel and wait for its result."""
        live = self.start_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        return await self._awaited(live)

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> AsyncIterator[Event]:
        """Run a command and follow it live; the last event carries the result."""
        live = self.start_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        return live.events()

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        check_process(self._pid)
        if self._running is None:
            return False
        await self._running.stop(Why.CALLER)
        return True

    def start_run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        on_input: OnInput | None = None,
        live: LiveRun | None = None,
    ) -> LiveRun:
        """Queue a cell; the run goes on whether or not anybody follows it. `live` is told of it,
        where it was made before by `new_run`.

        Raises Denied, BadRequest (`invalid_timeout`, `limit_widened`, `invalid_code`), TooLarge
        `code_too_large`, Closed.
        """
        timeout_s = self.checked(code, timeout)
        return self._launch(lambda live: self._cell(live, code, timeout_s, on_input), live)

    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> LiveRun:
        """Start a shell command; raises as `start_run` does, and BadRequest `invalid_env`."""
        request.demand(self._policy, "shell")
        request.demand_processes(self._policy)
        request.check_command(command)
        if stdin is not None:
            request.check_text(stdin, "stdin")
        timeout_s = request.timeout_s(self._policy, timeout)
        shell = _Shell(command, request.directory(cwd), request.environment(env or {}), stdin)
        return self._launch(lambda live: self._command(live, shell, timeout_s))

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; its receipt."""
        kernel, _ = await self._ready()
        return kernel.receipt

    async def opened(self) -> OpenFiles:
        """The files, opened at the first call. Where they may be put away, whoever awaits anything
        before it uses them holds them by `OpenFiles.in_use`."""
        async with self._opening:
            self._check_open()
            if self._opened is None:
                await to_the_end(self._open())
            assert self._opened is not None
            if self._limit is not None:
                self._limit.used(self)
            return self._opened

    def put_away(self) -> bool:
        """Close the files, which the next use opens again; False where they are used now, by a
        kernel or a call."""
        if self.busy or self.alive or self._opening.locked():
            return False
        if self._opened is not None:
            if self._opened.busy:
                return False
            self._disk.leave()  # of a kernel that died by itself
            opened, self._opened = self._opened, None
            opened.put_away()
        return True

    async def stop(self) -> None:
        """End the kernel and what runs in it; files stay, and the next run starts another."""
        check_process(self._pid)
        ending = list(self._ladders)
        for ladder in self._ladders.values():
            ladder.why = ladder.why or Why.CALLER
        async with self._starting:
            for live, ladder in self._ladders.items():  # of a kernel that started meanwhile
                ladder.why = ladder.why or Why.CALLER
                ending.append(live)
            await self._drop_kernel()
            self._had_kernel = False
        for live in ending:
            await live.ended()

    async def halt(self, told: RunError) -> None:
        """`stop`, and runs that wait to begin end too; `told` says why, in the results."""
        check_process(self._pid)
        self._halting = told
        try:
            for live, task in list(self._tasks.items()):
                if not live.begun and not live.done:  # its task may take a while to go
                    live.finish(Status.INTERRUPTED, error=told)
                    task.cancel()
            starter = self._starter
            if starter is not None and starter not in self._tasks.values():
                self._starter = None
                starter.cancel()
            await to_the_end(self.stop())
        finally:
            if self._halting is told:  # and not another halt that goes on
                self._halting = None

    async def end_if_idle(self) -> bool:
        """End the kernel if nothing goes on with it; the next run says `state_lost`."""
        if self.busy or not self.alive:
            return False
        async with self._starting:
            await to_the_end(self._drop_kernel())
        return True

    async def close(self) -> None:
        """`stop`, for good: every later call raises Closed."""
        check_process(self._pid)
        self._closed = True
        await to_the_end(self._end())

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
            async with self._opening:
                if self._opened is not None:
                    opened, self._opened = self._opened, None
                    await opened.close()
                if self._limit is not None:
                    self._limit.closed(self)

    async def _open(self) -> None:
        self._opened = await self._open_files()

    # -- one run --------------------------------------------------------------------------------

    def checked(self, code: str, timeout: float | None) -> float:
        """The time-out of a cell in seconds; raises as `start_run` does."""
        request.demand(self._policy, "python")
        request.check_text(code, "code")
        timeout_s = request.timeout_s(self._policy, timeout)
        self._check_open()
        return timeout_s

    def _launch(
        self, drive: Callable[[LiveRun], Awaitable[Run]], live: LiveRun | None = None
    ) -> LiveRun:
        self._check_open()
        live = live or self.new_run()
        self._drive_in_task(live, drive)
        return live

    def new_run(self) -> LiveRun:
        """A run that is not begun: for `start_run` or `run_here`."""
        return LiveRun(f"run-{secrets.token_hex(6)}", self._policy.limits.output_max)

    def _drive_in_task(
        self, live: LiveRun, drive: Callable[[LiveRun], Awaitable[Run]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._drive(live, drive))
        self._tasks[live] = task
        task.add_done_callback(lambda _: self._over(live))
        return task

    def _over(self, live: LiveRun) -> None:
        del self._tasks[live]
        live.fail(_closed("the sandbox was closed before this ran"))  # if nothing came of it

    async def _drive(self, live: LiveRun, drive: Callable[[LiveRun], Awaitable[Run]]) -> None:
        try:
            await drive(live)
        except asyncio.CancelledError:
            live.fail(_closed("the sandbox was closed while this ran"))
            raise
        except Exception as error:  # noqa: BLE001  # the border: a task's failure is its run's
            live.fail(_as_ours(error))

    async def _awaited(self, live: LiveRun) -> Run:
        try:
            return await live.result()
        except asyncio.CancelledError:
            await to_the_end(self.give_up(live))
            raise

    async def give_up(self, live: LiveRun) -> None:
        """Nobody waits for this run any more: interrupt it, or forget it if it has not begun."""
        if ladder := self._ladders.get(live):
            await ladder.stop(Why.CALLER)
        elif (task := self._tasks.get(live)) and not live.begun and not live.done:
            live.finish(Status.INTERRUPTED)
            task.cancel()

    async def _cell(
        self, live: LiveRun, code: str, timeout_s: float, on_input: OnInput | None
    ) -> Run:
        async with self._turn:
            kernel, lost = await self._ready()
            cell = await self._begun(live, kernel, code, timeout_s, on_input, lost=lost)
            return await self._followed(cell)

    @property
    def free_kernel(self) -> Kernel | None:
        """The kernel, where a cell can begin on it at once."""
        kernel = self._kernel
        if kernel is None or not kernel.alive or self._turn.locked() or self._tasks:
            return None
        return kernel

    async def run_here(
        self, kernel: Kernel, live: LiveRun, code: str, timeout_s: float, *, outlives: bool = False
    ) -> Run:
        """As `_cell` on the free kernel, in the caller's own task: to switch to another one and
        back takes as long as the rest of a short cell does on this side. Nothing is awaited before
        the cell has begun.

        When the caller is cancelled the cell goes on in a task: until its interrupt ends it, or as
        if nothing had been where it `outlives` its caller.
        """
        self._check_open()
        await self._turn.acquire()
        rest = None
        try:
            cell = await self._begun(live, kernel, code, timeout_s, None, lost=False)
            try:
                end = await cell.end()
            except asyncio.CancelledError:
                rest = self._follow_in_task(cell)
                if not outlives:
                    await to_the_end(cell.ladder.stop(Why.CALLER))
                raise
            finally:
                if rest is None:
                    self._let_go(cell)
            if isinstance(end, frames.ExecuteReply) and not _may_have_hit_a_limit(live, end):
                return self._replied(cell, end)
            return await to_the_end(self._concluded(cell, end))
        except Exception as error:  # noqa: BLE001  # the border, as in `_drive`
            ours = _as_ours(error)
            live.fail(ours)
            raise ours  # noqa: B904  # which has its cause, where that is another one
        finally:
            if rest is None:
                self._turn.release()

    async def _begun(
        self,
        live: LiveRun,
        kernel: Kernel,
        code: str,
        timeout_s: float,
        on_input: OnInput | None,
        *,
        lost: bool,
    ) -> _Cell:
        live.restart_clock()
        ladder = Ladder(timeout_s, self._grace_s, kernel.interrupt, kernel.kill)
        questions = on_input and Questions(kernel, on_input, lambda: ladder.stop(Why.CALLER))
        cell = _Cell(live, kernel, lost, ladder, questions or None)
        self._running = ladder
        self._begin(live, ladder)
        try:
            with contextlib.suppress(KernelDied):  # what follows in the cell says so again
                output_max = self._policy.limits.output_max
                await kernel.begin(code, allow_stdin=on_input is not None, output_max=output_max)
        except BaseException:
            self._let_go(cell)
            raise
        return cell

    def _follow_in_task(self, cell: _Cell) -> asyncio.Task[None]:
        """Go on with a cell whose caller has gone; with the task the turn ends, whatever becomes of
        it: `_end` may cancel it before its first step."""

        def over(_: object) -> None:
            if cell.live in self._ladders:
                self._let_go(cell)
            self._turn.release()

        task = self._drive_in_task(cell.live, lambda _: self._followed(cell))
        task.add_done_callback(over)
        return task

    async def _followed(self, cell: _Cell) -> Run:
        try:
            end = await cell.end()
        finally:
            self._let_go(cell)
        return await self._concluded(cell, end)

    def _let_go(self, cell: _Cell) -> None:
        self._running = None
        self._finish(cell.live)
        if cell.questions is not None:
            cell.questions.close()

    async def _concluded(self, cell: _Cell, end: CellEnd) -> Run:
        if isinstance(end, frames.Malformed):
            cell.kernel.cut_off = f"it sent what no kernel of ours sends: {end}"
            _log.warning("a kernel was cut off: %s", end)
        if not isinstance(end, frames.ExecuteReply):
            return await self._died(cell.live, cell.kernel, cell.ladder.why)
        refused = 0
        if _may_have_hit_a_limit(cell.live, end):
            # also so that a child that died of a limit is not told of the next run
            _, seen = cell.kernel.seen
            refused = (await cell.kernel.counters()).pids_max_hits - seen
        return self._replied(cell, end, pids_max_hits=refused)

    def _replied(self, cell: _Cell, reply: frames.ExecuteReply, *, pids_max_hits: int = 0) -> Run:
        cell.live.replied(reply)
        status, cause = verdict.replied(reply, cell.ladder.why, pids_max_hits=pids_max_hits)
        return self._told(cell.live, status, cause, state_lost=cell.lost)

    async def _command(self, live: LiveRun, shell: _Shell, timeout_s: float) -> Run:
        kernel, lost = await self._ready()
        live.restart_clock()
        argv = ["/bin/bash", "-c", "--", shell.command]
        command = await kernel.spawn(argv, shell.cwd, shell.env, stdin=shell.stdin or "")
        ladder = Ladder(
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

    def _begin(self, live: LiveRun, ladder: Ladder) -> None:
        self._ladders[live] = ladder
        self.used_at = time.monotonic()
        self._disk.run_began()

    def _finish(self, live: LiveRun) -> None:
        del self._ladders[live]
        self.used_at = time.monotonic()
        self._disk.run_ended()

    async def _died(self, live: LiveRun, kernel: Kernel, why: Why | None) -> Run:
        if self._closed:
            closed = _closed("the sandbox was closed while this ran")
            live.fail(closed)
            raise closed
        oom_kills, pids_max_hits = kernel.seen
        end = await kernel.kill()
        status, cause = verdict.died(
            kernel.killed_for,
            why,
            oom_kills=end.oom_kills - oom_kills,
            pids_max_hits=end.pids_max_hits - pids_max_hits,
        )
        if cause is Cause.CRASHED and kernel.cut_off is not None:
            error = RunError("KernelCutOff", f"the kernel was ended: {kernel.cut_off}", "")
            return live.finish(status, cause=cause, error=error, state_lost=True)
        return self._told(live, status, cause, state_lost=True)

    async def _exited(
        self,
        live: LiveRun,
        kernel: Kernel,
        exited: frames.Exited,
        why: Why | None,
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
        status, cause = verdict.exited(code, why, oom_kills=struck, pids_max_hits=refused)
        return self._told(live, status, cause, state_lost=lost, exit_code=code)

    def _told(
        self,
        live: LiveRun,
        status: Status,
        cause: Cause | None,
        *,
        state_lost: bool,
        exit_code: int | None = None,
    ) -> Run:
        error = verdict.explained((status, cause), self._policy.limits)
        if status is Status.INTERRUPTED and self._halting is not None:
            error = self._halting
        return live.finish(
            status, cause=cause, error=error, state_lost=state_lost, exit_code=exit_code
        )

    # -- the kernel -----------------------------------------------------------------------------

    async def _ready(self) -> tuple[Kernel, bool]:
        """The live kernel, started where there is none; and whether an earlier state is lost."""
        async with self._starting:
            if self._kernel is not None and self._kernel.alive:
                return self._kernel, False
            await self._drop_kernel()
            opened = await self.opened()
            lost = self._had_kernel
            self._kernel = await self._started(opened)
            self._had_kernel = True
            self._disk.watch(self._kernel, opened)
            return self._kernel, lost

    async def _started(self, opened: OpenFiles) -> Kernel:
        """A new kernel; `close` does not wait for one, however long its start may take."""
        self._starter = task = asyncio.current_task()
        assert task is not None
        try:
            return await self._start(opened)
        except asyncio.CancelledError:
            if self._starter is None and task.uncancel() == 0:  # by us, and by nobody else
                if self._halting is not None:
                    raise errors.Conflict(self._halting.value, code="stopped") from None
                raise _closed("the sandbox was closed while its kernel started") from None
            raise
        finally:
            self._starter = None

    async def _drop_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        await self._disk.close()
        if kernel is not None:
            await kernel.kill()

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._closed:
            raise _closed("the sandbox is closed")


def _may_have_hit_a_limit(live: LiveRun, reply: frames.ExecuteReply) -> bool:
    return reply.status == "error" or live.elapsed_s > _TIME_TO_HIT_A_LIMIT_S


async def _follow_command(command: Command, live: LiveRun, ladder: Ladder) -> frames.Exited:
    while True:
        told = await ladder.next(command.next, at_once=command.has_next)
        if isinstance(told, frames.Exited):
            return told
        live.add(frames.Frame(told, None, len(told.text)))
        if live.over:
            await ladder.stop(Why.OUTPUT)


def _as_ours(error: Exception) -> errors.SbxError:
    """What a run raises for it."""
    if isinstance(error, errors.SbxError):
        return error
    _log.error("a run failed in sbx itself", exc_info=error)
    broken = errors.Broken(f"the run failed in sbx itself: {error!r}")
    broken.__cause__ = error
    return broken


def _closed(message: str) -> errors.Closed:
    return errors.Closed(message, hint="make a new one: its files and state are gone")
