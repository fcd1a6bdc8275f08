"""One kernel with its runs, as callers see it: the checks of a request, and its start."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from sbx import errors
from sbx.aio import check_process
from sbx.isolation.receipt import Receipt
from sbx.kernels.kernel import Kernel
from sbx.protocol.runs import Event, Run, RunError
from sbx.runtime.processes.scripts import Program
from sbx.runtime.run import checks
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.execution import ForwardedRun, OnPublished
from sbx.runtime.run.executor import RunExecutor, run_id
from sbx.runtime.run.stdin import OnInput, Stdin
from sbx.runtime.run.termination import StopReason


class Context(RunExecutor):
    """Call the methods from one event loop; calls may be concurrent."""

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Cancelling the call interrupts the cell."""
        kernel = self.free_kernel
        if on_input is not None or kernel is None:
            return await self.awaited(self.start_run(code, timeout=timeout, on_input=on_input))
        timeout_s = self.checked(code, timeout)
        return await self.run_inline(kernel, self.new_run(), code, timeout_s)

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncIterator[Event]:
        """Start a cell, and return its events. The last event carries the result. The cell runs
        even if the caller does not read the events."""
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
        """Run `/bin/bash -c command` in the jail of the kernel, and wait for its result."""
        live = self.start_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        return await self.awaited(live)

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> AsyncIterator[Event]:
        """Start a command, and return its events. The last event carries the result."""
        live = self.start_shell(
            command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, stdin_open=stdin_open
        )
        return live.events()

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
        live: ActiveRun | None = None,
    ) -> ActiveRun:
        """Queue a cell, as the run `live` of `new_run` if the caller has one. Raise Denied, Closed,
        BadRequest (`invalid_timeout`, `limit_widened`, `invalid_code`), TooLarge
        `code_too_large`."""
        timeout_s = self.checked(code, timeout)
        return self.launch(lambda live: self._run_cell(live, code, timeout_s, on_input), live)

    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> ActiveRun:
        """Start a shell command. With `stdin_open`, the command reads the text of `ActiveRun.write`
        after `stdin`. Raise as `start_run`, and BadRequest `invalid_env`."""
        directory, environment = checks.check_shell(self.policy, command, cwd, env)
        if stdin is not None:
            checks.check_text(stdin, "stdin")
        timeout_s = checks.timeout_s(self.policy, timeout)
        argv = ("/bin/bash", "-c", "--", command)
        shell = Program(argv, cwd=directory, env=environment, stdin=stdin or "")
        self.check_open()
        live = self.new_run()
        if stdin_open:
            live.stdin = Stdin(shell.stdin)
        return self.launch(lambda live: self._run_command(live, shell, timeout_s), live)

    async def write_stdin(self, run_id: str, text: str | None) -> None:
        """Write to a command by the id of its run, as `ActiveRun.write`. Raise NotFound too."""
        live = next((live for live in self._tasks if live.run_id == run_id), None)
        if live is None:
            raise errors.NotFound(f"there is no active run {run_id[:80]!r}")
        await live.write(text)

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
        """Check a cell, and return its time-out in seconds. Raise as `start_run` does."""
        self.require_capability()
        checks.check_text(code, "code")
        timeout_s = checks.timeout_s(self.policy, timeout)
        self.check_open()
        return timeout_s

    def new_forwarded(self, on_published: OnPublished) -> ForwardedRun:
        """Return a run that passes its output to `on_published`, for `start_request`."""
        live = ForwardedRun(run_id(), self.output_max, on_published)
        live.quarantined = self.unreported_quarantine
        return live
