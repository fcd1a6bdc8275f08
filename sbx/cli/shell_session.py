"""Connect the user's terminal with a terminal of a sandbox, until one of them ends.

Typed keys go to the sandbox, and its output goes to the user's terminal.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbx.cli import exits
from sbx.cli.escape_filter import EscapeFilter
from sbx.cli.raw_tty import RawTty
from sbx.cli.signals import ENDS, handled
from sbx.cli.terminal import STDIN, STDOUT
from sbx.errors import SbxError

if TYPE_CHECKING:
    from sbx.client.terminal_socket import RemoteAttached
    from sbx.client.terminals import RemoteTerminal
    from sbx.runtime.processes.terminal import Terminal, TerminalClient

_TYPED_MAX = 4096
_LAST_S = 1.0
_AT_ONCE = 4096  # bytes that a terminal accepts without blocking


@dataclass(frozen=True, slots=True)
class ShellOutcome:
    """How the session ended: the user detached, or the command in the terminal ended."""

    detached: bool = False
    exit_code: int | None = None
    reason: str = ""


async def sit(
    terminal: "Terminal | RemoteTerminal", own: RawTty, leaves: int | None
) -> ShellOutcome:
    """Attach until the end. `leaves` is the key that detaches.

    The user's terminal is restored when this function returns or raises. Raise Stopped for a
    signal, and Unavailable `connection_lost`.
    """
    try:
        async with terminal.attach() as client:
            seat = TerminalSession(client, own, leaves)
            await client.resize(*own.size)
            with _signals(seat):
                own.raw()
                return await seat.stay()
    finally:
        own.restore()


class TerminalSession:
    def __init__(
        self, client: "TerminalClient | RemoteAttached", own: RawTty, leaves: int | None
    ) -> None:
        self._client = client
        self._own = own
        self._leaves = leaves
        self._sieve = EscapeFilter()
        self._stopped: int | None = None
        self._sized = asyncio.Event()
        self._tasks: set[asyncio.Task[ShellOutcome]] = set()

    async def stay(self) -> ShellOutcome:
        """Forward output and input until one of them ends."""
        works = (self._forward_output(), self._forward_input(), self._forward_sizes())
        self._tasks = {asyncio.create_task(work) for work in works}
        if self._stopped is not None:  # a signal arrived before the tasks started
            self.stop(self._stopped)
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        if self._stopped is not None:
            raise exits.StoppedBySignal(
                self._stopped, f"ended by {signal.Signals(self._stopped).name}"
            )
        return _first(done)

    def stop(self, number: int) -> None:
        """Stop because of a signal."""
        self._stopped = self._stopped or number
        for task in self._tasks:
            task.cancel()

    def resized(self) -> None:
        """Note that the user's terminal has a new size."""
        self._sized.set()

    def resumed(self) -> None:
        """Set raw mode again after SIGCONT: the shell has set its own modes in between."""
        self._own.raw()
        self._sized.set()

    async def _forward_output(self) -> ShellOutcome:
        while data := await self._client.read():
            try:
                await _show(self._sieve.feed(data))
            except OSError:  # the user's terminal is gone
                return ShellOutcome(detached=True)
        code, reason = self._client.ended or (None, "")
        return ShellOutcome(exit_code=code, reason=reason)

    async def _forward_input(self) -> ShellOutcome:
        while data := await _read_typed():
            if self._leaves is not None and (at := data.find(self._leaves)) >= 0:
                await self._client.write(data[:at])
                return ShellOutcome(detached=True)
            await self._client.write(data)
        return ShellOutcome(detached=True)  # the user's terminal is gone

    async def _forward_sizes(self) -> ShellOutcome:
        while True:
            await self._sized.wait()
            self._sized.clear()
            await self._client.resize(*self._own.size)


def _first(done: set[asyncio.Task[ShellOutcome]]) -> ShellOutcome:
    """Return the outcome of a task that ended by itself. Otherwise raise the first error."""
    failed: BaseException | None = None
    for task in done:
        if task.cancelled():
            continue
        if (error := task.exception()) is None:
            return task.result()
        failed = failed or error
    raise failed or SbxError("the terminal was closed")


@contextmanager
def _signals(seat: TerminalSession) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, seat.resized)
    loop.add_signal_handler(signal.SIGCONT, seat.resumed)
    try:
        with handled(seat.stop, (*ENDS, signal.SIGQUIT)):
            yield
    finally:
        for number in (signal.SIGWINCH, signal.SIGCONT):
            loop.remove_signal_handler(number)


async def _read_typed() -> bytes:
    """Wait for typed bytes and return them. Return b"" when the user's terminal is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(STDIN, readable.set)
    try:
        await readable.wait()
        return os.read(STDIN, _TYPED_MAX)
    except OSError:
        return b""
    finally:
        loop.remove_reader(STDIN)


async def _show(data: bytes) -> None:
    if len(data) <= _AT_ONCE:
        _write(data)
        return
    writing = asyncio.ensure_future(asyncio.to_thread(_write, data))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        # Do not write while the terminal is being restored.
        await asyncio.wait([writing], timeout=_LAST_S)
        raise


def _write(data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(STDOUT, remaining) :]
