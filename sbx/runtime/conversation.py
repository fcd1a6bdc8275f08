"""One workspace and at most one live kernel; its runs, one after the other.

The kernel starts with the first run that needs it and dies with the conversation, with the limit
it crossed, or with a deadline it ignored; the next run then starts another one and says
`state_lost`. Shell commands run beside a busy cell, in the kernel's own jail.
"""

import asyncio
import logging
import os
import secrets
import signal
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
from sbx.runtime.questions import OnInput, Questions
from sbx.runtime.stop import Ladder, Why

_log = logging.getLogger(__name__)
_TIME_TO_HIT_A_LIMIT_S = 0.1


@dataclass(frozen=True, slots=True)
class _Shell:
    """A command as it will be started."""

    command: str
    cwd: str
    env: Mapping[str, str]
    stdin: str | None


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
    ) -> None:
        self.name = name
        self.files = WorkspaceFiles(self.opened, policy)
        self.uploads = WorkspaceUploads(self.opened, policy)
        self._policy = policy
        self._open_files = open_files
        self._start = start
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._opened: OpenFiles | None = None
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._kernel: Kernel | None = None
        self._had_kernel = False
        self._disk = DiskWatch(policy.limits)
        self._running: Ladder | None = None
        self._ladders: dict[LiveRun, Ladder] = {}
        self._tasks: dict[LiveRun, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        return self._kernel.receipt if self._kernel is not None and self._kernel.alive else None

    # -- runs -----------------------------------------------------------------------------------

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell."""
        return await self._awaited(self.start_run(code, timeout=timeout, on_input=on_input))

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
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> LiveRun:
        """Queue a cell; the run goes on whether or not anybody follows it.

        Raises Denied, BadRequest (`invalid_timeout`, `limit_widened`, `invalid_code`), TooLarge
        `code_too_large`, Closed.
        """
        request.demand(self._policy, "python")
        request.check_text(code, "code")
        timeout_s = request.timeout_s(self._policy, timeout)
        return self._launch(lambda live: self._cell(live, code, timeout_s, on_input))

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
        """The files, opened at the first call."""
        async with self._opening:
            self._check_open()
            if self._opened is None:
                await to_the_end(self._open())
            assert self._opened is not None
            return self._opened

    async def stop(self) -> None:
        """End the kernel and what runs in it; files stay, and the next run starts another."""
        check_process(self._pid)
        ending = [self._tasks[live] for live in self._ladders]
        for ladder in self._ladders.values():
            ladder.why = ladder.why or Why.CALLER
        async with self._starting:
            await self._drop_kernel()
            self._had_kernel = False
        if ending:
            await asyncio.wait(ending)

    async def close(self) -> None:
        """`stop`, for good: every later call raises Closed."""
        check_process(self._pid)
        self._closed = True
        await to_the_end(self._end())

    async def _end(self) -> None:
        ending = list(self._tasks.values())
        for task in ending:
            task.cancel()
        try:
            await self.stop()
        finally:
            if ending:
                await asyncio.wait(ending)
            async with self._opening:
                if self._opened is not None:
                    opened, self._opened = self._opened, None
                    await opened.close()

    async def _open(self) -> None:
        self._opened = await self._open_files()

    # -- one run --------------------------------------------------------------------------------

    def _launch(self, drive: Callable[[LiveRun], Awaitable[Run]]) -> LiveRun:
        self._check_open()
        live = LiveRun(f"run-{secrets.token_hex(6)}", self._policy.limits.output_max)
        task = asyncio.create_task(self._drive(live, drive))
        self._tasks[live] = task
        task.add_done_callback(lambda _: self._over(live))
        return live

    def _over(self, live: LiveRun) -> None:
        del self._tasks[live]
        live.fail(_closed("the sandbox was closed before this ran"))  # if nothing came of it

    async def _drive(self, live: LiveRun, drive: Callable[[LiveRun], Awaitable[Run]]) -> None:
        try:
            await drive(live)
        except asyncio.CancelledError:
            live.fail(_closed("the sandbox was closed while this ran"))
            raise
        except errors.SbxError as error:
            live.fail(error)
        except Exception as error:  # noqa: BLE001  # the border: a task's failure is its run's
            _log.exception("a run failed in sbx itself")
            broken = errors.Broken(f"the run failed in sbx itself: {error!r}")
            broken.__cause__ = error
            live.fail(broken)

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
        elif task := self._tasks.get(live):
            task.cancel()

    async def _cell(
        self, live: LiveRun, code: str, timeout_s: float, on_input: OnInput | None
    ) -> Run:
        async with self._turn:
            kernel, lost = await self._ready()
            live.restart_clock()
            ladder = Ladder(timeout_s, self._grace_s, kernel.interrupt, kernel.kill)
            questions = on_input and Questions(kernel, on_input, lambda: ladder.stop(Why.CALLER))
            self._running = ladder
            self._begin(live, ladder)
            try:
                output_max = self._policy.limits.output_max
                await kernel.begin(code, allow_stdin=on_input is not None, output_max=output_max)
                reply = await _follow_cell(kernel, live, ladder, questions)
            except KernelDied:
                return await self._died(live, kernel, ladder.why)
            except frames.Malformed as error:
                kernel.cut_off = f"it sent what no kernel of ours sends: {error}"
                _log.warning("a kernel was cut off: %s", error)
                return await self._died(live, kernel, ladder.why)
            finally:
                self._running = None
                self._finish(live)
                if questions:
                    questions.close()
            live.replied(reply)
            refused = 0
            if reply.status == "error" or live.elapsed_s > _TIME_TO_HIT_A_LIMIT_S:
                # also so that a child that died of a limit is not told of the next run
                _, seen = kernel.seen
                refused = (await kernel.counters()).pids_max_hits - seen
            status, cause = verdict.replied(reply, ladder.why, pids_max_hits=refused)
            return self._told(live, status, cause, state_lost=lost)

    async def _command(self, live: LiveRun, shell: _Shell, timeout_s: float) -> Run:
        kernel, lost = await self._ready()
        live.restart_clock()
        command = await kernel.spawn(["/bin/bash", "-c", "--", shell.command], shell.cwd, shell.env)
        if shell.stdin is not None:
            await command.write(shell.stdin)
        await command.write(None)
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
        self._disk.run_began()

    def _finish(self, live: LiveRun) -> None:
        del self._ladders[live]
        self._disk.run_ended()

    async def _died(self, live: LiveRun, kernel: Kernel, why: Why | None) -> Run:
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
            self._kernel = await self._start(opened)
            self._had_kernel = True
            self._disk.watch(self._kernel, opened)
            return self._kernel, lost

    async def _drop_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        await self._disk.close()
        if kernel is not None:
            await kernel.kill()

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._closed:
            raise _closed("the sandbox is closed")


async def _follow_cell(
    kernel: Kernel, live: LiveRun, ladder: Ladder, questions: Questions | None
) -> frames.ExecuteReply:
    while True:
        frame = await ladder.next(kernel.next)
        if isinstance(frame.content, frames.ExecuteReply):
            return frame.content
        live.add(frame)
        if live.over:
            await ladder.stop(Why.OUTPUT)
        elif isinstance(frame.content, frames.InputRequest) and questions is not None:
            questions.ask(frame.content.prompt)


async def _follow_command(command: Command, live: LiveRun, ladder: Ladder) -> frames.Exited:
    while True:
        told = await ladder.next(command.next)
        if isinstance(told, frames.Exited):
            return told
        live.add(frames.Frame(told, None, len(told.text)))
        if live.over:
            await ladder.stop(Why.OUTPUT)


def _closed(message: str) -> errors.Closed:
    return errors.Closed(message, hint="make a new one: its files and state are gone")
