"""What signals do to a command that serves or drives an agent: it ends in order, with all it holds.

A signal that our parent made us ignore stays ignored, see nohup(1).
"""

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sbx.cli.exits import Stopped

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """`with Ending() as ending`: a signal cancels the task that entered it, and is raised from here
    as Stopped; the next one kills.

    `on_interrupt` is what the next Ctrl-C does instead, once.
    """

    def __init__(self) -> None:
        self.on_interrupt: Callable[[], object] | None = None
        self.received: signal.Signals | None = None
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._handled = [one for one in _ENDS if signal.getsignal(one) is not signal.SIG_IGN]
        for one in self._handled:
            self._loop.add_signal_handler(one, self._end, one)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if self.received is not None and isinstance(error, asyncio.CancelledError):
            raise Stopped(self.received, f"ended by {self.received.name}") from None

    def _end(self, number: signal.Signals) -> None:
        act, self.on_interrupt = self.on_interrupt, None
        if number == signal.SIGINT and act is not None:
            act()
            return
        self.received = number
        self._leave()
        if self._main is not None:
            self._main.cancel()

    def _leave(self) -> None:
        for one in self._handled:
            self._loop.remove_signal_handler(one)
        self._handled = []
