"""Notice a child process that hangs: one that lives, keeps its socket open and answers nothing.

A ping every `EVERY_S` has `ANSWER_S`. Two requests in a row, pings or others, without an answer and
with nothing heard of the process meanwhile, make it silent.

The times are for a busy machine. The broker answers a ping within a millisecond, and its longest
step takes about a second. While it works off a queue of orders in front of the ping, it answers
those, which counts. A process that is merely starved has to get no CPU at all for `ANSWER_S`, twice
in a row: Linux gives each of a hundred ready processes on one CPU a turn within a second. A
process that is stopped and continued meanwhile has lost nothing. A process that stays stopped is
noticed after 20 s to 30 s.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from sbx import errors

EVERY_S = 10.0
ANSWER_S = 10.0
SILENT_AFTER = 2
RETRY_AFTER_S = 10.0  # then the process answers again, or its service has started again


@dataclass(frozen=True, slots=True)
class Silence:
    """How many requests in a row had no answer. `since` is when the process was last heard, or when
    the last of these requests was given up, by the clock of the event loop."""

    unanswered: int = 0
    since: float = 0.0

    @property
    def is_over_limit(self) -> bool:
        return self.unanswered >= SILENT_AFTER


def answered(now: float) -> Silence:
    """Return the state after the process has sent something."""
    return Silence(0, now)


def unanswered(silence: Silence, sent_at: float, now: float) -> Silence:
    """Return the state after a request was given up. Requests that waited at the same time count
    once, and a request counts for nothing if the process has sent anything since."""
    if sent_at < silence.since:
        return silence
    return Silence(silence.unanswered + 1, now)


class Pulse:
    """Pings one process from `start` to `stop`, and calls `on_silent` once when it is silent.

    An error that `ping` raises is an answer, too.
    """

    def __init__(
        self, ping: Callable[[], Awaitable[object]], on_silent: Callable[[], object]
    ) -> None:
        self._ping = ping
        self._on_silent = on_silent
        self._silence = Silence()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.answered()
        context = contextvars.Context()  # a ping belongs to no request
        self._task = asyncio.create_task(self._run(), context=context)

    def stop(self) -> None:
        """Also from within `on_silent`."""
        task, self._task = self._task, None
        if task is not None:
            with suppress(RuntimeError):  # the loop may be closed when the process ends
                task.cancel()

    def answered(self) -> None:
        """Note a message of the process."""
        self._silence = answered(asyncio.get_running_loop().time())

    def unanswered(self, sent_at: float) -> None:
        if self._task is None:
            return
        now = asyncio.get_running_loop().time()
        self._silence = unanswered(self._silence, sent_at, now)
        if self._silence.is_over_limit:
            self.stop()
            self._on_silent()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0 if self._silence.unanswered else EVERY_S)
            sent_at = loop.time()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._ping()
            except TimeoutError:
                self.unanswered(sent_at)
            except (errors.SbxError, OSError):
                self.answered()
