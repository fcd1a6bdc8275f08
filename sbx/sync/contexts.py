"""Contexts without asyncio: synchronous faces of what lives on the event loop in a thread."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from sbx.aio import Loop
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run
from sbx.sync.blocking import AsyncKernel, OnInput, followed


class AsyncContext(AsyncKernel, Protocol):
    """One kernel of a conversation, here or in a service."""

    @property
    def name(self) -> str: ...
    async def restart(self) -> Receipt: ...


class AsyncContexts(Protocol):
    """The kernels of a conversation by name."""

    async def create(self, name: str) -> AsyncContext: ...
    async def get(self, name: str) -> AsyncContext: ...
    async def list(self) -> Sequence[AsyncContext]: ...
    async def delete(self, name: str) -> None: ...


class BlockingContext:
    """One kernel of a conversation: variables and an order of runs of its own, over the same
    files."""

    def __init__(self, loop: Loop, inner: AsyncContext) -> None:
        self._loop = loop
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result; as `Sandbox.run`."""
        return self._loop.call(self._inner.run(code, timeout=timeout, on_input=on_input))

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Iterator[Event]:
        """Run a cell and follow it live; as `Sandbox.stream`."""
        return followed(
            self._loop,
            self._inner,
            lambda: self._inner.start_run(code, timeout=timeout, on_input=on_input),
        )

    def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run `/bin/bash -c command` beside its kernel, and wait for its result."""
        return self._loop.call(
            self._inner.shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        )

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Iterator[Event]:
        """Run a shell command and follow it live; as `stream` does."""
        return followed(
            self._loop,
            self._inner,
            lambda: self._inner.start_shell(
                command, timeout=timeout, cwd=cwd, env=env, stdin=stdin
            ),
        )

    def interrupt(self) -> bool:
        """Interrupt the cell that runs now, from another thread; False when none does."""
        return self._loop.call(self._inner.interrupt())

    def restart(self) -> Receipt:
        """End its kernel and what runs or waits in it, and start another: a clean namespace. Files
        stay."""
        return self._loop.call(self._inner.restart())

    def stop(self) -> None:
        """End its kernel; the next run starts another one."""
        self._loop.call(self._inner.stop())

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around its live kernel, read back from it now; None while there is
        none."""
        return self._loop.call(self._inner.read_receipt())


class BlockingContexts:
    """Named kernels side by side over the files of one conversation; `default` is its own."""

    def __init__(self, loop: Loop, inner: AsyncContexts) -> None:
        self._loop = loop
        self._inner = inner

    def create(self, name: str) -> BlockingContext:
        """Another context, with its kernel started; where that fails there is none.

        Raises BadRequest for the name, Conflict `context_exists` and `too_many_contexts`, Denied,
        Closed, and what starting a kernel raises.
        """
        return BlockingContext(self._loop, self._loop.call(self._inner.create(name)))

    def get(self, name: str) -> BlockingContext:
        """The context of this name. Raises NotFound, BadRequest for the name, Closed."""
        return BlockingContext(self._loop, self._loop.call(self._inner.get(name)))

    def list(self) -> list[BlockingContext]:
        """All of them, `default` first, the others by name."""
        found = self._loop.call(self._inner.list())
        return [BlockingContext(self._loop, one) for one in found]

    def delete(self, name: str) -> None:
        """End its kernel and what runs or waits in it, for good; files stay. Raises NotFound,
        BadRequest, Conflict `default_context`, Closed."""
        self._loop.call(self._inner.delete(name))
