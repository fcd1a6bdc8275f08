"""One kernel behind five ZeroMQ sockets: Jupyter's protocol outside, our frames inside.

The sockets are bound once and stay, whatever becomes of the kernels that are started behind them,
so that a client keeps its connections over a restart. Reference: Jupyter's messaging specification,
version 5.4.

What a client sends counts when it is signed with the connection's key. As with every kernel of
Jupyter, the key does not hide: whoever can connect may subscribe to what is published, and by a
client's name, which is published too, take over the replies to it. `ipc` keeps other users away,
and the Curve keys of a connection everybody who lacks them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from sbx.isolation.patience import to_the_end
from sbx.jupyter.channels import Channels
from sbx.jupyter.connection import Connection
from sbx.jupyter.history import History
from sbx.jupyter.life import Life
from sbx.runtime.context import Context

__all__ = ("Bridge", "Connection")


class Bridge:
    """See the module. All of it on one event loop."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._history = History()
        self._life: Life | None = None
        self._changing = asyncio.Lock()
        self._closed = False
        self._welcoming = asyncio.create_task(channels.welcome())

    @classmethod
    async def bind(cls, asked: Connection) -> Self:
        """Bind the sockets; nothing is served yet. Raises BadRequest, Unavailable
        `address_in_use`."""
        return cls(Channels.bind(asked))

    @property
    def connection(self) -> Connection:
        """As bound: no port is 0."""
        return self._channels.connection

    async def start(self, context: Context, on_exit: Callable[[int], None]) -> None:
        """Start a kernel in this context and serve it; also the next one, after the last ended.

        `on_exit` is told its exit code: 0 after `stop` or a client's shutdown, 128 + 9 (as a shell
        says SIGKILL) for one that died or was ended for a limit. Raises what starting a kernel
        raises.
        """
        async with self._changing:
            await self._end()
            self._channels.bind_again()
            life = Life(self._channels, self._history, context, on_exit)
            await life.begin()
            self._life = life

    async def interrupt(self) -> None:
        """Interrupt what runs now, if anything does."""
        if self._life is not None:
            await self._life.interrupt()

    async def stop(self) -> None:
        """End the kernel; clients stay connected and files are kept."""
        async with self._changing:
            await self._end()

    async def close(self) -> None:
        """`stop`, and let go of the sockets. Once begun it is done to its end."""
        await to_the_end(self._close())

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
