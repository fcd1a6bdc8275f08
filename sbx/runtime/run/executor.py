"""The execution of runs in the kernel of a context.

Cells take their turn one after the other. Commands run concurrently, in the same jail. Each run has
a task, except a cell that `run_inline` runs in the task of its caller.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from sbx import errors
from sbx.aio import check_process, run_to_completion
from sbx.kernels.command import KernelDied
from sbx.kernels.kernel import Kernel
from sbx.protocol.runs import Run, RunError, Status
from sbx.run_methods import OnInput
from sbx.runtime.processes.scripts import Program, PythonFile
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context_kernel import SANDBOX_GONE, ClosedReason, ContextKernel, kernel_gone
from sbx.runtime.run.execution import (
    ActiveCell,
    ActiveCommand,
    ActiveExecution,
    ActiveProgram,
)
from sbx.runtime.run.termination import StopReason

_log = logging.getLogger(__name__)
_STOPPED = RunError("KernelStopped", "its kernel was stopped", "")
_CLOSED = RunError("SandboxClosed", "its sandbox was closed, or not used for too long", "")


class RunExecutor(ContextKernel):
    """See the module."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left_elsewhere = False
        self._cell: ActiveCell | None = None
        self._executions: dict[ActiveRun, ActiveExecution] = {}
        self._tasks: dict[ActiveRun, asyncio.Task[None]] = {}

    @property
    def busy(self) -> bool:
        """Whether a run executes or waits, or the kernel starts or is used."""
        return bool(self._tasks or self._executions) or super().busy

    def mark_state_lost(self) -> None:
        """Mark the variables as lost: the next run reports `state_lost`."""
        self._left_elsewhere = True

    def new_run(self) -> ActiveRun:
        """Return a run that has not begun, for `start_run` or `run_inline`."""
        live = ActiveRun(run_id(), self.output_max)
        live.quarantined = self.unreported_quarantine
        return live

    def launch(
        self, drive: Callable[[ActiveRun], Awaitable[Run]], live: ActiveRun | None = None
    ) -> ActiveRun:
        self.check_open()
        live = live or self.new_run()
        self._drive_in_task(live, drive)
        return live

    def _drive_in_task(
        self, live: ActiveRun, drive: Callable[[ActiveRun], Awaitable[Run]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._drive(live, drive))
        self._tasks[live] = task
        self.grants.run_began(live)
        task.add_done_callback(lambda _: self._over(live))
        return task

    def _over(self, live: ActiveRun) -> None:
        del self._tasks[live]
        self.grants.run_ended(live)
        live.fail(self.closed("was closed before this ran"))  # if it has no result

    async def _drive(self, live: ActiveRun, drive: Callable[[ActiveRun], Awaitable[Run]]) -> None:
        try:
            await drive(live)
        except asyncio.CancelledError:
            if live.halted is None:
                live.fail(self.closed("was closed while this ran"))
            else:
                await run_to_completion(live.render())
                live.finish(Status.INTERRUPTED, error=live.halted)
            raise
        except Exception as error:  # noqa: BLE001  # the border: a task's failure is its run's
            live.fail(as_sbx_error(error))

    async def give_up(self, live: ActiveRun, /, *, kill: bool = False) -> None:
        """Interrupt a run whose caller no longer waits, or drop it if it has not begun. With
        `kill`, end it after the grace period even if it ignores the interrupt."""
        if execution := self._executions.get(live):
            reason = StopReason.ABANDONED if kill else StopReason.CALLER
            await execution.termination.stop(reason)
        elif (task := self._tasks.get(live)) and not live.begun and not live.done:
            live.finish(Status.INTERRUPTED)
            task.cancel()

    async def _run_cell(
        self, live: ActiveRun, code: str, timeout_s: float, on_input: OnInput | None
    ) -> Run:
        async with self.turn:
            kernel, lost = await self.ready()
            lost, self._left_elsewhere = lost or self._left_elsewhere, False
            live.restart_clock()
            cell = ActiveCell(self, live, kernel, timeout_s, self.grace_s, on_input, lost=lost)
            allow_stdin = on_input is not None
            await self._send(
                cell, kernel.begin(code, allow_stdin=allow_stdin, output_max=self.output_max)
            )
            return await self._follow_cell(cell)

    async def _run_file(
        self, live: ActiveRun, file: PythonFile, timeout_s: float, on_input: OnInput | None
    ) -> Run:
        async with self.turn:
            kernel, lost = await self.ready()
            live.restart_clock()
            program = ActiveProgram(
                self,
                live,
                kernel,
                timeout_s,
                self.grace_s,
                on_input,
                lost=lost,
                ends_kernel=not self.policy.processes,
            )
            begin = kernel.begin_program(
                file.to_json(), allow_stdin=on_input is not None, output_max=self.output_max
            )
            await self._send(program, begin)
            return await self._follow_cell(program)

    async def _run_request(
        self,
        live: ActiveRun,
        kernel: Kernel,
        kind: str,
        content: Any,
        timeout_s: float,
        on_input: OnInput | None,
    ) -> Run:
        async with self.turn:
            if kernel is not self._kernel or not kernel.alive:
                raise kernel_gone()
            live.restart_clock()
            cell = ActiveCell(self, live, kernel, timeout_s, self.grace_s, on_input)
            await self._send(cell, kernel.ask(kind, content, allow_stdin=on_input is not None))
            return await self._follow_cell(cell)

    @property
    def free_kernel(self) -> Kernel | None:
        """The kernel, if a cell can begin on it at once."""
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
        """Run a cell on the free kernel in the task of the caller: to switch to another task and
        back takes as long as the rest of a short cell does on this side. Nothing is awaited before
        the cell has begun.

        If the caller is cancelled, the cell continues in a task: until its interrupt ends it, or,
        with `outlives`, as if its caller still waited.
        """
        self.check_open()
        await self.turn.acquire()
        rest = None
        self.grants.run_began(live)
        try:
            live.restart_clock()
            cell = ActiveCell(self, live, kernel, timeout_s, self.grace_s)
            await self._send(
                cell, kernel.begin(code, allow_stdin=False, output_max=self.output_max)
            )
            try:
                end = await cell.follow()
            except asyncio.CancelledError:
                rest = self._follow_in_task(cell)
                if not outlives:
                    await run_to_completion(cell.termination.stop(StopReason.CALLER))
                raise
            finally:
                if rest is None:
                    self._close_cell(cell)
            if (run := cell.conclude_at_once(end)) is not None:
                return run
            return await run_to_completion(cell.conclude(end))
        except Exception as error:  # noqa: BLE001  # the border, as in `_drive`
            failure = as_sbx_error(error)
            live.fail(failure)
            raise failure  # noqa: B904  # it has its cause already
        finally:
            if rest is None:
                self.turn.release()
                self.grants.run_ended(live)

    async def _send(self, cell: ActiveCell, sending: Awaitable[None]) -> None:
        self._cell = cell
        self._executions[cell.live] = cell
        self.use_began()
        try:
            with contextlib.suppress(KernelDied):  # `follow` raises it again
                await sending
        except BaseException:
            self._close_cell(cell)
            raise

    def _follow_in_task(self, cell: ActiveCell) -> asyncio.Task[None]:
        """Continue a cell without its caller. The turn ends with the task in any case: `_end` may
        cancel the task before its first step."""

        def over(_: object) -> None:
            if cell.live in self._executions:
                self._close_cell(cell)
            self.turn.release()

        task = self._drive_in_task(cell.live, lambda _: self._follow_cell(cell))
        task.add_done_callback(over)
        return task

    async def _follow_cell(self, cell: ActiveCell) -> Run:
        try:
            end = await cell.follow()
        finally:
            self._close_cell(cell)
        return await cell.conclude(end)

    def _close_cell(self, cell: ActiveCell) -> None:
        self._cell = None
        del self._executions[cell.live]
        self.use_ended()
        cell.close()

    async def _run_command(self, live: ActiveRun, program: Program, timeout_s: float) -> Run:
        kernel, lost = await self.ready()
        live.restart_clock()
        stdin = program.stdin if live.stdin is None else None
        command = await kernel.spawn(
            program.argv, program.cwd, program.env, stdin=stdin, files=program.files
        )
        if live.stdin is not None:
            await live.stdin.attach(command)
        execution = ActiveCommand(
            self,
            live,
            kernel,
            command,
            timeout_s,
            self.grace_s,
            lost=lost,
            ends_jail=self.ends_with_command,
        )
        self._executions[live] = execution
        self.use_began()
        try:
            exited = await execution.follow()
        finally:
            del self._executions[live]
            self.use_ended()
        return await execution.conclude(exited)

    async def stop(self) -> None:
        """End the kernel and its runs. The files stay, and the next run starts another kernel."""
        check_process(self._pid)
        ending = self._mark_stopped()
        async with self._starting:
            ending += self._mark_stopped()  # of a kernel that started meanwhile
            await self._drop_kernel(_STOPPED if self.gone is None else _CLOSED)
            self.state_is_kept = False
        for live in ending:
            await live.ended()

    def _mark_stopped(self) -> list[ActiveRun]:
        for execution in self._executions.values():
            execution.termination.why = execution.termination.why or StopReason.CALLER
        return list(self._executions)

    async def halt(self, reason: RunError) -> None:
        """`stop`, and end the waiting runs too. The results state the `reason`."""
        check_process(self._pid)
        self.halting = reason
        for live in self._executions:  # this is their end, even if the context closes meanwhile
            live.halted = live.halted or reason
        try:
            for live, task in list(self._tasks.items()):
                if not live.begun and not live.done:  # its task may take a while to end
                    live.finish(Status.INTERRUPTED, error=reason)
                    task.cancel()
            self._cancel_start(excluding=list(self._tasks.values()))
            await run_to_completion(self.stop())
        finally:
            if self.halting is reason:  # and not a later halt
                self.halting = None

    async def close(self, gone: ClosedReason = SANDBOX_GONE) -> None:
        """`stop`, finally: every later call raises Closed with the reason `gone`."""
        self.leave(gone)
        await run_to_completion(self._end())

    async def _end(self) -> None:
        ending = list(self._tasks.values())
        for task in ending:
            task.cancel()
        self._cancel_start(excluding=ending)
        try:
            await self.stop()
        finally:
            if ending:
                await asyncio.wait(ending)


def run_id() -> str:
    return f"run-{secrets.token_hex(6)}"


def as_sbx_error(error: Exception) -> errors.SbxError:
    """Return the error that the run raises for this one."""
    if isinstance(error, errors.SbxError):
        return error
    if (refusal := errors.out_of_files(error)) is not None:
        return refusal
    _log.error("a run failed in sbx itself", exc_info=error)
    broken = errors.Broken(f"the run failed in sbx itself: {error!r}")
    broken.__cause__ = error
    return broken
