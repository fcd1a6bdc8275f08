"""The input of a run: the open standard input of a command, and the answers to `input()`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sbx.aio import call_in_daemon_thread
from sbx.errors import Conflict
from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied
from sbx.kernels.kernel import Kernel
from sbx.protocol.commands import STDIN_MAX
from sbx.run_methods import OnInput
from sbx.runtime.run import checks

_log = logging.getLogger(__name__)
_QUESTIONS_MAX = 4  # each may cost a thread of the embedding program until it is answered


class InputRequests:
    """The questions of one run. `give_up` is called if the function of the caller raises."""

    def __init__(
        self, kernel: Kernel, on_input: OnInput, give_up: Callable[[], Awaitable[object]]
    ) -> None:
        self._kernel = kernel
        self._on_input = on_input
        self._give_up = give_up
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, prompt: str) -> None:
        """Ask the caller, without a wait for the answer. Raise frames.MalformedFrame for a kernel
        that asks repeatedly without a wait for an answer."""
        if len(self._asking) >= _QUESTIONS_MAX:
            raise frames.MalformedFrame("it asked for input repeatedly, without an answer")
        task = asyncio.create_task(self._answer(prompt))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def close(self) -> None:
        for task in self._asking:
            task.cancel()

    async def _answer(self, prompt: str) -> None:
        try:
            line = await call_in_daemon_thread(self._on_input, prompt)
            await self._kernel.answer_input(str(line))
        except KernelDied:
            return
        except Exception:  # noqa: BLE001  # the border to the caller's own function
            _log.exception("on_input raised; the run is interrupted")
            await self._give_up()


async def write_stdin(stdin: "Stdin | None", name: str, text: str | None) -> None:
    """Write to the standard input of a command or run, as `Stdin.write`. Without one raise Conflict
    `stdin_closed`."""
    if stdin is None:
        raise Conflict(
            f"{name} has no open standard input",
            code="stdin_closed",
            hint="start a command with stdin_open=True, and write while it runs",
        )
    await stdin.write(text)


class Stdin:
    """Keeps the input that comes before the command runs, and passes later input on at once.

    The jail keeps up to STDIN_MAX bytes that the command has not read. No call waits for the
    command to read.
    """

    def __init__(self, early: str = "") -> None:
        """`early` is the first input of the command."""
        self._command: Command | None = None
        self._early: list[str | None] = [early] if early else []
        self._early_size = 0
        self._over = False

    @property
    def open(self) -> bool:
        """Whether it accepts input, as far as the host knows."""
        return not self._over and (self._command is None or self._command.reads)

    async def write(self, text: str | None) -> None:
        """Write all of the text, or nothing if this raises. None closes the input.

        Raise Conflict `stdin_closed`, and `stdin_full` while the command does not read its input;
        BadRequest `invalid_code`, TooLarge.
        """
        if text is not None:
            checks.check_text(text, "stdin", STDIN_MAX)
        if not self.open:
            raise Conflict("the standard input of the command is closed", code="stdin_closed")
        command = self._command
        unread = self._early_size if command is None else command.unread
        size = 0 if text is None else len(text.encode())
        if unread + size > STDIN_MAX:
            raise Conflict(
                f"the command has not read {unread} bytes of its input yet",
                code="stdin_full",
                hint="write again after it reads, or put the data into a file of the workspace",
                details={"limit": STDIN_MAX, "unread": unread},
            )
        if command is not None:
            await command.write(text)
            return
        self._early.append(text)
        self._early_size += size
        self._over = text is None

    async def attach(self, command: Command) -> None:
        """Pass the earlier input on to the command, which runs now."""
        early, self._early = self._early, []
        self._over = False
        self._command = command
        for text in early:
            await command.write(text)

    def close(self) -> None:
        """Refuse further input: the command has ended."""
        self._over = True
        self._early.clear()
