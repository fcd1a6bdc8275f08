"""A program of the host, with no walls around it, in a process group of its own.

What it started and left in its group ends with it. What made itself a session of its own (setsid)
has left, as it could under any shell: without walls there is nothing that would hold it.
"""

import asyncio
import codecs
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from sbx import errors
from sbx.aio import run_to_completion
from sbx.kernels import frames

_CHUNK = 64 << 10
_PENDING_MAX = 32  # chunks that were read, and not yet told
_DRAIN_S = 1.0  # after the end, where somebody who left the group still holds the output open
_NOT_HANDED_ON = frozenset(
    ("API_KEY", "SANDBOX_API_KEY", "BAY_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
)


class HostProcess:
    """Made by `start`; whoever has it calls `end`, which leaves nothing of its group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting = asyncio.create_task(process.wait())

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        directory: Path,
        *,
        output: tuple[int, int],
        env: Mapping[str, str] | None = None,
    ) -> "HostProcess":
        """`output`: the descriptors it writes to; `env` comes on top of ours. Raises Unavailable
        `not_started`."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=directory,
                env={**environment(), **(env or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output[0],
                stderr=output[1],
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise errors.Unavailable(
                f"{argv[0]} cannot be started in {directory}: {error}",
                code="not_started",
                hint="see whether the directory is there",
            ) from error
        return cls(process)

    @property
    def alive(self) -> bool:
        return not self._waiting.done()

    async def wait(self) -> int:
        """Its exit code, 128 + N for a signal, as in a shell."""
        code = await asyncio.shield(self._waiting)
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """To the whole group; nothing where there is none any more."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def end(self) -> None:
        """Kill what is left of the group, and wait for it."""
        self.signal(signal.SIGKILL)
        await run_to_completion(self._waiting)


def environment() -> dict[str, str]:
    """Ours, without the keys of models and services: a model would read them in the output of
    `env`, and they would be stored with it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_HANDED_ON and not name.startswith("SBX_")
    }


class Printing:
    """The output of a program, as it comes."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[frames.OutputFrame | None] = asyncio.Queue(_PENDING_MAX)
        self._transports: list[asyncio.BaseTransport] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def next(self) -> frames.OutputFrame | None:
        """What it printed next; None when it has ended, and all of it is told."""
        return await self._told.get()

    async def open(self, name: Literal["stdout", "stderr"]) -> int:
        """Follow one more pipe; the end that a program writes to, for the caller to close."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_CHUNK)
        protocol = asyncio.StreamReaderProtocol(reader)
        ours, theirs = os.pipe()
        try:
            pipe = os.fdopen(ours, "rb", 0)
            transport, _ = await loop.connect_read_pipe(lambda: protocol, pipe)
        except BaseException:
            os.close(theirs)
            raise
        self._transports.append(transport)
        self._tasks.append(asyncio.create_task(self._read(name, reader)))
        return theirs

    def until_over(self, process: HostProcess) -> None:
        """Its end is the end of what is printed, whoever has the pipes by then."""
        self._tasks.append(asyncio.create_task(self._over(process, list(self._tasks))))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for transport in self._transports:
            transport.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _read(self, name: Literal["stdout", "stderr"], reader: asyncio.StreamReader) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while chunk := await reader.read(_CHUNK):
            if text := decoder.decode(chunk):
                await self._told.put(frames.OutputFrame(name, text))
        if text := decoder.decode(b"", final=True):
            await self._told.put(frames.OutputFrame(name, text))

    async def _over(self, process: HostProcess, readers: Sequence["asyncio.Task[None]"]) -> None:
        await process.wait()
        process.signal(signal.SIGKILL)  # what it left running in its group
        await asyncio.wait(readers, timeout=_DRAIN_S)
        await self._told.put(None)


@asynccontextmanager
async def printing(
    argv: Sequence[str], directory: Path
) -> AsyncIterator[tuple[HostProcess, Printing]]:
    """A program that runs, and what it prints; on leaving it is ended. Raises as `start`."""
    async with AsyncExitStack() as held:
        told = Printing()
        held.push_async_callback(lambda: run_to_completion(told.close()))
        with ExitStack() as theirs:
            output = await told.open("stdout")
            theirs.callback(os.close, output)
            error = await told.open("stderr")
            theirs.callback(os.close, error)
            process = await HostProcess.start(argv, directory, output=(output, error))
        held.push_async_callback(process.end)
        told.until_over(process)
        yield process, told
