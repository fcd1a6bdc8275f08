"""A terminal: a command on a pty inside, and any number of clients on it.

    TerminalCommand ──► Terminal ──► ScreenBuffer (terminal_screen.py), for later clients
                           └───────► TerminalClient, one for each client: a bounded queue of bytes

A terminal outlives its clients, and ends with its command or with the jail. An ended terminal keeps
its last screen until its place is needed. The output has the pace of the quickest client. A slower
client skips forward to the screen, and one that stops to read delays the output for `_STALLED_S`.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from sbx import errors
from sbx.aio import run_to_completion
from sbx.kernels import frames
from sbx.kernels.command import KernelDied, TerminalCommand
from sbx.protocol.terminals import (
    CLIENTS_MAX,
    TYPED_MAX,
    TerminalScreen,
    TerminalStatus,
    check_size,
)
from sbx.runtime.processes.terminal_screen import ScreenBuffer
from sbx.runtime.run import termination
from sbx.runtime.run.context import Context

_log = logging.getLogger(__name__)
_QUEUE_MAX = 1 << 20  # bytes that wait for one client
_FULL = _QUEUE_MAX // 2
_PIECE = 64 << 10
_STALLED_S = 2.0
_SKIP_S = 0.25  # between two screens for a slow client: each may cost a second of CPU
_TOOK = 64 << 10  # bytes after which the jail gets credit for more
_RATE = 32 << 20  # bytes in a second, of one terminal
_TYPING_S = 10.0
_HANGUP_S = 1.0
_JOBS_S = 0.05  # for the jobs, after the end of the session leader
_KILLED_S = 5.0
_REST_S = 2.0
_SHOWN_MAX = 2000


class TerminalClient:
    """One client of a terminal. `async for piece in client` ends with the terminal."""

    def __init__(self, terminal: "Terminal") -> None:
        self._terminal = terminal
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._seen = False
        self._behind = True
        self._left = False
        self._changed = asyncio.Event()

    async def read(self) -> bytes:
        """Return the next output: first the screen, then the later output; at the end of the
        terminal nothing. One reader at a time."""
        while not self._left:
            if self._behind:
                if data := await self._caught_up():
                    return data
            elif self._pieces:
                return self._next()
            elif not self._terminal.running:
                return b""
            else:
                self._changed.clear()
                await self._changed.wait()
        return b""

    async def write(self, data: bytes) -> None:
        """Type these bytes. Wait until the command reads them, for 10 s; then raise Conflict
        `terminal_not_read`. Bytes for an ended terminal are lost."""
        await self._terminal.write(data)

    @property
    def ended(self) -> tuple[int | None, str] | None:
        """The exit code of an ended terminal, or the reason why it has none."""
        now = self._terminal.now()
        return None if now.running else (now.exit_code, now.reason)

    async def resize(self, rows: int, columns: int) -> None:
        """Do the same as `Terminal.resize`: all clients share one size."""
        await self._terminal.resize(rows, columns)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if data := await self.read():
            return data
        raise StopAsyncIteration

    @property
    def full(self) -> bool:
        """Whether it must read before it gets more."""
        return self._size >= _FULL

    @property
    def behind(self) -> bool:
        """Whether it gets the screen next, instead of the output until then."""
        return self._behind

    def put(self, data: bytes) -> None:
        if self._behind:
            return
        if self._size + len(data) > _QUEUE_MAX:
            self.skip()
            return
        self._pieces.append(data)
        self._size += len(data)
        self._changed.set()

    def skip(self) -> None:
        """Drop the unread output: the client gets the screen instead."""
        self._pieces.clear()
        self._size = 0
        self._behind = True
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    def leave(self) -> None:
        self._left = True
        self._changed.set()

    async def _caught_up(self) -> bytes:
        screen = self._terminal.shows
        if self._seen:
            await asyncio.sleep(_SKIP_S)
            data, _ = await screen.drawn()
        else:
            data = await screen.restored()
        self._seen, self._behind = True, False
        return data

    def _next(self) -> bytes:
        taken = [self._pieces.popleft()]
        size = len(taken[0])
        while self._pieces and size + len(self._pieces[0]) <= _PIECE:
            taken.append(self._pieces.popleft())
            size += len(taken[-1])
        self._size -= size
        self._terminal.drained()
        return b"".join(taken) if len(taken) > 1 else taken[0]


class Terminal:
    """One terminal, by its id."""

    def __init__(
        self,
        name: str,
        text: str | None,
        command: TerminalCommand,
        context: Context,
        size: tuple[int, int],
        drawing: asyncio.Lock,
    ) -> None:
        self.id = name
        self.shows = ScreenBuffer(*size, drawing)
        self._text = text if text is None else text[:_SHOWN_MAX]
        self._command = command
        self._context = context
        self._created_at = time.time()
        self._clients: set[TerminalClient] = set()
        self._drained = asyncio.Event()
        self._ended: tuple[int | None, str] | None = None
        self._uncredited = 0
        self._next_at = 0.0
        self._resting: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._follow())

    @property
    def running(self) -> bool:
        return self._ended is None

    @property
    def attached(self) -> int:
        return len(self._clients)

    async def status(self) -> TerminalStatus:
        return self.now()

    def now(self) -> TerminalStatus:
        """Return the status synchronously."""
        rows, columns = self.shows.size
        code, reason = self._ended or (None, "")
        return TerminalStatus(
            id=self.id,
            command=self._text,
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
        """Attach a client. Raise Conflict `too_many_clients`."""
        if len(self._clients) >= CLIENTS_MAX:
            raise errors.Conflict(
                f"{CLIENTS_MAX} clients are attached to this terminal already",
                code="too_many_clients",
                hint="detach one of them",
                details={"limit": CLIENTS_MAX},
            )
        client = TerminalClient(self)
        self._clients.add(client)
        self._note_use()
        try:
            yield client
        finally:
            client.leave()
            self._clients.discard(client)
            self.drained()

    async def screen(self) -> TerminalScreen:
        """Return the screen; of an ended terminal the last one."""
        _, shown = await self.shows.drawn()
        return shown

    async def write(self, data: bytes) -> None:
        """Type these bytes, as `TerminalClient.write`."""
        try:
            async with asyncio.timeout(_TYPING_S):
                for start in range(0, len(data), TYPED_MAX):
                    if not self.running:
                        return
                    self._note_use()
                    await self._command.feed(data[start : start + TYPED_MAX])
        except TimeoutError:
            raise errors.Conflict(
                "the command does not read its input",
                code="terminal_not_read",
                hint="interrupt the command, or put the data in a file",
            ) from None

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size; Linux signals it to the command. Raise BadRequest `invalid_size`."""
        check_size(rows, columns)
        if self.running and (rows, columns) != self.shows.size:
            self.shows.resize(rows, columns)
            await self._command.resize(rows, columns)

    async def close(self) -> None:
        """Hang up, and kill the rest of the session after a second. A cancelled call still
        completes. An ended terminal stays as it is."""
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
        await asyncio.wait([self._task])

    def drained(self) -> None:
        """Continue the output: a client has read, or left."""
        self._drained.set()

    async def _follow(self) -> None:
        """Send the output to all clients, until the end of the terminal."""
        try:
            self._ended = await self._carried()
        except Exception as error:  # noqa: BLE001  # the border of a background task
            _log.error("a terminal was lost by sbx itself", exc_info=error)
            self._ended = None, f"sbx itself failed: {error!r}"
        finally:
            self._ended = self._ended or (None, "the sandbox was closed")
            if self._resting is not None:
                self._resting.cancel()
                self._on_rest()
            for client in self._clients:
                client.wake()

    async def _carried(self) -> tuple[int | None, str]:
        while True:
            try:
                frame = await self._command.read()
            except KernelDied:
                return None, "its kernel ended"
            if isinstance(frame, frames.Exited):
                code = None if frame.error is not None else termination.exit_code(frame)
                return code, frame.error or ""
            self._note_use()
            self.shows.add(frame.data)
            for client in self._clients:
                client.put(frame.data)
            await self._room()
            await self._took(len(frame.data))

    def _note_use(self) -> None:
        """Keep the kernel, and watch its disk, while a client is attached and for a while after
        each output or input."""
        if self._resting is None and self.running:
            self._context.background_began()
            self._rest_later()

    def _rest_later(self) -> None:
        self._resting = asyncio.get_running_loop().call_later(_REST_S, self._on_rest)

    def _on_rest(self) -> None:
        if self.running and (self._clients or self._command.busy):
            self._rest_later()
            return
        self._resting = None
        self._context.background_ended()

    async def _room(self) -> None:
        """Wait for the quickest client, for at most `_STALLED_S`."""
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
        """Give credit for more output, at most at `_RATE`: others use this loop too."""
        self._uncredited += size
        if self._uncredited < _TOOK:
            return
        taken, self._uncredited = self._uncredited, 0
        now = time.monotonic()
        self._next_at = max(now, self._next_at) + taken / _RATE
        if self._next_at - now > 0.02:
            await asyncio.sleep(self._next_at - now)
        await self._command.took(taken)
