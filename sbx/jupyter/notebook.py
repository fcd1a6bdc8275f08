"""One notebook's kernel: a seat, in which it lives, and a bridge, by which clients reach it.

Both entry points use it: the provisioner in a program's Jupyter, and `python -m sbx.jupyter`.
Everything runs on the event loop of the runtime.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Self

from sbx.aio import run_to_completion
from sbx.jupyter.channels import Channels
from sbx.jupyter.connection import ConnectionInfo
from sbx.jupyter.handlers import KILLED
from sbx.jupyter.history import CellHistory
from sbx.jupyter.kernel_session import KernelSession
from sbx.jupyter.notebook_sandbox import NotebookSandbox, NotebookSandboxes, NotebookSpec
from sbx.runtime.run.context import Context


class Bridge:
    """One kernel behind five ZeroMQ sockets: Jupyter's protocol outside, sbx frames inside.

    The sockets are bound once and stay bound while kernels start and end behind them, so that a
    client keeps its connections over a restart. Reference: Jupyter's messaging specification,
    version 5.4. Belongs to one event loop.

    A message of a client is accepted if it is signed with the connection's key. As with every
    Jupyter kernel, the key does not hide anything: any process that can connect may subscribe to
    the published messages. It may also take over a client's replies with that client's name, which
    is published, too. `ipc` keeps other users away, and the Curve keys of a connection keep away
    every process without them.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._history = CellHistory()
        self._life: KernelSession | None = None
        self._changing = asyncio.Lock()
        self._closed = False
        self._welcoming = asyncio.create_task(channels.welcome())

    @classmethod
    async def bind(cls, connection: ConnectionInfo) -> Self:
        """Bind the sockets without serving them. Raise BadRequest and Unavailable
        `address_in_use`."""
        return cls(Channels.bind(connection))

    @property
    def connection(self) -> ConnectionInfo:
        """The connection after the bind: no port is 0."""
        return self._channels.connection

    async def start(self, context: Context, on_exit: Callable[[int], None]) -> None:
        """Start a kernel in this context and serve it. Replace the last kernel.

        `on_exit` receives the exit code: 0 after `stop` or a client's shutdown request, 128 + 9 (a
        shell's code for SIGKILL) for a kernel that died or exceeded a limit. Raise the error of
        starting a kernel.
        """
        async with self._changing:
            await self._end()
            self._channels.bind_again()
            life = KernelSession(self._channels, self._history, context, on_exit)
            await life.begin()
            self._life = life

    async def interrupt(self) -> None:
        """Interrupt the running cell, if there is one."""
        if self._life is not None:
            await self._life.interrupt()

    async def stop(self) -> None:
        """End the kernel; clients stay connected and files are kept."""
        async with self._changing:
            await self._end()

    async def close(self) -> None:
        """Stop the kernel and close the sockets. Complete also when the caller is cancelled."""
        await run_to_completion(self._close())

    async def _close(self) -> None:
        async with self._changing:
            if self._closed:
                return
            self._closed = True
            try:
                await self._end()
            finally:
                self._welcoming.cancel()
                with suppress(asyncio.CancelledError):
                    await self._welcoming
                await self._channels.close()

    async def _end(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.end()


class Notebook:
    """See the module. The steps in order: `sit` and `bind`; `start` for each kernel; `leave` when
    the notebook is closed for a while; `close`."""

    def __init__(self, seats: NotebookSandboxes) -> None:
        self._seats = seats
        self._seat: NotebookSandbox | None = None
        self._bridge: Bridge | None = None
        self._holding: asyncio.Task[None] | None = None
        self._ended: Future[int] | None = None

    @property
    def seat(self) -> NotebookSandbox | None:
        return self._seat

    async def sit(self, request: NotebookSpec) -> NotebookSandbox:
        """Take a seat unless it has one. Raise like `NotebookSandboxes.take`."""
        if self._seat is None:
            self._seat = await self._seats.take(request)
        return self._seat

    async def bind(self, connection: ConnectionInfo) -> ConnectionInfo:
        """Bind the sockets to this connection, unless they are bound to it. Return the bound one.

        Raise like `Bridge.bind`.
        """
        if self._bridge is not None and self._bridge.connection == connection:
            return connection
        await self._unbind()
        self._bridge = await Bridge.bind(connection)
        self._holding = asyncio.create_task(self._hold(self._bridge))
        await asyncio.sleep(0)  # a task that is cancelled before its first step closes nothing
        return self._bridge.connection

    async def start(self) -> "Future[int]":
        """Start a kernel. Return a future of its exit code, which any thread may read.

        The future is done when the kernel has ended. Raise like `Bridge.start`.
        """
        assert self._seat is not None
        assert self._bridge is not None
        ended: Future[int] = Future()
        ended.set_running_or_notify_cancel()  # a caller that gives up does not cancel the kernel
        self._ended = ended
        try:
            await self._bridge.start(self._seat.context, lambda code: _set_exit_code(ended, code))
        except BaseException:
            _set_exit_code(ended, KILLED)
            raise
        return ended

    async def interrupt(self) -> None:
        """Interrupt the running cell, if there is one."""
        if self._bridge is not None:
            await self._bridge.interrupt()

    async def stop(self) -> None:
        """End the kernel; clients stay connected and files are kept."""
        if self._bridge is not None:
            await self._bridge.stop()
        if self._ended is not None:
            _set_exit_code(self._ended, 0)

    async def leave(self) -> None:
        """Close the sockets. Leave the seat, unless files would be removed with it."""
        await self._unbind()
        if self._seat is not None and not self._seat.holds_files:
            await self._start()

    async def close(self) -> None:
        """Close the sockets and leave the seat. Complete also when the caller is cancelled."""
        await run_to_completion(self._close())

    async def _close(self) -> None:
        try:
            await self._unbind()
        finally:
            await self._start()

    async def _start(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            await self._seats.leave(seat)

    async def _unbind(self) -> None:
        holding, self._holding, self._bridge = self._holding, None, None
        if holding is not None:
            holding.cancel()
            await asyncio.wait([holding])

    async def _hold(self, bridge: Bridge) -> None:
        """Keep the bridge open until it is unbound, or the loop ends, which cancels every task."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            try:
                await bridge.close()
            finally:
                if self._ended is not None:
                    _set_exit_code(self._ended, KILLED)


def _set_exit_code(ended: "Future[int]", code: int) -> None:
    if not ended.done():
        ended.set_result(code)
