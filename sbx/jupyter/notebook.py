"""A kernel as a notebook has it: a seat for it to live in, and a bridge by which clients reach it.

Both doors hold one, the provisioner of a program's Jupyter and the process `python -m sbx.jupyter`.
All of it happens on the event loop of the runtime.
"""

import asyncio
from concurrent.futures import Future

from sbx.isolation.patience import to_the_end
from sbx.jupyter.answers import KILLED
from sbx.jupyter.bridge import Bridge
from sbx.jupyter.connection import Connection
from sbx.jupyter.seat import Seat, Seats, Wanted


class Notebook:
    """See the module. Its steps, in this order: `sit` and `bind`, `start` as often as a kernel is
    wanted, `leave` between two times that it is open; `close`."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._seat: Seat | None = None
        self._bridge: Bridge | None = None
        self._held: asyncio.Task[None] | None = None
        self._ended: Future[int] | None = None

    @property
    def seat(self) -> Seat | None:
        return self._seat

    async def sit(self, wanted: Wanted) -> Seat:
        """Take a seat where it has none. Raises as `Seats.take`."""
        if self._seat is None:
            self._seat = await self._seats.take(wanted)
        return self._seat

    async def bind(self, asked: Connection) -> Connection:
        """Bind the sockets as asked, unless they are; where they are bound. Raises as
        `Bridge.bind`."""
        if self._bridge is not None and self._bridge.connection == asked:
            return asked
        await self._unbind()
        self._bridge = await Bridge.bind(asked)
        self._held = asyncio.create_task(self._hold(self._bridge))
        await asyncio.sleep(0)  # a task that is cancelled before its first step closes nothing
        return self._bridge.connection

    async def start(self) -> "Future[int]":
        """Start a kernel; what comes back is done when it has ended, with its exit code, and may be
        looked at from any thread. Raises as `Bridge.start`."""
        assert self._seat is not None
        assert self._bridge is not None
        ended: Future[int] = Future()
        ended.set_running_or_notify_cancel()  # who gives up waiting does not cancel the kernel
        self._ended = ended
        try:
            await self._bridge.start(self._seat.context, lambda code: _tell(ended, code))
        except BaseException:
            _tell(ended, KILLED)
            raise
        return ended

    async def interrupt(self) -> None:
        """Interrupt the cell that runs; nothing where none does."""
        if self._bridge is not None:
            await self._bridge.interrupt()

    async def stop(self) -> None:
        """End the kernel; clients stay connected and files are kept."""
        if self._bridge is not None:
            await self._bridge.stop()
        if self._ended is not None:
            _tell(self._ended, 0)

    async def leave(self) -> None:
        """Let go of the sockets, and of the seat unless files would go with it."""
        await self._unbind()
        if self._seat is not None and not self._seat.holds_files:
            await self._stand_up()

    async def close(self) -> None:
        """The same, and of the seat in any case. Once begun it is done to its end."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        try:
            await self._unbind()
        finally:
            await self._stand_up()

    async def _stand_up(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            await self._seats.leave(seat)

    async def _unbind(self) -> None:
        held, self._held, self._bridge = self._held, None, None
        if held is not None:
            held.cancel()
            await asyncio.wait([held])

    async def _hold(self, bridge: Bridge) -> None:
        """Until it is unbound, or the loop ends, which cancels every task."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            try:
                await bridge.close()
            finally:
                if self._ended is not None:
                    _tell(self._ended, KILLED)


def _tell(ended: "Future[int]", code: int) -> None:
    if not ended.done():
        ended.set_result(code)
