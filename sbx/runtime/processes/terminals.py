"""Terminals of one conversation: a command on a pty inside, and any number of clients on it.

    TerminalCommand ──► Terminal ──► Screen (screens.py): what it shows, for whoever comes later
                           └───────► Attached, one for each client: a queue of bytes, bounded

A terminal outlives its clients, and ends with its command or with the kernel's jail. What has ended
is remembered, with its last screen, until its place is needed. It goes at the pace of the quickest
client; one that is slower is skipped forward to the screen, and one that has stopped to read holds
it for `_STALLED_S` at most. Without clients it goes on as if all were read.
"""

import asyncio
import builtins
import logging
import secrets
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from sbx import errors
from sbx.aio import run_to_completion
from sbx.kernels import frames
from sbx.kernels.command import KernelDied, TerminalCommand
from sbx.policy import Policy
from sbx.protocol.terminals import (
    CLIENTS_MAX,
    TERMINALS_MAX,
    TYPED_MAX,
    TerminalScreen,
    TerminalStatus,
    check_size,
)
from sbx.runtime.processes.terminal_screen import ScreenBuffer
from sbx.runtime.run import checks, termination
from sbx.runtime.run.context import Context

_log = logging.getLogger(__name__)
_QUEUE_MAX = 1 << 20  # bytes that wait for one client
_FULL = _QUEUE_MAX // 2
_PIECE = 64 << 10
_STALLED_S = 2.0
_SKIP_S = 0.25  # between two screens for one who is too slow: each may cost a second of CPU
_TOOK = 64 << 10  # bytes after which the other side is told that they were taken
_RATE = 32 << 20  # bytes in a second, of one terminal
_TYPING_S = 10.0
_HANGUP_S = 1.0
_JOBS_S = 0.05  # after the leader has gone, for its jobs
_KILLED_S = 5.0
_REST_S = 2.0
_SHOWN_MAX = 2000
_ENVIRONMENT = {"TERM": "xterm-256color"}


class TerminalClient:
    """One client of a terminal, until it leaves. `async for piece in attached` ends with the
    terminal."""

    def __init__(self, terminal: "Terminal") -> None:
        self._terminal = terminal
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._seen = False
        self._behind = True
        self._left = False
        self._something = asyncio.Event()

    async def read(self) -> bytes:
        """What is to be shown next: first the screen as it is, then what is written; nothing once
        the terminal has ended and all of it was told. One reader at a time."""
        while not self._left:
            if self._behind:
                if data := await self._caught_up():
                    return data
            elif self._pieces:
                return self._next()
            elif not self._terminal.running:
                return b""
            else:
                self._something.clear()
                await self._something.wait()
        return b""

    async def write(self, data: bytes) -> None:
        """Type these bytes. Waits while nobody inside reads; after 10 s of that raises Conflict
        `terminal_not_read`. What is typed at a terminal that has ended is lost."""
        await self._terminal.write(data)

    @property
    def ended(self) -> tuple[int | None, str] | None:
        """The exit code of a terminal that has ended, and why there is none."""
        now = self._terminal.now()
        return None if now.running else (now.exit_code, now.reason)

    async def resize(self, rows: int, columns: int) -> None:
        """As `Terminal.resize`: there is one size for all clients."""
        await self._terminal.resize(rows, columns)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if data := await self.read():
            return data
        raise StopAsyncIteration

    @property
    def full(self) -> bool:
        """Whether it has to read before it gets more."""
        return self._held >= _FULL

    @property
    def behind(self) -> bool:
        """Whether it will be told the screen, and nothing that is written until then."""
        return self._behind

    def put(self, data: bytes) -> None:
        """This was written."""
        if self._behind:
            return
        if self._held + len(data) > _QUEUE_MAX:
            self.skip()
            return
        self._pieces.append(data)
        self._held += len(data)
        self._something.set()

    def skip(self) -> None:
        """Forget what it did not read: it gets the screen instead."""
        self._pieces.clear()
        self._held = 0
        self._behind = True
        self._something.set()

    def wake(self) -> None:
        """Something about the terminal is new."""
        self._something.set()

    def leave(self) -> None:
        """It reads no more."""
        self._left = True
        self._something.set()

    async def _caught_up(self) -> bytes:
        screen = self._terminal.shows
        if self._seen:
            await asyncio.sleep(_SKIP_S)
            data, _ = await screen.drawn()
        else:
            data = await screen.told()
        self._seen, self._behind = True, False
        return data

    def _next(self) -> bytes:
        taken = [self._pieces.popleft()]
        size = len(taken[0])
        while self._pieces and size + len(self._pieces[0]) <= _PIECE:
            taken.append(self._pieces.popleft())
            size += len(taken[-1])
        self._held -= size
        self._terminal.drained()
        return b"".join(taken) if len(taken) > 1 else taken[0]


class Terminal:
    """One terminal, by its id."""

    def __init__(
        self,
        name: str,
        asked: str | None,
        command: TerminalCommand,
        context: Context,
        size: tuple[int, int],
        drawing: asyncio.Lock,
    ) -> None:
        self.id = name
        self.shows = ScreenBuffer(*size, drawing)
        self._asked = asked if asked is None else asked[:_SHOWN_MAX]
        self._command = command
        self._context = context
        self._created_at = time.time()
        self._clients: set[TerminalClient] = set()
        self._drained = asyncio.Event()
        self._ended: tuple[int | None, str] | None = None
        self._untold = 0
        self._next_at = 0.0
        self._resting: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._follow())

    @property
    def running(self) -> bool:
        """Whether its command has not ended."""
        return self._ended is None

    @property
    def attached(self) -> int:
        """How many clients it has."""
        return len(self._clients)

    async def status(self) -> TerminalStatus:
        """How it is now."""
        return self.now()

    def now(self) -> TerminalStatus:
        """As `status`, at once."""
        rows, columns = self.shows.size
        code, reason = self._ended or (None, "")
        return TerminalStatus(
            id=self.id,
            command=self._asked,
            rows=rows,
            columns=columns,
            running=self.running,
            created_at=self._created_at,
            attached=self.attached,
            exit_code=code,
            reason=reason,
        )

    @asynccontextmanager
    async def attach(self) -> AsyncIterator[TerminalClient]:
        """Come to it as a client. Raises Conflict `too_many_clients`."""
        if len(self._clients) >= CLIENTS_MAX:
            raise errors.Conflict(
                f"{CLIENTS_MAX} clients are attached to this terminal already",
                code="too_many_clients",
                hint="detach one of them",
                details={"limit": CLIENTS_MAX},
            )
        client = TerminalClient(self)
        self._clients.add(client)
        self._stirs()
        try:
            yield client
        finally:
            client.leave()
            self._clients.discard(client)
            self.drained()

    async def screen(self) -> TerminalScreen:
        """What it shows now, or showed last."""
        _, shown = await self.shows.drawn()
        return shown

    async def write(self, data: bytes) -> None:
        """Type these bytes, attached or not; see `TerminalClient.write`."""
        try:
            async with asyncio.timeout(_TYPING_S):
                for start in range(0, len(data), TYPED_MAX):
                    if not self.running:
                        return
                    self._stirs()
                    await self._command.type(data[start : start + TYPED_MAX])
        except TimeoutError:
            raise errors.Conflict(
                "what was typed is not read inside",
                code="terminal_not_read",
                hint="interrupt what runs there, or put the data in a file",
            ) from None

    async def resize(self, rows: int, columns: int) -> None:
        """Give it another size, of which linux tells whoever runs there. Raises BadRequest
        `invalid_size`."""
        check_size(rows, columns)
        if self.running and (rows, columns) != self.shows.size:
            self.shows.resize(rows, columns)
            await self._command.resize(rows, columns)

    async def close(self) -> None:
        """Hang up, and kill what is left of its session after a second. Once begun it is done to
        its end; what has ended already stays as it is."""
        await run_to_completion(self._close())

    async def _close(self) -> None:
        if not self.running:
            return
        await self._command.hang_up()
        await asyncio.wait([self._task], timeout=_HANGUP_S)
        await asyncio.sleep(_JOBS_S)
        await self._command.signal(signal.SIGKILL)  # also to what ignores a hang-up
        await asyncio.wait([self._task], timeout=_KILLED_S)

    async def ended(self) -> None:
        """Wait for its end."""
        await asyncio.wait([self._task])

    def drained(self) -> None:
        """A client has read, or left."""
        self._drained.set()

    async def _follow(self) -> None:
        """Carry what it writes to all clients, until it has ended."""
        try:
            self._ended = await self._carried()
        except Exception as error:  # noqa: BLE001  # the border of a background task
            _log.error("a terminal was lost by sbx itself", exc_info=error)
            self._ended = None, f"sbx itself failed: {error!r}"
        finally:
            self._ended = self._ended or (None, "the sandbox was closed")
            if self._resting is not None:
                self._resting.cancel()
                self._rests()
            for client in self._clients:
                client.wake()

    async def _carried(self) -> tuple[int | None, str]:
        while True:
            try:
                told = await self._command.read()
            except KernelDied:
                return None, "its kernel ended"
            if isinstance(told, frames.Exited):
                code = None if told.error is not None else termination.exit_code(told)
                return code, told.error or ""
            self._stirs()
            self.shows.add(told.data)
            for client in self._clients:
                client.put(told.data)
            await self._room()
            await self._took(len(told.data))

    def _stirs(self) -> None:
        """From now on its kernel makes no room for others, and its files are looked at: as long as
        anybody is attached, or anything is written or typed."""
        if self._resting is None and self.running:
            self._context.background_began()
            self._rest_later()

    def _rest_later(self) -> None:
        self._resting = asyncio.get_running_loop().call_later(_REST_S, self._rests)

    def _rests(self) -> None:
        if self.running and (self._clients or self._command.busy):
            self._rest_later()
            return
        self._resting = None
        self._context.background_ended()

    async def _room(self) -> None:
        """Wait for the quickest client, as long as it reads at all."""
        while True:
            current = [client for client in self._clients if not client.behind]
            if not current or not all(client.full for client in current):
                return
            self._drained.clear()
            try:
                async with asyncio.timeout(_STALLED_S):
                    await self._drained.wait()
            except TimeoutError:
                for client in current:
                    client.skip()
                return

    async def _took(self, size: int) -> None:
        """Give credit for as much again, and not faster than `_RATE`: others use this loop, too."""
        self._untold += size
        if self._untold < _TOOK:
            return
        taken, self._untold = self._untold, 0
        now = time.monotonic()
        self._next_at = max(now, self._next_at) + taken / _RATE
        if self._next_at - now > 0.02:
            await asyncio.sleep(self._next_at - now)
        await self._command.took(taken)


class Terminals:
    """See the module. Its methods may be called concurrently from one event loop."""

    def __init__(self, policy: Policy, context: Context) -> None:
        """They run in the jail of `context`."""
        self._policy = policy
        self._context = context
        self._terminals: dict[str, Terminal] = {}  # the oldest first
        self._drawing = asyncio.Lock()  # a conversation waits for its own screens first
        self._opening = 0

    @property
    def attached(self) -> int:
        """How many clients there are, on all of them."""
        return sum(terminal.attached for terminal in self._terminals.values())

    async def open(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        """A new terminal with a shell, or with `/bin/bash -c command`; the kernel is started where
        there is none.

        Raises Denied where the policy offers no shell or no processes, BadRequest, TooLarge,
        Closed, Conflict `too_many_terminals`, and what starting a kernel raises.
        """
        directory, variables = checks.check_shell(self._policy, command, cwd, env)
        check_size(rows, columns)
        argv = ["/bin/bash"] if command is None else ["/bin/bash", "-c", "--", command]
        self._context.check_open()
        self._make_room()
        self._opening += 1
        try:
            kernel, _ = await self._context.ready()
            process = await kernel.spawn_at_terminal(
                argv, directory, {**_ENVIRONMENT, **variables}, rows, columns
            )
        finally:
            self._opening -= 1
        name = f"term-{secrets.token_hex(6)}"
        made = Terminal(name, command, process, self._context, (rows, columns), self._drawing)
        self._terminals[name] = made
        return made

    async def get(self, terminal_id: str) -> Terminal:
        """A terminal by its id. Raises NotFound, Closed."""
        self._context.check_open()
        if (found := self._terminals.get(terminal_id)) is None:
            raise errors.NotFound(
                f"there is no terminal {terminal_id[:80]!r}",
                hint="list them, or open one",
            )
        return found

    async def list(self) -> builtins.list[Terminal]:
        """Those that run and those that ended, the oldest first. Raises Closed."""
        self._context.check_open()
        return [*self._terminals.values()]

    async def close(self, terminal_id: str) -> None:
        """End it as `Terminal.close` does, and forget it. Raises NotFound, Closed."""
        terminal = await self.get(terminal_id)
        await terminal.close()
        self._terminals.pop(terminal_id, None)

    async def end(self) -> None:
        """Wait until all have ended; to be called once the context is closed."""
        for terminal in self._terminals.values():
            await terminal.ended()

    def _make_room(self) -> None:
        for name, terminal in builtins.list(self._terminals.items()):
            if len(self._terminals) + self._opening < TERMINALS_MAX:
                return
            if not terminal.running and not terminal.attached:
                del self._terminals[name]
        if len(self._terminals) + self._opening >= TERMINALS_MAX:
            raise errors.Conflict(
                f"a conversation has at most {TERMINALS_MAX} terminals",
                code="too_many_terminals",
                hint="close one that is not needed any more",
                details={"limit": TERMINALS_MAX},
            )
