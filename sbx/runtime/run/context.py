"""One kernel with its runs, as callers see it: the checks of a request, and its start. Files of
Python run next to its variables."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from sbx import errors
from sbx.aio import check_process, run_to_completion
from sbx.isolation.receipt import Receipt
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.protocol.grants import Access
from sbx.protocol.runs import Run, RunError
from sbx.run_methods import OnInput, RunCall, RunMethods
from sbx.runtime.processes.scripts import Program, PythonFile, check_file
from sbx.runtime.run import checks
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.execution import ForwardedRun, OnPublished
from sbx.runtime.run.executor import RunExecutor, run_id
from sbx.runtime.run.stdin import Stdin
from sbx.runtime.run.termination import StopReason

_FILE = "file-"  # begins the name of a jail for one file of Python


class Context(RunExecutor, RunMethods[ActiveRun]):
    """Call the methods from one event loop; calls may be concurrent."""

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
        """Interrupt the current cell. Return False without one."""
        check_process(self._pid)
        if self._cell is None:
            return False
        await self._cell.termination.stop(StopReason.CALLER)
        return True

    def start_run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        on_input: OnInput | None = None,
    ) -> ActiveRun:
        """Queue a cell. Raise Denied, Closed, BadRequest (`invalid_timeout`, `limit_widened`,
        `invalid_code`), TooLarge `code_too_large`."""
        timeout_s = self.checked(code, timeout)
        return self.start_checked(self.new_run(), code, timeout_s, on_input)

    def start_checked(
        self, live: ActiveRun, code: str, timeout_s: float, on_input: OnInput | None = None
    ) -> ActiveRun:
        """Queue a cell that `checked` accepted, as the run `live` of `new_run`. Raise Closed."""
        return self.launch(lambda live: self._run_cell(live, code, timeout_s, on_input), live)

    def start_call(self, call: RunCall) -> ActiveRun:
        if call.kind == "python":
            return self.start_run(call.code, timeout=call.timeout, on_input=call.on_input)
        directory, environment = checks.check_shell(self.policy, call.code, call.cwd, call.env)
        if call.stdin is not None:
            checks.check_text(call.stdin, "stdin")
        timeout_s = self.timeout_s(call.timeout)
        argv = ("/bin/bash", "-c", "--", call.code)
        shell = Program(argv, cwd=directory, env=environment, stdin=call.stdin or "")
        self.check_open()
        live = self.new_run()
        if call.stdin_open:
            live.stdin = Stdin(shell.stdin)
        return self.launch(lambda live: self._run_command(live, shell, timeout_s), live)

    async def write_stdin(self, run_id: str, text: str | None) -> None:
        """Write to a command by the id of its run, as `ActiveRun.write`. Raise NotFound too."""
        live = next((live for live in self._tasks if live.run_id == run_id), None)
        if live is None:
            raise errors.NotFound(f"active run {run_id[:80]!r} does not exist")
        await live.write(text)

    def start_file(
        self,
        live: ActiveRun,
        file: PythonFile,
        timeout_s: float,
        on_input: OnInput | None = None,
    ) -> ActiveRun:
        """Queue a file of Python that `check_file` accepted, as the run `live` of `new_run`. Raise
        Closed."""
        return self.launch(lambda live: self._run_file(live, file, timeout_s, on_input), live)

    def start_program(
        self, make: Callable[[str], Awaitable[Program]], timeout_s: float
    ) -> ActiveRun:
        """Start the program that `make` returns for the id of the run. An error of `make` ends the
        run. Raise Closed."""

        async def drive(live: ActiveRun) -> Run:
            return await self._run_command(live, await make(live.run_id), timeout_s)

        return self.launch(drive)

    def start_request(
        self,
        live: ActiveRun,
        kernel: Kernel,
        kind: str,
        content: Any,
        timeout_s: float,
        on_input: OnInput | None = None,
    ) -> None:
        """Queue a request to this kernel, as `start_run` queues a cell. `kind` is the type of the
        frame. If the kernel is gone by then, the run raises Conflict `kernel_gone`. Raise
        Closed."""
        self.launch(
            lambda live: self._run_request(live, kernel, kind, content, timeout_s, on_input), live
        )

    async def restart(self) -> Receipt:
        """End the kernel with all its runs, and start another one with a clean namespace. The files
        stay. Raise as `start` does; then the next run starts a kernel, without `state_lost`."""
        self.check_open()
        message = f"the context {self.name!r} was restarted meanwhile"
        await self.halt(RunError("ContextRestarted", message, ""))
        return await self.start()

    def checked(self, code: str, timeout: float | None) -> float:
        """Check a cell, and return its time-out in seconds. Raise as `start_run` does, but not
        Closed: the start of the run raises that."""
        checks.require_capability(self.policy, "python")
        checks.check_text(code, "code")
        return self.timeout_s(timeout)

    def timeout_s(self, timeout: float | None) -> float:
        """Return the time-out of a run in seconds. Raise BadRequest as `start_run`."""
        try:
            return checks.timeout_s(self.policy, timeout, self.grants.wall_time)
        except errors.BadRequest as error:
            if error.code == "limit_widened" and timeout is not None and math.isfinite(timeout):
                self.grants.note_refused(Access("run_time", str(math.ceil(timeout))))
            raise

    def new_forwarded(self, on_published: OnPublished) -> ForwardedRun:
        """Return a run that passes its output to `on_published`, for `start_request`."""
        live = ForwardedRun(run_id(), self.output_max, on_published)
        live.quarantined = self.unreported_quarantine
        return live


class FileRuns:
    """The files of Python of a conversation.

    If the policy allows processes, the kernel of a context forks a program. Otherwise a kernel
    becomes the program: another kernel, with a jail for this run.
    """

    def __init__(self, policy: Policy, make_context: Callable[[str, bool], Context]) -> None:
        self._policy = policy
        self._make_context = make_context
        self.jails: dict[Context, asyncio.Task[None]] = {}

    def check(self, call: RunCall) -> PythonFile:
        """Check the call of `start_file`, and raise as it does."""
        return check_file(self._policy, call)

    def start(
        self,
        context: Context,
        live: ActiveRun,
        file: PythonFile,
        timeout_s: float,
        on_input: OnInput | None,
    ) -> ActiveRun:
        """Start a file that `check` accepted, as the run `live`. Raise Closed."""
        if self._policy.processes:
            return context.start_file(live, file, timeout_s, on_input)
        context.check_open()
        jail = self._make_context(f"{_FILE}{secrets.token_hex(8)}", True)
        jail.start_file(live, file, timeout_s, on_input)
        self.jails[jail] = asyncio.create_task(self._close_jail(jail, live))
        return live

    async def close(self) -> None:
        """Wait until no jail is left. Their contexts are closed."""
        if self.jails:
            await asyncio.wait(list(self.jails.values()))

    async def _close_jail(self, jail: Context, live: ActiveRun) -> None:
        try:
            with contextlib.suppress(errors.SbxError):  # the run has the reason
                await live.ended()
        finally:
            await run_to_completion(jail.close())
            del self.jails[jail]
