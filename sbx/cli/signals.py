"""SIGINT, SIGTERM and SIGHUP in the event loop of a command: end in order, release every resource.

A signal that is ignored at the start of this process stays ignored, see nohup(1).
"""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from sbx.cli.exits import StoppedBySignal

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(
    on_signal: Callable[[signal.Signals], object], numbers: Sequence[signal.Signals] = ENDS
) -> Iterator[None]:
    """Call `on_signal` for each of these signals, until the context exits."""
    loop = asyncio.get_running_loop()
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class CancelOnSignal:
    """A context manager for the commands that serve or drive an agent.

    A signal cancels the task that entered the context, and the context raises it as
    StoppedBySignal. The next signal kills the process. If `on_interrupt` is set, the next Ctrl-C
    calls it once instead.
    """

    def __init__(self) -> None:
        self.on_interrupt: Callable[[], object] | None = None
        self.received: signal.Signals | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        self._main = asyncio.current_task()
        self._handlers.enter_context(handled(self._on_signal))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handlers.close()
        if self.received is not None and isinstance(error, asyncio.CancelledError):
            raise StoppedBySignal(self.received, f"ended by {self.received.name}") from None

    def _on_signal(self, number: signal.Signals) -> None:
        callback, self.on_interrupt = self.on_interrupt, None
        if number == signal.SIGINT and callback is not None:
            callback()
            return
        self.received = number
        self._handlers.close()
        if self._main is not None:
            self._main.cancel()
