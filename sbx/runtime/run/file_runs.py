"""Files of Python of one conversation: `python3 FILE` next to the variables of its contexts."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable

from sbx import errors
from sbx.aio import run_to_completion
from sbx.policy import Policy
from sbx.run_methods import OnInput, RunCall
from sbx.runtime.processes.scripts import PythonFile, check_file
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context

_NAME = "file-"  # begins the name of a jail for one file


class FileRuns:
    """If the policy allows processes, the kernel of a context forks a program. Otherwise a kernel
    becomes the program: another kernel, with a jail for this run."""

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
        jail = self._make_context(f"{_NAME}{secrets.token_hex(8)}", True)
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
