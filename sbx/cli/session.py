"""One sandbox for one run: start, put the uploads in, follow the run, leave nothing behind."""

import asyncio
import os
import signal
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from sbx.cli import report, terminal
from sbx.cli.exits import Stopped
from sbx.cli.figures import Figures
from sbx.cli.screen import Face
from sbx.policy import reference
from sbx.protocol.runs import Event, InputRequest, Run, RunEnd
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox

_GRACE_S = 0.4  # from Ctrl-C to SIGKILL: the jail is to be gone within a second
_KILLED_S = 0.5  # from there to giving up on the run's own last event
_LAST_WORDS_S = 0.2


@dataclass(frozen=True, slots=True)
class Request:
    """What `sbx run` was asked for."""

    code: str
    shell: bool
    policy: str
    timeout_s: float | None
    env: dict[str, str] = field(default_factory=dict)
    upload: tuple[Path, ...] = ()
    uploads: Path | None = None
    workspace: Path | None = None
    figures: Path | None = None
    answers: bool = False


async def run_once(request: Request, face: Face) -> Run:
    """Do it. Raises every SbxError of the core, Stopped for a signal before there was a result, and
    ReaderGone."""
    stopping = Stopping()
    following = _Following(face)
    try:
        with ExitStack() as held:
            figures = None
            if request.figures is not None:  # before any code could put something in its place
                figures = held.enter_context(closing(Figures(request.figures)))
            async with Runtime() as runtime:
                with closing(stopping):
                    box = await runtime.create(
                        reference(request.policy),
                        env=request.env,
                        workspace=request.workspace,
                        uploads=request.uploads,
                    )
                    for path in request.upload:
                        await box.uploads.put(path)
                    stopping.box = box
                    run = await following.follow(box, request)
            for path in figures.save(run) if figures is not None else ():
                report.note(f"figure: {path}")
            return run
    except asyncio.CancelledError:
        if stopping.signal is None:
            raise
        if not await following.written(_LAST_WORDS_S):
            # Whoever reads our output has stopped reading without closing it, and the thread that
            # writes cannot be called back. Everything else is closed: nothing is left to wait for.
            os._exit(128 + stopping.signal)
        raise Stopped(stopping.signal, _words(stopping.signal)) from None


class Stopping:
    """What signals do to the one run.

    The first Ctrl-C interrupts the cell, and kills it when it goes on; the second kills at once.
    SIGTERM and SIGHUP kill. A signal that our parent made us ignore stays ignored, see nohup(1).
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.box: AsyncSandbox | None = None
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._gentle: asyncio.Task[None] | None = None
        self._over = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._stop, number)

    def close(self) -> None:
        """From now on everything ends anyhow, and a signal is not to leave something behind."""
        self.box, self._over = None, True
        if self._gentle is not None:
            self._gentle.cancel()

    def _stop(self, number: int) -> None:
        if self._over:
            return
        first, self.signal = self.signal is None, self.signal or number
        if number != signal.SIGINT or self.box is None:
            self._cancel()
        elif first:
            self._gentle = self._loop.create_task(self._interrupt(self.box))
        elif self._gentle is not None:
            self._gentle.cancel()
            self._gentle = self._loop.create_task(self._kill(self.box))

    async def _interrupt(self, box: AsyncSandbox) -> None:
        if await box.interrupt():
            await asyncio.sleep(_GRACE_S)
        await self._kill(box)

    async def _kill(self, box: AsyncSandbox) -> None:
        if box.receipt is not None:
            await box.stop()  # the run ends as interrupted, with what it printed so far
            await asyncio.sleep(_KILLED_S)
        self._cancel()

    def _cancel(self) -> None:
        if self._main is not None and not self._main.cancelling():
            self._main.cancel()


class _Following:
    """Shows the events of a run and answers its questions."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        self._questions: asyncio.Queue[str] = asyncio.Queue()

    async def follow(self, box: AsyncSandbox, request: Request) -> Run:
        if request.shell:
            events = box.stream_shell(request.code, timeout=request.timeout_s)
        else:
            on_input = self._answer if request.answers else None
            events = box.stream(request.code, timeout=request.timeout_s, on_input=on_input)
        asking: asyncio.Task[None] | None = None
        try:
            async for event in events:
                if isinstance(event, InputRequest) and request.answers:
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

    async def written(self, timeout_s: float) -> bool:
        """Whether all that was to be shown is written within that time, or cannot be."""
        if self._writing is None:
            return True
        await asyncio.wait({self._writing}, timeout=timeout_s)
        return self._writing.done()

    async def _show(self, event: Event) -> None:
        """In a thread, so that a slow reader of our output delays no deadline and no Ctrl-C."""
        async with self._turn:
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._face.show, event))
            await asyncio.shield(self._writing)

    async def _ask(self, question: InputRequest) -> None:
        """Here and not where the core calls back: there, the prompt could overtake the output."""
        with terminal.hidden() if question.password else nullcontext():
            await self._show(question)
            self._questions.put_nowait(await terminal.read_line())

    async def _answer(self, _prompt: str) -> str:
        return await self._questions.get()


def _words(number: int) -> str:
    if number == signal.SIGINT:
        return "interrupted before there was a result"
    return f"ended by {signal.Signals(number).name}"
