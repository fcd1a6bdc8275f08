"""Run code once in a new sandbox: create it, copy the uploads, follow the run, clean up."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from sbx.cli import report
from sbx.cli.figures import Figures
from sbx.cli.output import Printer
from sbx.cli.quarantine import offer
from sbx.cli.run_printer import RunPrinter, leave
from sbx.policy import reference
from sbx.protocol.languages import Language
from sbx.protocol.runs import Event, Run
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox
from sbx.runtime.settings import Settings
from sbx.workspace import quarantine

_GRACE_S = 0.4  # from Ctrl-C to SIGKILL: the jail must be gone within a second
_KILLED_S = 0.5  # from SIGKILL until the command stops waiting for the run's last event


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `sbx run`."""

    code: str
    shell: bool
    policy: str
    timeout_s: float | None
    language: Language | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    upload: tuple[Path, ...] = ()
    uploads: Path | None = None
    workspace: Path | None = None
    figures: Path | None = None
    answers: bool = False
    asks: bool = False


async def run_once(request: RunOptions, face: Printer) -> Run:
    """Run a request.

    Raise every SbxError of the core, Stopped for a signal before there was a result, and
    ReaderGone.
    """
    stopping = SignalHandler()
    following = RunPrinter(face)
    try:
        with ExitStack() as stack:
            figures = None
            if request.figures is not None:  # open it before code inside can replace it
                figures = stack.enter_context(closing(Figures(request.figures)))
            # A zygote pays off from the second kernel on. This runtime starts a single kernel.
            settings = Settings(fast_path=False)
            async with Runtime(settings) as runtime:
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
                    run = await following.follow(_events(box, request, following), request.answers)
            if request.asks and run.quarantined and box.policy.host_executables == "ask":
                store = settings.protection.quarantines
                offer([quarantine.get(store, item.id)[0] for item in run.quarantined], store)
            for path in figures.save(run) if figures is not None else ():
                report.note(f"figure: {path}")
            return run
    except asyncio.CancelledError:
        if stopping.signal is None:
            raise
        await leave(stopping.signal, following)


class SignalHandler:
    """Signal handling for the run.

    The first Ctrl-C interrupts the cell, and kills it if it continues. The second Ctrl-C kills at
    once. SIGTERM and SIGHUP kill. A signal that is already ignored stays ignored, see
    nohup(1).
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
        """Ignore signals from now on: the cleanup has started and must not be interrupted."""
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
            await box.stop()  # the run ends as interrupted, with its output so far
            await asyncio.sleep(_KILLED_S)
        self._cancel()

    def _cancel(self) -> None:
        if self._main is not None and not self._main.cancelling():
            self._main.cancel()


def _events(box: AsyncSandbox, request: RunOptions, following: RunPrinter) -> AsyncIterator[Event]:
    if request.language is not None:
        return box.stream_script(
            request.code, request.language, args=request.args, timeout=request.timeout_s
        )
    if request.shell:
        return box.stream_shell(request.code, timeout=request.timeout_s)
    on_input = following.answer if request.answers else None
    return box.stream(request.code, timeout=request.timeout_s, on_input=on_input)
