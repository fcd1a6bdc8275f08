"""Background commands of one conversation: start, follow and stop them by their ids.

    start ──► the kernel of `default` ──► Command ──► CommandRecords (command_log.py)
      │                                      │
      └── BackgroundCommand: status, logs, follow, write, stop, wait

They survive the call that started them, but not their jail; then their status states the reason.
"""

import asyncio
import builtins
import logging
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

from sbx import errors
from sbx.aio import run_to_completion
from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.protocol.commands import LOG_PIECE, CommandCause, CommandState, CommandStatus, LogPiece
from sbx.protocol.runs import RunError
from sbx.runtime.files.files import OpenFiles
from sbx.runtime.processes.command_log import WINDOW, CommandRecord, CommandRecords, remove
from sbx.runtime.run import checks, termination
from sbx.runtime.run.context import Context
from sbx.runtime.run.stdin import Stdin, write_stdin

T = TypeVar("T")

_log = logging.getLogger(__name__)

RUNNING_MAX = 64  # at once, of a conversation
STOP_GRACE_S = 2.0
_STOP_GRACE_MAX_S = 60.0
_KILLED_S = 5.0  # from SIGKILL to the end
_UNWRITTEN_MAX = 2 * WINDOW + (2 << 20)  # bytes; more comes only from a PID 1 that is not ours
_CUT_OFF = RunError("KernelCutOff", "its jail sent invalid data", "")
_SHOWN_MAX = 2000  # characters of a command that are remembered


class BackgroundCommand:
    """One background command. After its log is removed or its sandbox is closed, only `status` and
    `wait` still work; the other methods raise NotFound and Closed."""

    def __init__(self, commands: "Commands", record: CommandRecord) -> None:
        self.id = record.status.id
        self._commands = commands
        self._record = record

    async def status(self) -> CommandStatus:
        return self._record.now()

    async def logs(self, offset: int = 0, *, limit: int = LOG_PIECE) -> LogPiece:
        """Return at most `limit` bytes of the output, from this byte on. A piece that begins later
        means that the bytes before it were dropped; an empty piece is the end of the log. Raise
        BadRequest `invalid_offset`."""
        return await self._commands.records.piece(self._record, offset, limit)

    async def follow(self, offset: int = 0) -> AsyncGenerator[LogPiece, None]:
        """Yield the output from this byte on, until the end of the command."""
        async for piece in self._commands.records.pieces(self._record, offset):
            yield piece

    async def write(self, text: str | None) -> None:
        """Write to the standard input, which was left open at the start; None closes it. Raise
        Conflict `stdin_closed`, and `stdin_full` instead of a wait for the command."""
        await write_stdin(self._record.stdin, self.id, text)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> CommandStatus:
        """Send SIGTERM to its process group, and SIGKILL after `grace_s` seconds. Return its end.
        Background processes of an ended command continue."""
        return await self._commands._stop(self._record, grace_s)

    async def wait(self, timeout: float | None = None) -> CommandStatus:
        """Wait at most `timeout` seconds for its end, and return its status."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._record.ended()
        return self._record.now()


class Commands:
    """See the module. Call the methods from one event loop; calls may be concurrent."""

    def __init__(
        self,
        policy: Policy,
        context: Context,
        opened: Callable[[], Awaitable[OpenFiles]],
        owner: str,
    ) -> None:
        """Run the commands in the jail of `context`. `owner` is the id of the sandbox."""
        self._policy = policy
        self._context = context
        self.records = CommandRecords(opened, owner)
        self._starting: set[str] = set()  # ids; a started command is only counted as running
        self._running = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
    ) -> BackgroundCommand:
        """Start `/bin/bash -c command` in the jail of the kernel. Start the kernel if necessary.

        Raise Denied, BadRequest, TooLarge, Closed as a shell command, Conflict `too_many_commands`,
        Unavailable `no_space`, and the errors of the start of a kernel.
        """
        directory, variables = checks.check_shell(self._policy, command, cwd, env)
        self._context.check_open()
        if self._running + len(self._starting) >= RUNNING_MAX:
            raise errors.Conflict(
                f"{RUNNING_MAX} background commands of this conversation run already",
                code="too_many_commands",
                hint="stop one, or wait for the end of one",
                details={"limit": RUNNING_MAX},
            )
        command_id = f"cmd-{secrets.token_hex(6)}"
        self._starting.add(command_id)
        try:
            await self.records.load()
            kernel, lost = await self._context.ready()
            status = CommandStatus(
                id=command_id,
                command=_shown(command),
                state=CommandState.RUNNING,
                started_at=time.time(),
                state_lost=lost,
            )
            argv = ["/bin/bash", "-c", "--", command]
            launching = self._launch(status, kernel, argv, directory, variables, stdin_open)
            record = await run_to_completion(self._track(launching))
        finally:
            self._starting.discard(command_id)
        return BackgroundCommand(self, record)

    async def get(self, command_id: str) -> BackgroundCommand:
        """Return a command by its id, also an ended one. Raise NotFound, Closed."""
        self._context.check_open()
        await self.records.load()
        record = self.records.by_id.get(command_id)
        if record is None:
            raise errors.NotFound(f"background command {command_id[:80]!r} does not exist")
        return BackgroundCommand(self, record)

    async def list(self) -> builtins.list[CommandStatus]:
        """Return the running and the recently ended commands, the newest first."""
        self._context.check_open()
        await self.records.load()
        await self.records.forget_old()
        return [record.now() for record in reversed(self.records.by_id.values())]

    @property
    def running(self) -> int:
        return self._running

    async def close(self) -> None:
        """Wait until all ends are recorded. Call it after the context is closed, and before the
        files are."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.records.writer.close()

    async def _launch(
        self,
        status: CommandStatus,
        kernel: Kernel,
        argv: builtins.list[str],
        cwd: str,
        env: Mapping[str, str],
        stdin_open: bool,
    ) -> CommandRecord:
        records, opened = self.records, await self.records.open()
        record = CommandRecord(status)
        with ExitStack() as resources:
            resources.enter_context(opened.in_use())
            old = records.old()
            try:
                record.log.ring = await opened.call(lambda: records.create(opened, status, old))
                resources.callback(record.log.close)
                seen = (await kernel.jail.counters()).oom_kills
                process = await kernel.spawn(
                    argv, cwd, env, stdin=None if stdin_open else "", window=WINDOW
                )
            except BaseException:
                await opened.call(lambda: remove(opened, [status.id]))
                raise
            self._context.background_began()
            resources.callback(self._context.background_ended)
            record.process, record.log.took = process, process.took
            if stdin_open:
                record.stdin = Stdin()
                await record.stdin.attach(process)
            record.resources = resources.pop_all()
        for name in old:
            records.by_id.pop(name, None)
        records.by_id[status.id] = record
        self._starting.discard(status.id)
        self._running += 1
        self._track(self._follow(record, kernel, process, opened, seen))
        return record

    async def _follow(
        self, record: CommandRecord, kernel: Kernel, process: Command, opened: OpenFiles, seen: int
    ) -> None:
        try:
            outcome = await self._outcome(record, kernel, process, seen)
            await record.log.written()
        except Exception as error:  # noqa: BLE001  # the border of a background task
            _log.error("a background command was lost by sbx itself", exc_info=error)
            outcome = {"state": CommandState.KILLED, "reason": f"sbx itself failed: {error!r}"}
        if record.stdin is not None:
            record.stdin.close()
            record.stdin = None
        ended = replace(record.status, ended_at=time.time(), **outcome)
        await self.records.write_end(opened, record, ended)
        record.process = None
        async with self.records.writer.turn:
            record.resources.close()
        record.status = ended
        self._running -= 1
        record.log.changes.notify()

    async def _outcome(
        self, record: CommandRecord, kernel: Kernel, process: Command, seen: int
    ) -> dict[str, Any]:
        try:
            while True:
                frame = await process.next()
                if isinstance(frame, frames.Exited):
                    break
                self.records.writer.add(record.log, frame.text)
                if record.log.unwritten > _UNWRITTEN_MAX and kernel.left is None:
                    kernel.left = _CUT_OFF
                    await kernel.kill()
        except KernelDied:
            return await _with_its_jail(kernel, process)
        if frame.error is not None:
            return {"state": CommandState.FAILED, "reason": frame.error}
        code = termination.exit_code(frame)
        if record.stopped:
            return {"state": CommandState.STOPPED, "exit_code": code}
        if termination.was_killed(code) and (await kernel.jail.counters()).oom_kills > seen:
            limits = self._context.grants.limits
            return {
                "state": CommandState.KILLED,
                "exit_code": code,
                "cause": CommandCause.MEMORY,
                "reason": f"more memory than {limits.memory_max} bytes was used",
            }
        return {"state": CommandState.EXITED, "exit_code": code}

    async def _stop(self, record: CommandRecord, grace_s: float) -> CommandStatus:
        if isinstance(grace_s, bool) or not 0 <= grace_s <= _STOP_GRACE_MAX_S:
            raise errors.BadRequest(
                f"a grace is 0 to {_STOP_GRACE_MAX_S:g} seconds, not {grace_s!r}",
                details={"field": "grace_s", "limit": _STOP_GRACE_MAX_S},
            )
        if record.running:
            if record.stopping is None or (grace_s == 0 and not record.killed):
                record.stopping = self._track(self._terminate(record, grace_s))
            await asyncio.shield(record.stopping)
        return record.now()

    async def _terminate(self, record: CommandRecord, grace_s: float) -> None:
        record.stopped = True
        steps = [(signal.SIGTERM, grace_s)] if grace_s else []
        for number, patience_s in (*steps, (signal.SIGKILL, _KILLED_S)):
            process = record.process
            if process is None:
                break
            record.killed = number == signal.SIGKILL
            await process.signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await record.ended()
                return
        if record.running:
            _log.warning("the background command %s outlives its kill", record.status.id)

    def _track(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _with_its_jail(kernel: Kernel, process: Command) -> dict[str, Any]:
    """Return the reason for the end of the jail in which the command ran."""
    died: dict[str, Any] = {"state": CommandState.KILLED}
    if kernel.killed_for is not None:
        cause = CommandCause(kernel.killed_for.value)
        if cause is CommandCause.HONEYTOKEN:
            reason = "a planted credential was used in its sandbox"
            return died | {"cause": cause, "reason": reason}
        return died | {"cause": cause, "reason": f"its sandbox crossed the limit: {cause.value}"}
    if process.killed_with_kernel:
        left = kernel.left
        if left is None:
            reason = "a cell that did not end was killed, and all of its jail with it"
            return died | {"cause": CommandCause.INTERRUPTED, "reason": reason}
        cause = _CAUSES.get(left.name, CommandCause.CLOSED)
        return died | {"cause": cause, "reason": left.value}
    try:
        before, _ = kernel.seen
        end = await kernel.jail.kill()
        if end.oom_kills > before:
            return died | {"cause": CommandCause.MEMORY, "reason": "memory ran out in its jail"}
    except errors.SbxError as error:
        _log.warning("the end of a jail is unknown: %s", error)
    reason = kernel.cut_off or "the kernel whose jail it ran in died"
    return died | {"cause": CommandCause.CRASHED, "reason": reason}


_CAUSES = {
    "KernelStopped": CommandCause.STOPPED,
    "SandboxStopped": CommandCause.STOPPED,
    "ContextRestarted": CommandCause.STOPPED,
    "KernelEvicted": CommandCause.EVICTED,
    "KernelCutOff": CommandCause.CRASHED,
}


def _shown(command: str) -> str:
    return command if len(command) <= _SHOWN_MAX else f"{command[: _SHOWN_MAX - 1]}…"
