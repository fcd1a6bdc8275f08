"""The standard input of a command that was left open: fed by whoever started it, bounded."""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable

from sbx.errors import Conflict
from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied
from sbx.kernels.kernel import Kernel
from sbx.protocol.commands import STDIN_MAX
from sbx.runtime.run import checks

# `input()` inside, answered by a function of the caller's.
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


class Stdin:
    """Holds what is written before the command runs, and hands the rest on at once.

    What the command does not read is held for it inside, at most STDIN_MAX bytes: nothing here ever
    waits for it.
    """

    def __init__(self, early: str = "") -> None:
        """`early` is what the command reads first."""
        self._command: Command | None = None
        self._early: list[str | None] = [early] if early else []
        self._early_size = 0
        self._over = False

    @property
    def open(self) -> bool:
        """Whether it may be written to, as far as is known here."""
        return not self._over and (self._command is None or self._command.reads)

    async def write(self, text: str | None) -> None:
        """Feed it; None is its end. All of the text, or nothing where this raises.

        Raises Conflict `stdin_closed`, and `stdin_full` while the command does not read what it
        has; BadRequest `invalid_code`, TooLarge.
        """
        if text is not None:
            checks.check_text(text, "stdin", STDIN_MAX)
        if not self.open:
            raise Conflict(
                "the command reads no more: its standard input is closed", code="stdin_closed"
            )
        command = self._command
        held = self._early_size if command is None else command.unread
        size = 0 if text is None else len(text.encode())
        if held + size > STDIN_MAX:
            raise Conflict(
                f"the command has not read {held} bytes that it was given already",
                code="stdin_full",
                hint="write on once it reads, or put the data into a file of the workspace",
                details={"limit": STDIN_MAX, "unread": held},
            )
        if command is not None:
            await command.write(text)
            return
        self._early.append(text)
        self._early_size += size
        self._over = text is None

    async def attach(self, command: Command) -> None:
        """It runs: hand on what came before."""
        early, self._early = self._early, []
        self._over = False
        self._command = command
        for text in early:
            await command.write(text)

    def close(self) -> None:
        """The command has ended."""
        self._over = True
        self._early.clear()
