"""One kernel behind five ZeroMQ sockets: Jupyter's protocol outside, sbx frames inside.

The sockets are bound once and stay bound while kernels start and end behind them, so that a client
keeps its connections over a restart. Reference: Jupyter's messaging specification, version 5.4.

A message of a client is accepted if it is signed with the connection's key. As with every Jupyter
kernel, the key does not hide anything: any process that can connect may subscribe to the published
messages. It may also take over a client's replies with that client's name, which is published, too.
`ipc` keeps other users away, and the Curve keys of a connection keep away every process without
them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from sbx.aio import run_to_completion
from sbx.jupyter.channels import Channels
from sbx.jupyter.connection import ConnectionInfo
from sbx.jupyter.history import CellHistory
from sbx.jupyter.kernel_session import KernelSession
from sbx.runtime.run.context import Context

__all__ = ("Bridge", "ConnectionInfo")


class Bridge:
    """See the module. Belongs to one event loop."""

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
