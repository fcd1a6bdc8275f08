"""`input()` inside, answered by a function of the caller's."""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable

from sbx.kernels import frames
from sbx.kernels.kernel import Kernel, KernelDied

_log = logging.getLogger(__name__)
_AT_ONCE = 4  # each may cost a thread of the embedding program until it is answered

OnInput = Callable[[str], str | Awaitable[str]]


class InputRequests:
    """The questions of one run. `give_up` is called when the caller's function raises."""

    def __init__(
        self, kernel: Kernel, on_input: OnInput, give_up: Callable[[], Awaitable[object]]
    ) -> None:
        self._kernel = kernel
        self._on_input = on_input
        self._give_up = give_up
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, prompt: str) -> None:
        """Ask the caller, and go on meanwhile. Raises frames.Malformed for a kernel that asks
        again and again without waiting for an answer."""
        if len(self._asking) >= _AT_ONCE:
            raise frames.MalformedFrame("it asked for input again and again, unanswered")
        task = asyncio.create_task(self._answer(prompt))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def close(self) -> None:
        """The run is over: nobody waits for answers any more."""
        for task in self._asking:
            task.cancel()

    async def _answer(self, prompt: str) -> None:
        try:
            if inspect.iscoroutinefunction(self._on_input):
                line = await self._on_input(prompt)
            else:
                line = await _in_daemon_thread(self._on_input, prompt)
                if inspect.isawaitable(line):
                    line = await line
            await self._kernel.answer_input(str(line))
        except KernelDied:
            return
        except Exception:  # noqa: BLE001  # the border to the caller's own function
            _log.exception("on_input raised; the run is interrupted")
            await self._give_up()


async def _in_daemon_thread(ask: OnInput, prompt: str) -> str | Awaitable[str]:
    """A person may never answer: such a thread must not keep the program from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | Awaitable[str]] = loop.create_future()

    def settle(line: str | Awaitable[str], error: Exception | None) -> None:
        if answer.done():
            return
        answer.set_result(line) if error is None else answer.set_exception(error)

    def wait() -> None:
        line: str | Awaitable[str] = ""
        failed = None
        try:
            line = ask(prompt)
        except Exception as error:  # noqa: BLE001  # carried to the task that waits
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, line, failed)

    threading.Thread(target=wait, name="sbx-on-input", daemon=True).start()
    return await answer
