"""One workspace and its kernels: the context `default`, and others by name.

A conversation has files (here) and contexts (contexts.py). A context is one kernel with its runs
(context.py). Runs without a context use `default`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence

from sbx.aio import run_to_completion
from sbx.isolation.receipt import Receipt
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.protocol.languages import check_language
from sbx.protocol.runs import RunError
from sbx.protocol.surroundings import Place, Surroundings
from sbx.protocol.usage import SandboxUsage
from sbx.run_methods import RunCall, ScriptMethods, to_default
from sbx.runtime.files.disk_limit import DiskLimit, DiskLimitState
from sbx.runtime.files.files import OpenFiles, WorkspaceFiles, WorkspaceUploads
from sbx.runtime.files.open_files import OpenFilesLimit
from sbx.runtime.files.usage import SandboxUsageSource, UsageReader
from sbx.runtime.processes.commands import Commands
from sbx.runtime.processes.languages import Languages, ScriptInterpreter
from sbx.runtime.processes.live_processes import LiveProcesses
from sbx.runtime.processes.scripts import (
    Program,
    check_script,
    plan_script,
)
from sbx.runtime.processes.terminals import Terminals
from sbx.runtime.run import checks
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context, FileRuns
from sbx.runtime.run.context_kernel import SANDBOX_GONE, StartKernel
from sbx.runtime.run.contexts import Contexts, ContextStore
from sbx.runtime.snapshots.checkpoints import Checkpoint, Checkpoints
from sbx.runtime.snapshots.dry_run import DryRun, DryRuns
from sbx.runtime.snapshots.snapshots import Snapshots


class Conversation(ScriptMethods[ActiveRun]):
    """A workspace with its kernels. Its methods may be called concurrently from one event loop.

    `open_files` and `start` are its sandbox's: how files are opened, how a kernel is launched.
    """

    dry_runs: DryRuns
    checkpoints: Checkpoints

    def __init__(
        self,
        name: str,
        policy: Policy,
        open_files: Callable[[], Awaitable[OpenFiles]],
        start: StartKernel,
        grace_s: float,
        *,
        languages: Languages,
        lost: Callable[[str], bool] = lambda _context: False,
        contexts: ContextStore | None = None,
        limit: OpenFilesLimit | None = None,
        grants: Grants | None = None,
        whole: SandboxUsageSource,
    ) -> None:
        """`lost`: whether the kernel of a context ended without a request, so that the next run
        reports `state_lost`. `contexts`: the store of the context names. `limit`: the limit of open
        files; it closes unused files, and then `open_files` is called again. `grants`: the access
        that a person granted. `whole`: the sandbox."""
        self.name = name
        self.grants = grants or Grants(policy)
        self.uploads = WorkspaceUploads(self.opened, policy)
        self._policy = policy
        self._open_files = open_files
        self._start = start
        self._grace_s = grace_s
        self._lost = lost
        self._limit = limit
        self._languages = languages
        self._opened: OpenFiles | None = None
        self._opened_at = time.monotonic()  # at the last time
        self._opening = asyncio.Lock()
        self.file_runs = FileRuns(policy, self._make_context)
        self._disk = DiskLimitState()
        self.contexts = Contexts(self._make_context, contexts or ContextStore())
        self._default = self.contexts.default
        self.files = WorkspaceFiles(self.opened, policy, self._default.borrow_kernel)
        self.commands = Commands(policy, self._default, self.opened, whole.id)
        self.terminals = Terminals(policy, self._default)
        self.live_processes = LiveProcesses(policy, self._default)
        self._meter = UsageReader(policy, self.opened, whole)

    def _make_context(self, name: str, new: bool) -> Context:
        return Context(
            name,
            self.name,
            self._policy,
            self.opened,
            self._start,
            self._grace_s,
            disk=DiskLimit(self._policy.limits, self._disk),
            state_is_kept=not new and self._lost(name),
            grants=self.grants,
        )

    @property
    def receipt(self) -> Receipt | None:
        """The walls around the live kernel of `default`; None without one."""
        return self._default.receipt

    def copy_by(self, copies: Snapshots, start: StartKernel) -> None:
        """Set how the files are copied, and how a jail over a copy starts. The sandbox calls this
        once."""
        self.dry_runs = DryRuns(self.name, self._policy, self.opened, copies, start, self._grace_s)
        self.checkpoints = Checkpoints(self.opened, copies)

    @property
    def ending(self) -> list[Context]:
        """The contexts that may have a kernel: its own, and those of dry runs."""
        return [*self.contexts.ending, *self.file_runs.jails, *self.dry_runs.contexts]

    @property
    def alive(self) -> bool:
        return any(context.alive for context in self.ending)

    @property
    def processes(self) -> list[int]:
        """The host pids inside `default`; empty without a live kernel."""
        return self._default.processes

    @property
    def busy(self) -> bool:
        """Whether a run executes or waits, or a kernel starts, in any context, or a client is
        attached to a terminal."""
        return (
            bool(self.file_runs.jails)
            or any(context.busy for context in self.contexts.ending)
            or self.terminals.attached > 0
            or self.dry_runs.busy
            or self.checkpoints.busy
        )

    def last_use(self) -> float:
        """Return the monotonic time of the last use of its files or a kernel: now, if one lasts."""
        if self.busy or (self._opened is not None and self._opened.busy):
            return time.monotonic()
        return max(self._opened_at, *(context.last_use() for context in self.contexts.ending))

    # -- runs, in `default` ---------------------------------------------------------------------

    run = to_default(Context.run)
    start_run = to_default(Context.start_run)
    write_stdin = to_default(Context.write_stdin)
    start = to_default(Context.start)
    connect = to_default(Context.connect)
    read_receipt = to_default(Context.read_receipt)

    def start_call(self, call: RunCall) -> ActiveRun:
        if call.kind == "file":
            file, timeout_s = self.file_runs.check(call), self.script_timeout(call.timeout)
            live = self._default.new_run()
            return self.file_runs.start(self._default, live, file, timeout_s, call.on_input)
        if call.kind != "script":
            return self._default.start_call(call)
        make = self.prepare_script(
            call.code, call.language, args=call.args, env=call.env, stdin=call.stdin, cwd=call.cwd
        )
        return self._default.start_program(make, self.script_timeout(call.timeout))

    async def interrupt(self) -> bool:
        """Interrupt the current cell or file. Return False without one."""
        done = [await context.interrupt() for context in (self._default, *self.file_runs.jails)]
        return any(done)

    def prepare_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Callable[[str], Awaitable[Program]]:
        """Return a function that makes a program of a script, for `Context.start_program`. Raise as
        `start_script`."""
        script = check_script(
            self._policy,
            code,
            check_language(language),
            args=args,
            cwd=cwd,
            env=env,
            stdin=stdin,
        )

        async def make(run_id: str) -> Program:
            tool = await self.resolve_interpreter(script.language)
            policy = self._policy.model_copy(update={"limits": self.grants.limits})
            return plan_script(script, tool, policy, run_id)

        return make

    def script_timeout(self, timeout: float | None) -> float:
        """Return the time-out of a script in seconds. Raise BadRequest as `start_script`."""
        return self._default.timeout_s(timeout)

    async def resolve_interpreter(self, language: str) -> ScriptInterpreter:
        """Return the interpreter of this language.

        Raise BadRequest `unknown_language` and `language_unavailable`, Denied, Closed.
        """
        name = check_language(language)
        checks.require_processes(self._policy)
        checks.require_capability(self._policy, "shell")
        self._default.check_open()
        return await self._languages.tool(name, self._has_file)

    async def surroundings(self) -> Surroundings:
        """Return the paths, languages and capabilities that code and tools have here."""
        place: Place = "workspace" if (await self.opened()).host_directory is None else "directory"
        capabilities = self._policy.capabilities
        languages = await self._languages.names() if "shell" in capabilities else ()
        return Surroundings(place, capabilities=capabilities, languages=languages)

    async def _has_file(self, path: str) -> bool:
        return (await self.files.stat(path)).kind == "file"

    # -- dry runs and checkpoints ---------------------------------------------------------------

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> DryRun:
        """Run a shell command on a frozen copy of the files, in a separate jail without network.
        Return its output and the changes; `commit` makes all of them, or none.

        A cancelled or failed call leaves nothing. Raise as `start_shell`, Conflict
        `too_many_dry_runs`, TooLarge `workspace_too_large`, Unavailable `no_space`.
        """
        return await self.dry_runs.create(command, timeout=timeout, cwd=cwd)

    async def checkpoint(self) -> Checkpoint:
        """Copy the present files; `restore` brings all of them back, or none. The last few
        checkpoints are kept. Raise TooLarge `workspace_too_large`, Unavailable `no_space`."""
        return await self.checkpoints.make()

    # -- usage ----------------------------------------------------------------------------------

    async def usage(self) -> SandboxUsage:
        """Return the present usage of the sandbox, and of the disk by this conversation. Start
        nothing."""
        return await self._meter.now()

    def stream_usage(self, interval_s: float = 1.0) -> AsyncGenerator[SandboxUsage, None]:
        """Yield the usage now and after each interval (0.2 to 3600 seconds), until the generator is
        closed. Raise BadRequest `invalid_interval`."""
        return self._meter.stream(interval_s)

    async def give_up(self, live: ActiveRun, /) -> None:
        """Interrupt a run for which no caller waits. Drop it if it has not begun."""
        await _all(
            context.give_up(live) for context in (*self.contexts.ending, *self.file_runs.jails)
        )

    # -- life -----------------------------------------------------------------------------------

    async def opened(self) -> OpenFiles:
        """Return the files, and open them at the first call. If `limit` may close them, a caller
        that awaits anything before it uses them keeps them open by `OpenFiles.in_use`."""
        async with self._opening:
            self._default.check_open()
            self._opened_at = time.monotonic()
            if self._opened is None:
                await run_to_completion(self._open())
            assert self._opened is not None
            if self._limit is not None:
                self._limit.used(self.close_if_idle)
            return self._opened

    def close_if_idle(self) -> bool:
        """Close the files, which the next use opens again; False where they are used now, by a
        kernel or a call."""
        if self.busy or self.alive or self._opening.locked():
            return False
        if self._opened is not None:
            if self._opened.busy:
                return False
            for context in self.contexts.ending:
                context.release_files()
            opened, self._opened = self._opened, None
            opened.close_if_idle()
        return True

    async def stop(self) -> None:
        """End every kernel and its runs. The files stay, and the next run starts another kernel."""
        await _all(context.stop() for context in self.ending)

    async def halt(self, reason: RunError) -> None:
        """`stop`, and end the waiting runs too. The results state the `reason`."""
        await _all(context.halt(reason) for context in self.ending)

    async def close(self) -> None:
        """`stop`, for good: every later call raises Closed."""
        ending = [*self.contexts.ending, *self.file_runs.jails]
        for context in ending:
            context.leave(SANDBOX_GONE)
        await run_to_completion(self._end(ending))

    async def _end(self, ending: list[Context]) -> None:
        await self.grants.close()
        try:
            await _all(context.close() for context in ending)
        finally:
            await self.file_runs.close()
            try:
                await _all((self.commands.close(), self.terminals.end(), self.live_processes.end()))
                await _all((self.dry_runs.close(), self.checkpoints.close()))
            finally:
                await self._close_files()

    async def _close_files(self) -> None:
        async with self._opening:
            await self.files.partials.close(self._opened)
            if self._opened is not None:
                opened, self._opened = self._opened, None
                await opened.close()
            if self._limit is not None:
                self._limit.closed(self.close_if_idle)

    async def _open(self) -> None:
        self._opened = await self._open_files()


async def _all(ends: Iterable[Awaitable[None]]) -> None:
    """Wait for the end of each, and raise the first error."""
    for end in await asyncio.gather(*ends, return_exceptions=True):
        if end is not None:
            raise end
