"""Background commands of one conversation: started, known by an id, followed, stopped.

    start ──► the kernel of `default` ──► Command ──► CommandLog (command_log.py)
      │                                      │
      └── BackgroundCommand: status, logs, follow, write, stop, wait

They survive the call that started them, not the jail they run in: then their status says why. What
has ended is remembered for a while, with its log, on the disk of the host: also while the sandbox
is closed with its files kept, and over a restart of the service.
"""

import asyncio
import builtins
import json
import logging
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from sbx import errors
from sbx.aio import run_to_completion
from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.protocol.commands import (
    LOG_PIECE,
    LOG_PIECE_MAX,
    CommandCause,
    CommandState,
    CommandStatus,
    LogPiece,
    status_from_json,
    status_to_json,
)
from sbx.protocol.runs import RunError
from sbx.runtime.files.files import OpenFiles
from sbx.runtime.processes.command_log import (
    LOG_MAX,
    LOGS_MAX,
    WINDOW,
    CommandLog,
    LogWriter,
    piece_of,
)
from sbx.runtime.run import checks, termination
from sbx.runtime.run.context import Context
from sbx.runtime.run.stdin import Stdin, write_stdin
from sbx.workspace.ring_files import CommandLogs, RingFile

T = TypeVar("T")

_log = logging.getLogger(__name__)

RUNNING_MAX = 64  # at once, of a conversation
REMEMBERED_MAX = 256  # that have ended
REMEMBERED_S = 3600.0
STOP_GRACE_S = 2.0
_STOP_GRACE_MAX_S = 60.0
_KILLED_S = 5.0  # from SIGKILL to the end
_UNWRITTEN_MAX = 2 * WINDOW + (2 << 20)  # bytes; more comes only from a PID 1 that is not ours
_CUT_OFF = RunError("KernelCutOff", "its jail sent what no jail of ours sends", "")
_SHOWN_MAX = 2000  # characters of a command that are remembered


class _Record:
    """What is known of one command. `process` while it runs."""

    def __init__(self, status: CommandStatus) -> None:
        self.status = status
        self.log = CommandLog(status.id, status.log_begin, status.log_end)
        self.stdin: Stdin | None = None
        self.process: Command | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.stopped = False
        self.killed = False
        self.held = ExitStack()

    @property
    def running(self) -> bool:
        return self.status.running

    def now(self) -> CommandStatus:
        return replace(
            self.status,
            log_begin=self.log.begin,
            log_end=self.log.end,
            stdin_open=self.stdin is not None and self.stdin.open,
        )


class BackgroundCommand:
    """One background command. Its log may be forgotten, and its sandbox closed: then `status` and
    `wait` go on to tell how it ended, and the others raise NotFound and Closed."""

    def __init__(self, commands: "Commands", record: _Record) -> None:
        self.id = record.status.id
        self._commands = commands
        self._record = record

    async def status(self) -> CommandStatus:
        """How it is now."""
        return self._record.now()

    async def logs(self, offset: int = 0, *, limit: int = LOG_PIECE) -> LogPiece:
        """What it wrote, from this byte on: at most `limit` bytes. Where the piece begins later
        than was asked for, what lies between is kept no more; an empty one is the end of the log.

        Raises BadRequest `invalid_offset`.
        """
        return await self._commands._piece(self._record, offset, limit)

    async def follow(self, offset: int = 0) -> AsyncGenerator[LogPiece, None]:
        """What it wrote from this byte on, and what it writes, until it has ended."""
        async for piece in self._commands._pieces(self._record, offset):
            yield piece

    async def write(self, text: str | None) -> None:
        """Feed its standard input, which was left open at the start; None closes it. Does not wait
        for the command to read: raises Conflict `stdin_full` instead, and `stdin_closed`."""
        await write_stdin(self._record.stdin, self.id, text)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> CommandStatus:
        """SIGTERM to its process group, and SIGKILL after `grace_s` seconds; how it ended. What has
        ended stays as it is, and what it left in the background goes on."""
        return await self._commands._stop(self._record, grace_s)

    async def wait(self, timeout: float | None = None) -> CommandStatus:
        """Wait for its end, at most `timeout` seconds; how it is then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await _ended(self._record)
        return self._record.now()


class Commands:
    """See the module. Its methods may be called concurrently from one event loop."""

    def __init__(
        self,
        policy: Policy,
        context: Context,
        opened: Callable[[], Awaitable[OpenFiles]],
        owner: str,
    ) -> None:
        """They run in the jail of `context`. `owner` is the sandbox: another one over the same
        files has commands of its own."""
        self._policy = policy
        self._context = context
        self._opened = opened
        self._owner = owner
        self._records: dict[str, _Record] = {}  # the oldest first
        self._loaded = False
        self._loading = asyncio.Lock()
        self._starting = 0
        self._running = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._at: OpenFiles | None = None
        self._book = LogWriter(self._write, self._make_room)

    async def start(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
    ) -> BackgroundCommand:
        """Start `/bin/bash -c command` beside the kernel, which is started where there is none.

        Raises Denied, BadRequest, TooLarge, Closed as a shell command does, Conflict
        `too_many_commands`, Unavailable `no_space`, and what starting a kernel raises.
        """
        directory, variables = checks.check_shell(self._policy, command, cwd, env)
        self._context.check_open()
        if self._running + self._starting >= RUNNING_MAX:
            raise errors.Conflict(
                f"{RUNNING_MAX} background commands of this conversation run already",
                code="too_many_commands",
                hint="stop one, or wait for the end of one",
                details={"limit": RUNNING_MAX},
            )
        self._starting += 1
        try:
            await self._load()
            kernel, lost = await self._context.ready()
            made = CommandStatus(
                id=f"cmd-{secrets.token_hex(6)}",
                command=_shown(command),
                state=CommandState.RUNNING,
                started_at=time.time(),
                state_lost=lost,
            )
            argv = ["/bin/bash", "-c", "--", command]
            launching = self._launch(made, kernel, argv, directory, variables, stdin_open)
            record = await run_to_completion(self._track(launching))
        finally:
            self._starting -= 1
        return BackgroundCommand(self, record)

    async def get(self, command_id: str) -> BackgroundCommand:
        """A command by its id, also one that has ended. Raises NotFound, Closed."""
        self._context.check_open()
        await self._load()
        record = self._records.get(command_id)
        if record is None:
            raise errors.NotFound(f"there is no background command {command_id[:80]!r}")
        return BackgroundCommand(self, record)

    async def list(self) -> builtins.list[CommandStatus]:
        """Those that run and those that ended a while ago, the newest first."""
        self._context.check_open()
        await self._load()
        await self._forget_old()
        return [record.now() for record in reversed(self._records.values())]

    @property
    def running(self) -> int:
        """How many run now."""
        return self._running

    async def close(self) -> None:
        """Wait until what ended with its jail is recorded. To be called once the context is closed,
        and before the files are."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._book.close()

    async def _launch(
        self,
        made: CommandStatus,
        kernel: Kernel,
        argv: builtins.list[str],
        cwd: str,
        env: Mapping[str, str],
        stdin_open: bool,
    ) -> _Record:
        opened = self._at = await self._opened()
        record = _Record(made)
        with ExitStack() as held:
            held.enter_context(opened.in_use())
            old = self._old()
            try:
                record.log.ring = await opened.call(lambda: self._made(opened, made, old))
                held.callback(record.log.close)
                seen = (await kernel.jail.counters()).oom_kills
                process = await kernel.spawn(
                    argv, cwd, env, stdin=None if stdin_open else "", window=WINDOW
                )
            except BaseException:
                await opened.call(lambda: _remove(opened, [made.id]))
                raise
            self._context.background_began()
            held.callback(self._context.background_ended)
            record.process, record.log.took = process, process.took
            if stdin_open:
                record.stdin = Stdin()
                await record.stdin.attach(process)
            record.held = held.pop_all()
        for name in old:
            self._records.pop(name, None)
        self._records[made.id] = record
        self._running += 1
        self._track(self._follow(record, kernel, process, opened, seen))
        return record

    def _made(self, opened: OpenFiles, made: CommandStatus, old: builtins.list[str]) -> RingFile:
        with opened.own.logs() as logs:
            for name in old:
                logs.remove(name)
            logs.write_record(made.id, self._written(made))
            return logs.make(made.id, LOG_MAX)

    async def _follow(
        self, record: _Record, kernel: Kernel, process: Command, opened: OpenFiles, seen: int
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
        content = self._written(replace(ended, log_begin=record.log.begin, log_end=record.log.end))

        def write() -> None:
            with opened.own.logs() as logs:
                logs.write_record(ended.id, content)

        try:
            await opened.call(write)
        except (errors.SbxError, OSError) as error:
            _log.warning("the end of a background command was not recorded: %s", error)
        record.process = None
        async with self._book.turn:
            record.held.close()
        record.status = ended
        self._running -= 1
        record.log.changes.notify()

    async def _outcome(
        self, record: _Record, kernel: Kernel, process: Command, seen: int
    ) -> dict[str, Any]:
        try:
            while True:
                told = await process.next()
                if isinstance(told, frames.Exited):
                    break
                self._book.add(record.log, told.text)
                if record.log.unwritten > _UNWRITTEN_MAX and kernel.left is None:
                    kernel.left = _CUT_OFF
                    await kernel.kill()
        except KernelDied:
            return await _with_its_jail(kernel, process)
        if told.error is not None:
            return {"state": CommandState.FAILED, "reason": told.error}
        code = termination.exit_code(told)
        if record.stopped:
            return {"state": CommandState.STOPPED, "exit_code": code}
        if termination.was_killed(code) and (await kernel.jail.counters()).oom_kills > seen:
            return {
                "state": CommandState.KILLED,
                "exit_code": code,
                "cause": CommandCause.MEMORY,
                "reason": f"more memory than {self._policy.limits.memory_max} bytes was used",
            }
        return {"state": CommandState.EXITED, "exit_code": code}

    async def _stop(self, record: _Record, grace_s: float) -> CommandStatus:
        if isinstance(grace_s, bool) or not 0 <= grace_s <= _STOP_GRACE_MAX_S:
            raise errors.BadRequest(
                f"a grace is 0 to {_STOP_GRACE_MAX_S:g} seconds, not {grace_s!r}",
                details={"field": "grace_s", "limit": _STOP_GRACE_MAX_S},
            )
        if record.running:
            if record.stopping is None or (grace_s == 0 and not record.killed):
                record.stopping = self._track(self._ladder(record, grace_s))
            await asyncio.shield(record.stopping)
        return record.now()

    async def _ladder(self, record: _Record, grace_s: float) -> None:
        """The signal, and the kill."""
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
                    await _ended(record)
                return
        if record.running:
            _log.warning("the background command %s outlives its kill", record.status.id)

    async def _piece(self, record: _Record, offset: int, limit: int) -> LogPiece:
        if isinstance(offset, bool) or not 0 <= offset <= record.log.end:
            raise errors.BadRequest(
                f"the log has {record.log.end} bytes; none of them is {offset!r}",
                code="invalid_offset",
                hint="begin at 0, or at the next_offset of an earlier piece",
                details={"log_begin": record.log.begin, "log_end": record.log.end},
            )
        return await self._read(record.log, offset, max(4, min(limit, LOG_PIECE_MAX)))

    async def _pieces(self, record: _Record, offset: int) -> AsyncGenerator[LogPiece, None]:
        at = offset
        piece = await self._piece(record, offset, LOG_PIECE)
        while True:
            if piece.next_offset > at:
                yield piece
                at = piece.next_offset
            change, over = record.log.changes.next, not record.running
            piece = await self._read(record.log, at, LOG_PIECE)
            if piece.next_offset > at:
                continue
            if over:
                return
            await change.wait()

    async def _read(self, log: CommandLog, offset: int, most: int) -> LogPiece:
        """An empty piece is the end of the log."""
        while (piece := await self._read_once(log, offset, most)) is None:
            pass
        return piece

    async def _read_once(self, log: CommandLog, offset: int, most: int) -> LogPiece | None:
        """None where a flood wrote over all of it meanwhile."""
        start, end = max(offset, log.begin), log.end
        if start >= end:
            return LogPiece(start, start, "")
        opened = await self._opened()

        def read() -> bytes:
            with opened.own.logs() as logs:
                ring = logs.open(log.name)
            try:
                return ring.read(start, most, end)
            finally:
                ring.close()

        with opened.in_use():
            try:
                data = await opened.call(read)
            except errors.NotFound:
                data = b""
        if not data:
            return LogPiece(end, end, "")
        if log.begin > start:  # written over meanwhile
            data, start = data[log.begin - start :], log.begin
            if not data:
                return None
        return piece_of(start, data, more=start + len(data) < end)

    async def _write(self, act: Callable[[], builtins.list[int]]) -> builtins.list[int]:
        assert self._at is not None
        return await self._at.call(act)

    async def _make_room(self) -> None:
        """The oldest text goes first: of commands that have ended, then of the one that runs and
        holds most."""
        assert self._at is not None
        opened = self._at
        while sum(record.log.kept for record in self._records.values()) > LOGS_MAX:
            record = self._crowds()
            log, ring = record.log, record.log.ring
            log.begin = log.end
            if ring is not None:
                ring.begin = ring.end
                with suppress(OSError):
                    await opened.call(ring.empty)
            else:
                await opened.call(partial(_remove, opened, [log.name], log_only=True))

    def _crowds(self) -> _Record:
        for record in self._records.values():
            if not record.running and record.log.kept:
                return record
        return max(self._records.values(), key=lambda record: record.log.kept)

    async def _load(self) -> None:
        """What an earlier use of these files left: those that ran then have ended with it."""
        if self._loaded:
            return
        async with self._loading:
            if self._loaded:
                return
            opened = await self._opened()
            with opened.in_use():
                kept = await opened.call(lambda: self._loaded_from(opened))
            for status in sorted(kept, key=lambda one: one.started_at):
                self._records.setdefault(status.id, _Record(status))
            self._loaded = True
            await self._forget_old()

    def _loaded_from(self, opened: OpenFiles) -> builtins.list[CommandStatus]:
        found = []
        with opened.own.logs() as logs:
            for name, content in logs.records().items():
                try:
                    told = json.loads(content)
                    status = status_from_json(told)
                except ValueError:
                    logs.remove(name)
                    continue
                if told.get("owner") == self._owner and status.id == name:
                    found.append(_as_left(logs, status))
        return found

    async def _forget_old(self) -> None:
        if old := self._old():
            opened = await self._opened()
            for name in old:
                self._records.pop(name, None)
            with opened.in_use():
                await opened.call(lambda: _remove(opened, old))

    def _old(self) -> builtins.list[str]:
        """Those to be forgotten: what ended long ago, and the oldest of too many."""
        over = [record.status for record in self._records.values() if not record.running]
        before = time.time() - REMEMBERED_S
        many = len(over) - REMEMBERED_MAX
        return [
            status.id
            for number, status in enumerate(over)
            if number < many or (status.ended_at or 0.0) < before
        ]

    def _written(self, status: CommandStatus) -> bytes:
        return json.dumps({**status_to_json(status), "owner": self._owner}).encode()

    def _track(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _ended(record: _Record) -> None:
    while record.running:
        await record.log.changes.next.wait()


async def _with_its_jail(kernel: Kernel, process: Command) -> dict[str, Any]:
    """Why the jail ended that it ran in."""
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
        _log.warning("how a jail ended is not known: %s", error)
    reason = kernel.cut_off or "the kernel whose jail it ran in died"
    return died | {"cause": CommandCause.CRASHED, "reason": reason}


_CAUSES = {
    "KernelStopped": CommandCause.STOPPED,
    "SandboxStopped": CommandCause.STOPPED,
    "ContextRestarted": CommandCause.STOPPED,
    "KernelEvicted": CommandCause.EVICTED,
    "KernelCutOff": CommandCause.CRASHED,
}


def _as_left(logs: CommandLogs, status: CommandStatus) -> CommandStatus:
    """As it is now, after whoever ran it has gone."""
    end = status.log_end
    begin = end
    with suppress(errors.NotFound):
        ring = logs.open(status.id)
        begin, end = ring.begin, ring.end
        ring.close()
    if status.running:
        status = replace(
            status,
            state=CommandState.KILLED,
            cause=CommandCause.CLOSED,
            reason="the service ended while it ran",
            ended_at=time.time(),
        )
    return replace(status, log_begin=begin, log_end=end, stdin_open=False)


def _remove(opened: OpenFiles, names: builtins.list[str], *, log_only: bool = False) -> None:
    with opened.own.logs() as logs:
        for name in names:
            logs.remove(name, log_only=log_only)


def _shown(command: str) -> str:
    return command if len(command) <= _SHOWN_MAX else f"{command[: _SHOWN_MAX - 1]}…"
