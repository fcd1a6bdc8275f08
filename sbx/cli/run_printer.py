"""Follow a run: show its events, answer its questions, and end it on a signal."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from typing import NoReturn

from sbx.cli import terminal
from sbx.cli.exits import StoppedBySignal
from sbx.cli.output import Printer
from sbx.protocol.runs import Event, InputRequest, Run, RunEnd

_LAST_WORDS_S = 0.2


class RunPrinter:
    """Show the events of a run and read the answers to its questions.

    `read` returns one line of the answers, or `END_OF_INPUT`.
    """

    def __init__(
        self, face: Printer, read: Callable[[], Awaitable[str]] = terminal.read_line
    ) -> None:
        self._face = face
        self._read = read
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        self._answers: asyncio.Queue[str] = asyncio.Queue()

    async def follow(self, events: AsyncIterator[Event], answers: bool) -> Run:
        """Follow the run to its end. With `answers`, show each question and read its answer."""
        asking: asyncio.Task[None] | None = None
        try:
            async for event in events:
                if isinstance(event, InputRequest) and answers:
                    if asking is not None:
                        asking.cancel()
                    asking = asyncio.create_task(self._ask(event))
                    continue
                await self._show(event)
                if isinstance(event, RunEnd):
                    return event.run
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        raise AssertionError  # a stream ends with its RunEnd, or raises

    async def answer(self, _prompt: str = "") -> str:
        """Wait for the next answer and return it."""
        return await self._answers.get()

    async def written(self, timeout_s: float) -> bool:
        """Return whether the pending output is written, or has failed, within that time."""
        if self._writing is None:
            return True
        await asyncio.wait({self._writing}, timeout=timeout_s)
        return self._writing.done()

    async def _show(self, event: Event) -> None:
        """Write in a thread, so that a slow reader of stdout delays no deadline and no Ctrl-C."""
        async with self._turn:
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._face.show, event))
            await asyncio.shield(self._writing)

    async def _ask(self, question: InputRequest) -> None:
        """Show a question and read its answer.

        The core's callback must not do this: there, the prompt could overtake the output.
        """
        secret = question.password and os.isatty(terminal.STDIN)
        with terminal.hidden() if secret else nullcontext():
            await self._show(question)
            self._answers.put_nowait(await self._read())


async def leave(number: int, following: RunPrinter) -> NoReturn:
    """Raise Stopped for a signal that ended the command before there was a result."""
    if not await following.written(_LAST_WORDS_S):
        # The reader of stdout stopped reading without closing it, so the writing thread cannot be
        # stopped. All other resources are closed, so it is safe to exit here.
        os._exit(128 + number)
    raise StoppedBySignal(number, _words(number)) from None


def _words(number: int) -> str:
    if number == signal.SIGINT:
        return "interrupted before there was a result"
    return f"ended by {signal.Signals(number).name}"
