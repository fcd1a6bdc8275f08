"""The caller at a terminal of a sandbox: his keys go in, what is written comes out, until one of
them ends it."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sbx.cli import exits
from sbx.cli.own_terminal import OwnTerminal
from sbx.cli.sieve import Sieve
from sbx.cli.terminal import STDIN, STDOUT
from sbx.errors import SbxError

_TYPED = 4096
_LAST_S = 1.0
_AT_ONCE = 4096  # bytes that a terminal takes without making anybody wait


class _Attached(Protocol):
    @property
    def ended(self) -> tuple[int | None, str] | None: ...
    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def resize(self, rows: int, columns: int) -> None: ...


class _Terminal(Protocol):
    def attach(self) -> AbstractAsyncContextManager[Any]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it came to its end: the caller left, or what ran there ended."""

    detached: bool = False
    exit_code: int | None = None
    reason: str = ""


async def sit(terminal: _Terminal, own: OwnTerminal, leaves: int | None) -> Outcome:
    """Attach until the end; `leaves` is the key that detaches. The caller's terminal is as it was
    when this returns or raises. Raises Stopped for a signal, Unavailable `connection_lost`."""
    try:
        async with terminal.attach() as client:
            seat = _Seat(client, own, leaves)
            await client.resize(*own.size)
            with _signals(seat):
                own.raw()
                return await seat.stay()
    finally:
        own.restore()


class _Seat:
    def __init__(self, client: _Attached, own: OwnTerminal, leaves: int | None) -> None:
        self._client = client
        self._own = own
        self._leaves = leaves
        self._sieve = Sieve()
        self._stopped: int | None = None
        self._sized = asyncio.Event()
        self._tasks: set[asyncio.Task[Outcome]] = set()

    async def stay(self) -> Outcome:
        """Show and type until one of both is over."""
        works = (self._shows(), self._types(), self._resizes())
        self._tasks = {asyncio.create_task(work) for work in works}
        if self._stopped is not None:  # before there was anything to stop
            self.stop(self._stopped)
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        if self._stopped is not None:
            raise exits.Stopped(self._stopped, f"ended by {signal.Signals(self._stopped).name}")
        return _first(done)

    def stop(self, number: int) -> None:
        """A signal asks for the end."""
        self._stopped = self._stopped or number
        for task in self._tasks:
            task.cancel()

    def resized(self) -> None:
        """The caller's terminal has another size."""
        self._sized.set()

    def resumed(self) -> None:
        """This process was stopped; the shell that did it has set its own modes."""
        self._own.raw()
        self._sized.set()

    async def _shows(self) -> Outcome:
        while data := await self._client.read():
            try:
                await _show(self._sieve.feed(data))
            except OSError:  # the caller's terminal is gone
                return Outcome(detached=True)
        code, reason = self._client.ended or (None, "")
        return Outcome(exit_code=code, reason=reason)

    async def _types(self) -> Outcome:
        while data := await _typed():
            if self._leaves is not None and (at := data.find(self._leaves)) >= 0:
                await self._client.write(data[:at])
                return Outcome(detached=True)
            await self._client.write(data)
        return Outcome(detached=True)  # the caller's terminal is gone

    async def _resizes(self) -> Outcome:
        while True:
            await self._sized.wait()
            self._sized.clear()
            await self._client.resize(*self._own.size)


def _first(done: set[asyncio.Task[Outcome]]) -> Outcome:
    """What ended by itself; else the first error."""
    failed: BaseException | None = None
    for task in done:
        if task.cancelled():
            continue
        if (error := task.exception()) is None:
            return task.result()
        failed = failed or error
    raise failed or SbxError("the terminal was left")


@contextmanager
def _signals(seat: _Seat) -> Iterator[None]:
    """A signal that our parent made us ignore stays ignored, see nohup(1)."""
    loop = asyncio.get_running_loop()
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number in handled:
        loop.add_signal_handler(number, seat.stop, number)
    loop.add_signal_handler(signal.SIGWINCH, seat.resized)
    loop.add_signal_handler(signal.SIGCONT, seat.resumed)
    try:
        yield
    finally:
        for number in (*handled, signal.SIGWINCH, signal.SIGCONT):
            loop.remove_signal_handler(number)


async def _typed() -> bytes:
    """What was typed; nothing once the caller's terminal is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(STDIN, readable.set)
    try:
        await readable.wait()
        return os.read(STDIN, _TYPED)
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
        await asyncio.wait([writing], timeout=_LAST_S)  # not into what is restored meanwhile
        raise


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(STDOUT, left) :]
