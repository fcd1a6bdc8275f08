"""`python -I -m sbx.jupyter -f FILE`: a jailed kernel as a process.

For clients that start a kernel as a process and know no provisioners.

The process ends on a client's shutdown request, on SIGTERM or SIGHUP, and when the process that
started it ends (JPY_PARENT_PID). SIGINT interrupts the cell. Files in a workspace that sbx made are
removed at the end. `-I` (or `-P`) is required, because Python would otherwise import from the
current directory, to which code inside writes.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sbx.errors import SbxError
from sbx.jupyter import DEFAULT_POLICY

if TYPE_CHECKING:
    from sbx.jupyter.notebook import Notebook

_FAILED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 for a requested end, 137 if the kernel died, 2 if none started."""
    options = _parser().parse_args(arguments)
    if not sys.flags.safe_path:
        return _failed("sys.path contains the program's directory", "add -I: python -I")
    try:
        return asyncio.run(_serve(options.policy, Path(options.file).absolute()))
    except SbxError as error:
        return _failed(error.message, error.hint)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -I -m sbx.jupyter", description="A jailed kernel.")
    parser.add_argument("-f", "--file", required=True, help="the connection file")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="a policy's name, or its file")
    return parser


def _failed(message: str, hint: str | None) -> int:
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    return _FAILED


async def _serve(policy: str, file: Path) -> int:
    """Serve until the kernel ends for any reason. Raise the error that prevents its start."""
    with _end_requests() as ending:
        from sbx.jupyter import connection_file
        from sbx.jupyter.directory import check_apart
        from sbx.jupyter.notebook import Notebook
        from sbx.jupyter.notebook_sandbox import NotebookSpec, seats_of
        from sbx.runtime.runtime import Runtime
        from sbx.runtime.settings import Settings

        connection = connection_file.read(file)
        # A data directory has only one runtime, but there are as many of these processes as
        # notebooks.
        async with Runtime(Settings(data_dir=None)) as runtime:
            notebook = Notebook(seats_of(runtime))
            try:
                seat = await notebook.sit(NotebookSpec(policy, Path.cwd()))
                if seat.directory is not None:
                    check_apart(seat.directory, file, connection)
                bound = await notebook.bind(connection)
                ended = asyncio.wrap_future(await notebook.start())
                ended.add_done_callback(lambda _: ending.set())
                with connection_file.telling(file, bound), _interrupted_by_sigint(notebook):
                    await ending.wait()
                return ended.result() if ended.done() else 0
            finally:
                await notebook.close()


@contextmanager
def _interrupted_by_sigint(notebook: "Notebook") -> Iterator[None]:
    loop = asyncio.get_running_loop()
    interrupts = set()  # the loop keeps only weak references to its tasks

    def interrupt() -> None:
        task = loop.create_task(notebook.interrupt())
        interrupts.add(task)
        task.add_done_callback(interrupts.discard)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.add_signal_handler(signal.SIGINT, lambda: None)


@contextmanager
def _end_requests() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM, SIGHUP, or the end of the parent process sets."""
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # until there is a cell to interrupt
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ending.set)
    parent = None
    with suppress(ValueError):
        try:
            parent = os.pidfd_open(int(os.environ.get("JPY_PARENT_PID", "")))
            loop.add_reader(parent, ending.set)
        except ProcessLookupError:
            ending.set()
    try:
        yield ending
    finally:
        if parent is not None:
            loop.remove_reader(parent)
            os.close(parent)


if __name__ == "__main__":
    sys.exit(main())
