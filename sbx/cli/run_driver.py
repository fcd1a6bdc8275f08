"""One run in a sandbox of the service: start it, follow it, and handle signals."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from sbx.cli import terminal
from sbx.cli.output import Printer
from sbx.cli.run_printer import RunPrinter, leave
from sbx.client import Client
from sbx.client.contexts import RemoteContext
from sbx.client.conversation import RemoteConversation
from sbx.client.runs import RemoteRun
from sbx.errors import NotFound, SbxError
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.languages import Language
from sbx.protocol.runs import Run

_GRACE_S = 2.0  # the time for the service to react to a signal


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The options of `sbx exec`."""

    sandbox_id: str
    conversation: str
    code: str
    shell: bool
    timeout_s: float | None
    context: str = DEFAULT_CONTEXT
    language: Language | None = None
    args: tuple[str, ...] = ()
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    answers: bool = False

    async def run(self, client: Client, face: Printer) -> Run:
        """Run the code and show its events.

        Raise Stopped for a signal before there was a result, ReaderGone, and the errors of the
        service.
        """
        typed = os.isatty(terminal.STDIN)
        read = terminal.read_line if typed else terminal.InputLines().read_line
        following = RunPrinter(face, read)
        where = await self._where(client)
        run = self._begin(where, following)
        with closing(_Signals(where, run)) as signals:
            try:
                return await following.follow(run.events(), self.answers)
            except asyncio.CancelledError:
                if signals.received is None:
                    raise
                await leave(signals.received, following)

    async def _where(self, client: Client) -> RemoteConversation | RemoteContext:
        """Return the conversation or the context of the run. Create a missing context."""
        conversation = client.sandbox(self.sandbox_id).conversation(self.conversation)
        if self.context == DEFAULT_CONTEXT:
            return conversation
        try:
            return await conversation.contexts.get(self.context)
        except NotFound:
            return await conversation.contexts.create(self.context)

    def _begin(self, where: RemoteConversation | RemoteContext, following: RunPrinter) -> RemoteRun:
        if self.language is not None:
            # `execute` rejects a script with a context.
            assert isinstance(where, RemoteConversation)
            return where.start_script(
                self.code,
                self.language,
                args=self.args,
                timeout=self.timeout_s,
                cwd=self.cwd,
                env=self.env,
                stdin=self.stdin,
            )
        if self.shell:
            return where.start_shell(
                self.code, timeout=self.timeout_s, cwd=self.cwd, env=self.env, stdin=self.stdin
            )
        on_input = following.answer if self.answers else None
        return where.start_run(self.code, timeout=self.timeout_s, on_input=on_input)


class _Signals:
    """Signal handling for the run.

    The first Ctrl-C interrupts the run, the second ends its kernel, and the third exits. SIGTERM
    and SIGHUP interrupt the run and exit. A signal that is already ignored stays ignored, see
    nohup(1).
    """

    def __init__(self, where: RemoteConversation | RemoteContext, run: RemoteRun) -> None:
        self.received: int | None = None
        self._where = where
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._acting: list[asyncio.Task[None]] = []
        self._handled = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in self._handled:
            self._loop.add_signal_handler(number, self._stop, number)

    def close(self) -> None:
        for number in self._handled:
            self._loop.remove_signal_handler(number)
        for task in self._acting:
            task.cancel()

    def _stop(self, number: int) -> None:
        self.received = self.received or number
        if number != signal.SIGINT:
            self._start_action(self._end(self._run.interrupt()))
        elif not self._acting:
            self._start_action(self._interrupt())
        elif len(self._acting) == 1:
            self._start_action(self._end(self._where.stop(), wait_s=_GRACE_S))
        else:
            self._cancel()

    def _start_action(self, work: Coroutine[None, None, None]) -> None:
        self._acting.append(self._loop.create_task(work))

    async def _interrupt(self) -> None:
        """Interrupt the run. Its end event then ends this command."""
        try:
            await self._run.interrupt()
        except SbxError:  # the service cannot interrupt the run
            self._cancel()

    async def _end(self, request: Coroutine[Any, Any, Any], wait_s: float = 0.0) -> None:
        with suppress(SbxError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await request
            await asyncio.sleep(wait_s)
        self._cancel()

    def _cancel(self) -> None:
        if self._main is not None and not self._main.cancelling():
            self._main.cancel()
