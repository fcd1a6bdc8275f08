"""Background commands and usage without asyncio: synchronous faces of what lives on the event loop
in a thread."""

import builtins
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Protocol

from sbx.aio import Loop
from sbx.protocol.commands import LOG_PIECE, CommandStatus, LogPiece

STOP_GRACE_S = 2.0


class AsyncCommand(Protocol):
    """A background command, here or in a service."""

    id: str

    async def status(self) -> CommandStatus: ...
    async def logs(self, offset: int = 0, *, limit: int = LOG_PIECE) -> LogPiece: ...
    def follow(self, offset: int = 0) -> AsyncGenerator[LogPiece, None]: ...
    async def write(self, text: str | None) -> None: ...
    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> CommandStatus: ...
    async def wait(self, timeout: float | None = None) -> CommandStatus: ...


class AsyncCommands(Protocol):
    """The background commands of a conversation."""

    async def start(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
    ) -> AsyncCommand: ...
    async def get(self, command_id: str) -> AsyncCommand: ...
    async def list(self) -> Sequence[CommandStatus]: ...


class BlockingCommand:
    """One background command: it goes on when the call that started it is over, until it ends or
    its kernel does."""

    def __init__(self, loop: Loop, inner: AsyncCommand) -> None:
        self._loop = loop
        self._inner = inner

    @property
    def id(self) -> str:
        return self._inner.id

    def status(self) -> CommandStatus:
        """How it is now."""
        return self._loop.call(self._inner.status())

    def logs(self, offset: int = 0, *, limit: int = LOG_PIECE) -> LogPiece:
        """What it wrote, from this byte on: at most `limit` bytes. Where the piece begins later
        than was asked for, what lies between is kept no more; an empty one is the end of the log.

        Raises BadRequest `invalid_offset`.
        """
        return self._loop.call(self._inner.logs(offset, limit=limit))

    def follow(self, offset: int = 0) -> Iterator[LogPiece]:
        """What it wrote from this byte on, and what it writes, until it has ended."""
        return self._loop.each(self._inner.follow(offset))

    def write(self, text: str | None) -> None:
        """Feed its standard input, which was left open at the start; None closes it. Raises
        Conflict `stdin_full` while it does not read what it has, and `stdin_closed`."""
        self._loop.call(self._inner.write(text))

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> CommandStatus:
        """SIGTERM to its process group, and SIGKILL after `grace_s` seconds; how it ended."""
        return self._loop.call(self._inner.stop(grace_s=grace_s))

    def wait(self, timeout: float | None = None) -> CommandStatus:
        """Wait for its end, at most `timeout` seconds; how it is then."""
        return self._loop.call(self._inner.wait(timeout))


class BlockingCommands:
    """Background commands of a conversation."""

    def __init__(self, loop: Loop, inner: AsyncCommands) -> None:
        self._loop = loop
        self._inner = inner

    def start(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
    ) -> BlockingCommand:
        """Start `/bin/bash -c command` beside the kernel. Raises as `shell`, and Conflict
        `too_many_commands`."""
        started = self._inner.start(command, cwd=cwd, env=env, stdin_open=stdin_open)
        return BlockingCommand(self._loop, self._loop.call(started))

    def get(self, command_id: str) -> BlockingCommand:
        """A command by its id, also one that has ended. Raises NotFound."""
        return BlockingCommand(self._loop, self._loop.call(self._inner.get(command_id)))

    def list(self) -> builtins.list[CommandStatus]:
        """Those that run and those that ended a while ago, the newest first."""
        return [*self._loop.call(self._inner.list())]
