"""`python -P -m sbx.jupyter -f FILE`: a jailed kernel as a process, for clients that start those.

It ends with a client's shutdown request, with SIGTERM or SIGHUP, and with the process that started
it (JPY_PARENT_PID); SIGINT interrupts the cell. What its kernel wrote to a workspace of ours goes
with it. `-P`, because Python would import from the current directory, to which code inside writes.
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
    """Its exit code: 0 where its end was asked for, 137 where the kernel died, 2 where there was
    never one."""
    asked = _parser().parse_args(arguments)
    if not sys.flags.safe_path:
        return _failed("it is to be started without its directory in sys.path", "add -P: python -P")
    try:
        return asyncio.run(_serve(asked.policy, Path(asked.file).absolute()))
    except SbxError as error:
        return _failed(error.message, error.hint)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -P -m sbx.jupyter", description="A jailed kernel.")
    parser.add_argument("-f", "--file", required=True, help="the connection file")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="a policy's name, or its file")
    return parser


def _failed(message: str, hint: str | None) -> int:
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    return _FAILED


async def _serve(policy: str, file: Path) -> int:
    """Until it ends, for whatever reason. Raises what says why there is no kernel."""
    with _asked_to_end() as ending:
        from sbx.jupyter import connection_file
        from sbx.jupyter.directory import check_apart
        from sbx.jupyter.notebook import Notebook
        from sbx.jupyter.seat import Wanted, seats_of
        from sbx.runtime.runtime import Runtime
        from sbx.runtime.settings import Settings

        asked = connection_file.read(file)
        # A data directory has one runtime, and of these processes there are as many as notebooks.
        async with Runtime(Settings(data_dir=None)) as runtime:
            notebook = Notebook(seats_of(runtime))
            try:
                seat = await notebook.sit(Wanted(policy, Path.cwd()))
                if seat.directory is not None:
                    check_apart(seat.directory, file, asked)
                bound = await notebook.bind(asked)
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
    interrupts = set()  # a loop holds its tasks weakly

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
def _asked_to_end() -> Iterator[asyncio.Event]:
    """Set by SIGTERM and SIGHUP, and when the process that started this one is gone."""
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
