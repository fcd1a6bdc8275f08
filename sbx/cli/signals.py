"""Signal handling for the commands that serve or drive an agent: end in order, and release every
resource.

A signal that is ignored at the start of this process stays ignored, see nohup(1).
"""

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sbx.cli.exits import StoppedBySignal

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """A context manager: `with Ending() as ending`.

    A signal cancels the task that entered the context, and the context raises it as Stopped. The
    next signal kills the process. If `on_interrupt` is set, the next Ctrl-C calls it once instead.
    """

    def __init__(self) -> None:
        self.on_interrupt: Callable[[], object] | None = None
        self.received: signal.Signals | None = None
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._handled = [
            number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in self._handled:
            self._loop.add_signal_handler(number, self._end, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if self.received is not None and isinstance(error, asyncio.CancelledError):
            raise StoppedBySignal(self.received, f"ended by {self.received.name}") from None

    def _end(self, number: signal.Signals) -> None:
        callback, self.on_interrupt = self.on_interrupt, None
        if number == signal.SIGINT and callback is not None:
            callback()
            return
        self.received = number
        self._leave()
        if self._main is not None:
            self._main.cancel()

    def _leave(self) -> None:
        for number in self._handled:
            self._loop.remove_signal_handler(number)
        self._handled = []
