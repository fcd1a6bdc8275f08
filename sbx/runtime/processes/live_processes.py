"""Processes that clients follow live, with pipes or at a terminal, by their pid inside.

    Command ──► LiveProcess ──► ProcessClient, one for each client: a bounded queue of output

Nothing of them is recorded: a client gets the output from its attachment on, and only the first one
all of it. A process outlives its clients, and ends by itself, at its deadline or with the jail. A
client with a full queue delays the output; after `_STALLED_S` its output is dropped until it reads,
and a note replaces it.
"""

import asyncio
import builtins
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, islice, takewhile
from typing import Literal, Self

from msgspec import Struct

from sbx import errors
from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied, TerminalCommand
from sbx.policy import Policy
from sbx.protocol.terminals import check_size
from sbx.runtime.run import checks
from sbx.runtime.run.context import Context

_log = logging.getLogger(__name__)

RUNNING_MAX = 64  # at once, of a conversation
CLIENTS_MAX = 8  # of one process
_ENDED_MAX = 64  # that are remembered
_SHOWN_MAX = (
    64 << 10
)  # bytes, about, of its arguments that are remembered; as many of its variables
_NAME_MAX = 4096
_WORD_SIZE = 64  # bytes, about, of an empty word in memory
_WINDOW = 256 << 10  # bytes that a process may write before any of it is taken
_QUEUE_MAX = 2 << 20  # bytes that wait for one client
_STALLED_S = 10.0
_RATE = 16 << 20  # bytes in a second, of one process
_PAUSE_MIN_S = 0.02
_DROPPED = b"\n[sbx: output was dropped here, because the client did not read it]\n"

Output = tuple[Literal["stdout", "stderr", "pty"], bytes]
Size = tuple[int, int]  # rows and columns


class ProcessEnd(Struct, frozen=True):
    """`exit_code`, or the number of the `signal` that killed it, or the `reason` why neither is
    known. `timed_out`: its deadline passed."""

    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    timed_out: bool = False


class ProcessClient:
    """One client of a process. `async for stream, data in client` ends with the process."""

    def __init__(self, process: "LiveProcess") -> None:
        self._process = process
        self._pieces: deque[Output] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self.stalled = False

    @property
    def full(self) -> bool:
        return self._size >= _QUEUE_MAX

    def put(self, output: Output) -> None:
        if not self.stalled:
            self._pieces.append(output)
            self._size += len(output[1])
            self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._pieces:
            if self._process.end is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._size -= len(piece[1])
        if self.stalled and not self._pieces:
            self.stalled = False
            self.put(("pty" if piece[0] == "pty" else "stderr", _DROPPED))
        self._process.drained()
        return piece


class LiveProcess:
    """One process. `end` is None while it runs. `argv` and `env` are for lists: they have the
    first words and variables only, if these are long."""

    def __init__(
        self,
        pid: int,
        command: Command,
        context: Context,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        tag: str | None,
        timeout_s: float | None,
        at_terminal: bool,
        stdin_open: bool,
    ) -> None:
        self.pid = pid
        self.argv = (argv[0][:_NAME_MAX], *islice(argv, 1, 1 + _fitting(argv[1:])))
        self.env = dict(islice(env.items(), _fitting(map("=".join, env.items()))))
        self.cwd = cwd
        self.tag = tag
        self.at_terminal = at_terminal
        self.stdin_open = stdin_open
        self.end: ProcessEnd | None = None
        self._command = command
        self._context = context
        self._first: ProcessClient | None = ProcessClient(self)  # it misses no output
        self._clients = {self._first}
        self._drained = asyncio.Event()
        self._next_at = 0.0
        self._killing: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._late = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
        context.background_began()
        self._task = asyncio.create_task(self._follow())

    @property
    def running(self) -> bool:
        return not self._task.done()

    @asynccontextmanager
    async def attach(self) -> AsyncIterator[ProcessClient]:
        """Attach a client. The first one gets all output, the others the later output.

        Raise Conflict `too_many_clients`.
        """
        first, self._first = self._first, None
        if first is None and len(self._clients) >= CLIENTS_MAX:
            raise errors.Conflict(
                f"{CLIENTS_MAX} clients follow this process already",
                code="too_many_clients",
                hint="disconnect one of them",
                details={"limit": CLIENTS_MAX},
            )
        client = first or ProcessClient(self)
        self._clients.add(client)
        try:
            yield client
        finally:
            self._clients.discard(client)
            self.drained()

    async def write(self, data: bytes) -> None:
        """Write to its standard input or its terminal, as it reads. Raise Conflict
        `stdin_closed`."""
        if not self.running or not self.stdin_open or not self._command.reads:
            raise errors.Conflict(
                f"the standard input of the process {self.pid} is closed",
                code="stdin_closed",
                hint="start it with an open standard input, and write while it runs",
            )
        await self._command.feed(data)

    async def close_stdin(self) -> None:
        """Close its standard input. Raise Conflict `stdin_closed`."""
        if not self.running or not self.stdin_open or self.at_terminal:
            raise errors.Conflict(
                f"the process {self.pid} has no open standard input", code="stdin_closed"
            )
        self.stdin_open = False
        await self._command.write(None)

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        await self._command.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal. Raise BadRequest `invalid_size`, Conflict
        `no_terminal`."""
        check_size(rows, columns)
        if not isinstance(self._command, TerminalCommand):
            raise errors.Conflict(f"the process {self.pid} has no terminal", code="no_terminal")
        await self._command.resize(rows, columns)

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    def drained(self) -> None:
        """Continue the output: a client has read, or left."""
        self._drained.set()

    def _expire(self) -> None:
        self._finish(ProcessEnd(timed_out=True, reason="its time is over"))
        self._killing = asyncio.create_task(self.signal(signal.SIGKILL))

    def _finish(self, end: ProcessEnd) -> None:
        self.end = self.end or end
        for client in self._clients:
            client.wake()

    async def _follow(self) -> None:
        try:
            end = await self._carried()
        except Exception as error:  # noqa: BLE001  # the border of a background task
            _log.error("a process was lost by sbx itself", exc_info=error)
            end = ProcessEnd(reason=f"sbx itself failed: {error!r}")
        if self._late is not None:
            self._late.cancel()
        self._finish(end)
        self._context.background_ended()

    async def _carried(self) -> ProcessEnd:
        while True:
            try:
                frame = await self._command.next_frame()
            except KernelDied:
                return ProcessEnd(reason="its kernel ended")
            match frame:
                case frames.Exited(code=code, signal=number, error=error):
                    return ProcessEnd(code, number, error or "")
                case frames.OutputFrame(name=name, text=text):
                    output: Output = (name, text.encode(errors="replace"))
                case frames.Tty(data=data):
                    output = ("pty", data)
            if self.end is None:
                for client in self._clients:
                    client.put(output)
                await self._room()
            await self._took(len(output[1]))

    async def _room(self) -> None:
        """Wait until no client is full, for at most `_STALLED_S`."""
        try:
            async with asyncio.timeout(_STALLED_S):
                while any(client.full and not client.stalled for client in self._clients):
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            for client in self._clients:
                client.stalled = client.stalled or client.full

    async def _took(self, size: int) -> None:
        """Give credit for more output, at most at `_RATE`: others use this loop too."""
        now = time.monotonic()
        self._next_at = max(now, self._next_at) + size / _RATE
        if self._next_at - now > _PAUSE_MIN_S:
            await asyncio.sleep(self._next_at - now)
        await self._command.took(size)


class LiveProcesses:
    """The processes of one conversation, by pid. A few that ended are remembered."""

    def __init__(self, policy: Policy, context: Context) -> None:
        """Run them in the jail of `context`."""
        self._policy = policy
        self._context = context
        self._processes: dict[int, LiveProcess] = {}  # the oldest first
        self._starting = 0

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
        terminal: Size | None = None,
        tag: str | None = None,
        timeout_s: float | None = None,
    ) -> LiveProcess:
        """Start a program with pipes, or at a `terminal` of this size. Start the kernel if
        necessary. After `timeout_s` seconds, the process group gets SIGKILL.

        Raise Denied if the policy offers no shell or no processes, BadRequest, TooLarge, Closed,
        Conflict `too_many_processes` and `not_started`, and the errors of the start of a kernel.
        """
        directory, variables = checks.check_shell(self._policy, None, cwd, env)
        for word in argv:
            checks.check_text(word, "command", checks.COMMAND_MAX)
        if tag is not None:
            checks.check_text(tag, "tag", _NAME_MAX)
        if terminal is not None:
            check_size(*terminal)
        self._context.check_open()
        self._check_room()
        self._starting += 1
        try:
            kernel, _ = await self._context.ready()
            if terminal is None:
                command: Command = await kernel.spawn(
                    argv,
                    directory,
                    variables,
                    stdin=None if stdin_open else "",
                    window=_WINDOW,
                    tells_pid=True,
                )
            else:
                command = await kernel.spawn_at_terminal(
                    argv, directory, variables, *terminal, tells_pid=True
                )
            pid = await command.pid()
        finally:
            self._starting -= 1
        if pid is None:
            raise errors.Conflict(
                "no process could be started",
                code="not_started",
                hint="the sandbox may have too many processes, or its kernel has ended",
            )
        process = LiveProcess(
            pid,
            command,
            self._context,
            argv=argv,
            env=env or {},
            cwd=directory,
            tag=tag,
            timeout_s=timeout_s,
            at_terminal=terminal is not None,
            stdin_open=stdin_open or terminal is not None,
        )
        self._processes.pop(pid, None)
        self._processes[pid] = process
        return process

    def find(self, *, pid: int | None = None, tag: str | None = None) -> LiveProcess:
        """Return a process by its pid or its tag. Raise NotFound, Closed."""
        self._context.check_open()
        for process in reversed(self._processes.values()):
            if process.pid == pid or (tag is not None and process.tag == tag):
                return process
        name = f"with the pid {pid}" if tag is None else f"{tag[:80]!r}"
        raise errors.NotFound(f"the process {name} does not exist")

    def running(self) -> builtins.list[LiveProcess]:
        """Return the running processes, the oldest first. Raise Closed."""
        self._context.check_open()
        return [process for process in self._processes.values() if process.running]

    async def end(self) -> None:
        """Wait until all have ended. Call it after the context is closed."""
        for process in self._processes.values():
            await process.ended()

    def _check_room(self) -> None:
        ended = [process.pid for process in self._processes.values() if not process.running]
        for pid in ended[: max(0, len(ended) - _ENDED_MAX)]:
            del self._processes[pid]
        if len(self._processes) - len(ended) + self._starting >= RUNNING_MAX:
            raise errors.Conflict(
                f"{RUNNING_MAX} processes of this conversation run already",
                code="too_many_processes",
                hint="end one of them",
                details={"limit": RUNNING_MAX},
            )


def _fitting(words: Iterable[str]) -> int:
    """Return how many of these words, from the first one on, are remembered."""
    sizes = accumulate(len(word) + _WORD_SIZE for word in words)
    return sum(1 for _ in takewhile(_SHOWN_MAX.__ge__, sizes))
