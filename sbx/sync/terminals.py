"""Terminals without asyncio: synchronous faces of what lives on the event loop in a thread."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol

from sbx.aio import Loop
from sbx.protocol.terminals import TerminalScreen, TerminalStatus


class AsyncAttached(Protocol):
    """A client of a terminal, here or in a service."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def resize(self, rows: int, columns: int) -> None: ...


class AsyncTerminal(Protocol):
    """A terminal, here or in a service."""

    id: str

    async def status(self) -> TerminalStatus: ...
    def attach(self) -> AbstractAsyncContextManager[Any]: ...
    async def screen(self) -> TerminalScreen: ...
    async def resize(self, rows: int, columns: int) -> None: ...
    async def close(self) -> None: ...


class AsyncTerminals(Protocol):
    """The terminals of a conversation."""

    async def open(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncTerminal: ...
    async def get(self, terminal_id: str) -> AsyncTerminal: ...
    async def list(self) -> Sequence[AsyncTerminal]: ...
    async def close(self, terminal_id: str) -> None: ...


class BlockingAttached:
    """One client of a terminal. Reading and typing may be done from two threads."""

    def __init__(self, loop: Loop, inner: AsyncAttached) -> None:
        self._loop = loop
        self._inner = inner

    def read(self) -> bytes:
        """Wait for what is to be shown next; nothing once the terminal has ended."""
        return self._loop.call(self._inner.read())

    def write(self, data: bytes) -> None:
        """Type these bytes. Raises Conflict `terminal_not_read`."""
        self._loop.call(self._inner.write(data))

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size, for all its clients."""
        self._loop.call(self._inner.resize(rows, columns))

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read():
            yield data


class BlockingTerminal:
    """One terminal, by its id."""

    def __init__(self, loop: Loop, inner: AsyncTerminal) -> None:
        self._loop = loop
        self._inner = inner

    @property
    def id(self) -> str:
        return self._inner.id

    def status(self) -> TerminalStatus:
        """How it is now."""
        return self._loop.call(self._inner.status())

    @contextmanager
    def attach(self) -> Iterator[BlockingAttached]:
        """Come to it as a client: the first thing to read draws its screen."""
        attaching = self._inner.attach()

        async def enter() -> AsyncAttached:
            client: AsyncAttached = await attaching.__aenter__()
            return client

        async def leave() -> None:
            await attaching.__aexit__(None, None, None)

        client = self._loop.call(enter())
        try:
            yield BlockingAttached(self._loop, client)
        finally:
            self._loop.call(leave())

    def screen(self) -> TerminalScreen:
        """What it shows now, or showed last."""
        return self._loop.call(self._inner.screen())

    def resize(self, rows: int, columns: int) -> None:
        """Give it another size, of which linux tells whoever runs there."""
        self._loop.call(self._inner.resize(rows, columns))

    def close(self) -> None:
        """Hang up, and kill what is left of its session after a second."""
        self._loop.call(self._inner.close())


class BlockingTerminals:
    """The terminals of one conversation."""

    def __init__(self, loop: Loop, inner: AsyncTerminals) -> None:
        self._loop = loop
        self._inner = inner

    def open(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> BlockingTerminal:
        """A new terminal with a shell, or with `/bin/bash -c command`.

        Raises Denied where the policy offers no shell or no processes, BadRequest, TooLarge,
        Closed, Conflict `too_many_terminals`, and what starting a kernel raises.
        """
        opening = self._inner.open(rows=rows, columns=columns, command=command, cwd=cwd, env=env)
        return BlockingTerminal(self._loop, self._loop.call(opening))

    def get(self, terminal_id: str) -> BlockingTerminal:
        """A terminal by its id. Raises NotFound, Closed."""
        return BlockingTerminal(self._loop, self._loop.call(self._inner.get(terminal_id)))

    def list(self) -> list[BlockingTerminal]:
        """Those that run and those that ended, the oldest first."""
        found = self._loop.call(self._inner.list())
        return [BlockingTerminal(self._loop, one) for one in found]

    def close(self, terminal_id: str) -> None:
        """End it, and forget it. Raises NotFound, Closed."""
        self._loop.call(self._inner.close(terminal_id))
