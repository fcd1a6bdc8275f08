"""Create an environment: show the progress, and stop on a signal."""

import asyncio
import sys
from contextlib import ExitStack

from rich.console import Console
from rich.status import Status
from rich.text import Text

from sbx.cli.exits import StoppedBySignal
from sbx.cli.signals import handled
from sbx.cli.terminal import STDERR, colours, one_line, write
from sbx.environments.create import EnvironmentSpec, create
from sbx.environments.directory import Environments
from sbx.environments.record import Environment
from sbx.errors import SbxError

_STEPS = {
    "python": "with",
    "venv": "making",
    "lock": "resolving",
    "install": "installing",
    "check": "checking",
    "files": "hashing",
}
_WIDTH = 100


async def create_with_progress(
    environments: Environments, request: EnvironmentSpec, *, quiet: bool
) -> Environment:
    """Create an environment. Print the progress to stderr, unless `quiet`.

    Raise the errors of `create`, and Stopped for a signal, after everything has been removed again.
    """
    received: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    with handled(stop), ExitStack() as stack:
        progress = _Progress(stack, quiet=quiet)
        try:
            return await create(environments, request, progress.tell)
        except SbxError as error:
            progress.end()
            progress.show(error.details.get("output", ()))
            raise
        except asyncio.CancelledError:
            if not received:
                raise
            raise StoppedBySignal(received[0], "interrupted; no environment was created") from None
    raise AssertionError  # the block returns or raises


class _Progress:
    """The progress: a line that changes on a terminal, or a line for each step elsewhere."""

    def __init__(self, stack: ExitStack, *, quiet: bool) -> None:
        self._quiet = quiet
        self._status: Status | None = None
        self._step = ""
        self._what = ""
        if not quiet and colours(STDERR):
            console = Console(file=sys.stderr, highlight=False)
            self._status = stack.enter_context(Status("", console=console))

    def tell(self, step: str, what: str) -> None:
        if self._quiet:
            return
        if step != self._step:
            self._step, self._what = step, what
            line = f"{_STEPS.get(step, step)}: {one_line(what)}"
            if self._status is None:
                write(STDERR, f"{line}\n")
                return
            self._status.console.print(Text(line, "dim"))
        if self._status is not None:
            detail = "" if what == self._what else f" · {one_line(what)}"
            text = f"{_STEPS.get(step, step)} {one_line(self._what)}{detail}"
            self._status.update(Text(text[:_WIDTH]))

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, output: object) -> None:
        """Print the last lines of the installer. A JSON document has them in its details."""
        if self._quiet or not isinstance(output, (list, tuple)):
            return
        for line in output:
            write(STDERR, f"  {one_line(str(line))}\n")
