"""Drive one run: start it, show its events, answer its questions, and handle signals."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sbx.cli import terminal
from sbx.cli.exits import StoppedBySignal
from sbx.cli.run_output import Printer
from sbx.cli.signals import handled
from sbx.errors import BadRequest, TooLarge
from sbx.protocol.languages import Language
from sbx.protocol.runs import STDIN_MAX, Event, InputRequest, Run, RunEnd

if TYPE_CHECKING:
    from sbx.client.contexts import RemoteContext
    from sbx.client.conversation import RemoteConversation
    from sbx.client.runs import RemoteRun
    from sbx.run_methods import RunCall
    from sbx.runtime.conversation import Conversation
    from sbx.runtime.run.active_run import ActiveRun

_LAST_WORDS_S = 0.2
_AS_FILE = "copy it in with sbx cp, or sbx run --upload, and let the command read the file"
_STDIN_MAX = 1 << 20  # the limit of a service, whose request has stdin in its JSON body

Step = Callable[[], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of `sbx run` or `sbx exec`. With `answers`, its questions are answered here. `file`:
    a program in Python, in place of the code."""

    code: str
    shell: bool
    language: Language | None
    args: tuple[str, ...]
    timeout_s: float | None
    answers: bool
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    file: "RunCall | None" = None

    def start(
        self, where: "Conversation | RemoteConversation | RemoteContext", printer: "RunPrinter"
    ) -> "ActiveRun | RemoteRun":
        if self.shell:
            return where.start_shell(
                self.code, timeout=self.timeout_s, cwd=self.cwd, env=self.env, stdin=self.stdin
            )
        on_input = printer.answer if self.answers else None
        if self.file is not None:
            return where.start_call(replace(self.file, timeout=self.timeout_s, on_input=on_input))
        if self.language is None:
            return where.start_run(self.code, timeout=self.timeout_s, on_input=on_input)
        if TYPE_CHECKING:  # `sbx exec` refuses a script with a context
            assert not isinstance(where, RemoteContext)
        return where.start_script(
            self.code,
            self.language,
            args=self.args,
            timeout=self.timeout_s,
            cwd=self.cwd,
            env=self.env,
            stdin=self.stdin,
        )


def reads_answers(from_stdin: bool, in_json: bool) -> bool:
    """Return whether questions of code are answered from stdin, which may have been the code. The
    JSON formats show no prompt at a terminal."""
    return not from_stdin and not (in_json and os.isatty(terminal.STDIN))


def stdin_of() -> str:
    """Return all of stdin as text, for a command or a script. Raise TooLarge, BadRequest."""
    data = sys.stdin.buffer.read(_STDIN_MAX + 1)
    if len(data) > _STDIN_MAX:
        raise TooLarge(
            f"stdin is longer than {_STDIN_MAX >> 20} MiB, the limit for a command",
            code="stdin_too_large",
            hint=_AS_FILE,
            details={"limit": _STDIN_MAX},
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadRequest("stdin is not UTF-8 text", hint=_AS_FILE) from None


def input_of_program() -> bytes | None:
    """Return all of stdin, for a program in Python; None at a terminal, where it asks. Raise
    TooLarge."""
    if os.isatty(terminal.STDIN):
        return None
    data = sys.stdin.buffer.read(STDIN_MAX + 1) if sys.stdin is not None else b""
    if len(data) > STDIN_MAX:
        raise TooLarge(
            f"stdin is longer than {STDIN_MAX >> 20} MiB, the limit for a program",
            code="stdin_too_large",
            hint=_AS_FILE,
            details={"limit": STDIN_MAX},
        )
    return data


class RunPrinter:
    """Show the events of a run and read the answers to its questions.

    The answers are the lines of stdin. After the last one, the code gets `EOFError`.
    """

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        is_typed = os.isatty(terminal.STDIN)
        self._read = terminal.read_line if is_typed else terminal.InputLines().read_line
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        self._answers: asyncio.Queue[str] = asyncio.Queue()

    async def follow(self, events: AsyncIterator[Event], *, answers: bool) -> Run:
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
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._printer.show, event))
            await asyncio.shield(self._writing)

    async def _ask(self, question: InputRequest) -> None:
        """Show a question and read its answer.

        The core's callback must not do this: there, the prompt could overtake the output.
        """
        secret = question.password and os.isatty(terminal.STDIN)
        with terminal.hidden() if secret else nullcontext():
            await self._show(question)
            self._answers.put_nowait(await self._read())


class SignalHandler:
    """The reactions to signals. At first, each signal cancels the command."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._main = asyncio.current_task()
        self._on_interrupt: list[Step] = []
        self._on_end: Step | None = None
        self._acting: asyncio.Task[None] | None = None
        self._ignored = False

    def react(self, on_interrupt: Iterable[Step], on_end: Step | None = None) -> None:
        """Take the next step of `on_interrupt` at each Ctrl-C, and cancel after the last one. At
        SIGTERM and SIGHUP, take the step `on_end`, or cancel."""
        self._on_interrupt, self._on_end = list(on_interrupt), on_end

    def ignore(self) -> None:
        """Ignore signals from now on: the run has ended, and the cleanup must be complete."""
        self._ignored = True
        if self._acting is not None:
            self._acting.cancel()

    def cancel(self) -> None:
        if self._main is not None and not self._main.cancelling():
            self._main.cancel()

    def on_signal(self, number: signal.Signals) -> None:
        if self._ignored:
            return
        self.received = self.received or number
        step = self._on_end
        if number == signal.SIGINT:
            step = self._on_interrupt.pop(0) if self._on_interrupt else None
        if self._acting is not None:
            self._acting.cancel()
        if step is None:
            self.cancel()
        else:
            self._acting = asyncio.get_running_loop().create_task(step())


@asynccontextmanager
async def signals_of(printer: RunPrinter) -> AsyncIterator[SignalHandler]:
    """Handle signals in the block. Raise StoppedBySignal if one cancels it before its result."""
    handler = SignalHandler()
    with handled(handler.on_signal):
        try:
            yield handler
        except asyncio.CancelledError:
            if (number := handler.received) is None:
                raise
            if not await printer.written(_LAST_WORDS_S):
                # The reader of stdout stopped reading without closing it, so the writing thread
                # cannot be stopped. All other resources are closed, so it is safe to exit here.
                os._exit(128 + number)
            raise StoppedBySignal(number, _sentence(number)) from None
        finally:
            handler.ignore()


def _sentence(number: signal.Signals) -> str:
    if number == signal.SIGINT:
        return "interrupted before there was a result"
    return f"ended by {number.name}"
