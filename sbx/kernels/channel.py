"""One socket to a process inside: frames out, typed frames in, on the event loop, without a thread.

Frames that no task has received yet are queued up to a limit. Beyond it the channel stops reading,
the socket fills, and the sender inside blocks: a flood costs its sender, not the runtime. A
malformed frame closes the channel with a cause. A sender of too many frames is slowed down.
"""

import asyncio
import logging
import mmap
import socket
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from sbx.errors import Broken
from sbx.kernels import frames

_log = logging.getLogger(__name__)
_QUEUED_FRAMES_MAX = 256
_QUEUED_BYTES_MAX = 4 << 20
# Decoding this many frames takes about a third of the loop that all kernels share.
_FRAMES_A_WINDOW = 1000
_WINDOW_S = 0.1
_READ = 1 << 16
_READ_OF_SMALL = 1 << 12  # after a read of many small frames: about 80 frames, 3 ms of the loop
_MANY = 64  # frames in one read
_UNIT = 1 << 13  # bytes that take about as long as a small frame, for a budget
_UNIT_OF_VALUES = 1 << 6  # values at the maximum depth that take as long as a small frame
_UNREAD_MAX = 64 << 20  # bytes that the inside has not read: many times the largest request
UNITS_PER_S = 10_000.0  # a small frame is one unit, and takes about 33 µs
BURST = 1_000.0
_BUSY = 100.0  # units, above which a channel counts as busy
_BUSY_PER_S = UNITS_PER_S / 16  # of one channel, above which it becomes busy
_TICK_S = 0.005


class Level:
    """Units that drain at a rate."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._units = 0.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """Return the units that are left now."""
        self._units = max(0.0, self._units - (now - self._at) * self._per_s)
        self._at = now
        return self._units

    def add(self, units: float, now: float) -> None:
        self._units = self.at(now) + units


class FrameBudget:
    """One budget of frames for all channels of one owner, on one event loop.

    The event loop reads the frames of every kernel. `Channel` limits each kernel, but an owner may
    have many. A budget limits all channels of one owner together to about a third of the event
    loop. When it is used up, the channels that send more than half of the average stop being read.
    They continue one after the other, the one that sent least lately first. A kernel that sends
    little is never held back, also when its neighbours flood.
    """

    def __init__(self) -> None:
        self._all = Level(UNITS_PER_S)
        self._each: dict[Channel, Level] = {}
        self._paused: set[Channel] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used_up(self) -> bool:
        """Return whether busy channels are held back, or would be."""
        return self._all.at(asyncio.get_running_loop().time()) > BURST

    @property
    def paused_count(self) -> int:
        """Return how many channels the host does not read now."""
        return len(self._paused)

    def spend(self, channel: "Channel", units: float) -> None:
        """Record frames. Hold back the busy channels when the budget is used up."""
        now = asyncio.get_running_loop().time()
        level = self._each.get(channel)
        if level is None:
            level = self._each[channel] = Level(_BUSY_PER_S)
        level.add(units, now)
        self._all.add(units, now)
        if self._all.at(now) > BURST:
            self._hold_back(now)

    def leave(self, channel: "Channel") -> None:
        """Forget a channel. It is not let go."""
        self._each.pop(channel, None)
        self._paused.discard(channel)

    def _hold_back(self, now: float) -> None:
        fair = self._fair(now)
        for channel, level in self._each.items():
            if channel not in self._paused and level.at(now) > fair:
                self._paused.add(channel)
                channel.hold_back()
        self._tick_later(now)

    def _fair(self, now: float) -> float:
        """Return the level up to which a channel is not held back."""
        levels = [units for level in self._each.values() if (units := level.at(now)) > 0]
        return max(_BUSY, sum(levels) / len(levels) / 2) if levels else _BUSY

    def _tick_later(self, now: float) -> None:
        if self._paused and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(now + _TICK_S, self._tick)

    def _tick(self) -> None:
        """Let the next channel be read. It is held back again by its own frames."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        fair = self._fair(now)
        ready = {channel for channel in self._paused if self._each[channel].at(now) <= fair}
        if self._paused and self._all.at(now) <= BURST:
            ready.add(min(self._paused, key=lambda channel: self._each[channel].at(now)))
        for channel in ready:
            self._paused.discard(channel)
            channel.release()
        self._tick_later(now)


class FrameBudgets:
    """The budgets of a service, by owner. A budget lives as long as a sandbox refers to it."""

    def __init__(self) -> None:
        self._budgets: WeakValueDictionary[str, FrameBudget] = WeakValueDictionary()

    def of(self, owner: str) -> FrameBudget:
        """Return the budget of this owner."""
        return self._budgets.setdefault(owner, FrameBudget())


class ChannelClosed(Exception):
    """The other side is gone, or was cut off for a frame that it sent; `cause` is a sentence."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Channel(asyncio.BufferedProtocol):
    """Frames to and from one process inside. Used by one task at a time on each side."""

    def __init__(self, dialect: frames.FrameCodec) -> None:
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        # One buffer for all reads: asyncio's default allocates 256 KiB for every read, 17 µs of
        # each cell. Mapped, because most channels touch no more than the first page.
        self._received = memoryview(mmap.mmap(-1, _READ))
        self._splitter = frames.FrameDecoder()
        self._frames: deque[frames.Frame] = deque()
        self._queued_bytes = 0
        self._paused = False
        self._slowed = False
        self._held_back = False
        self._budget: FrameBudget | None = None
        self._many_at_once = False
        self._window = 0.0
        self._in_window = 0
        self._cause: str | None = None
        self.fault: str | None = None  # the cause, if the other side was cut off for its behaviour
        self._waiting: asyncio.Future[None] | None = None
        self._draining: asyncio.Future[None] | None = None
        self._transport: Any = None
        self._lost = self._loop.create_future()
        self.on_closed: Callable[[], None] | None = None
        self.on_unread: Callable[[], None] | None = None  # frames arrived that no task waits for

    @classmethod
    async def open(cls, sock: socket.socket, dialect: frames.FrameCodec) -> "Channel":
        """Take over a connected stream socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(dialect), sock=sock)
        return channel

    @property
    def closed(self) -> bool:
        return self._cause is not None

    @property
    def has_frame(self) -> bool:
        """Whether `receive` will return a frame without waiting."""
        return bool(self._frames)

    def post(self, kind: str, content: Any, name: str | None = None) -> None:
        """Send a frame without waiting until it is read: a hostile guest may never read it.

        For requests with a deadline, and for requests that end the guest. Raise ChannelClosed.
        """
        if self._cause is not None:
            raise ChannelClosed(self._cause)
        self._transport.write(frames.encode(kind, content, name))
        # Check the size only if the inside has not read for a while.
        if self._draining is not None and self._transport.get_write_buffer_size() > _UNREAD_MAX:
            self._cut_off("it does not read its input")
            raise ChannelClosed("it does not read its input")

    async def send(self, kind: str, content: Any, name: str | None = None) -> None:
        """Send a frame. Wait while the inside does not read. Raise ChannelClosed."""
        self.post(kind, content, name)
        if self._draining is not None:
            await asyncio.shield(self._draining)  # other tasks may wait for it, too
            if self._cause is not None:
                raise ChannelClosed(self._cause)

    def share(self, budget: FrameBudget) -> None:
        """Count reads against this budget from now on. Other channels share it."""
        if self._cause is None:
            self._budget = budget

    def hold_back(self) -> None:
        """Stop reading until `release`. Called by the budget."""
        self._held_back = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Continue to read. Called by the budget."""
        self._held_back = False
        self._read_on()

    async def receive(self) -> frames.Frame:
        """Return the next frame. Raise ChannelClosed after the last one."""
        while not self._frames:
            if self._cause is not None:
                raise ChannelClosed(self._cause)
            if self._waiting is not None:
                raise Broken("two tasks read from one channel")
            self._waiting = self._loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        frame = self._frames.popleft()
        self._queued_bytes -= frame.size
        if (
            self._paused
            and len(self._frames) < _QUEUED_FRAMES_MAX // 2
            and self._queued_bytes < _QUEUED_BYTES_MAX // 2
        ):
            self._paused = False
            self._read_on()
        return frame

    async def lost(self, timeout_s: float) -> None:
        """Wait until the other side has hung up and all its frames have arrived, or time is up."""
        await asyncio.wait([self._lost], timeout=timeout_s)

    def close(self, cause: str = "closed by the runtime") -> None:
        """Close the connection. Frames that already arrived can still be received."""
        if self._cause is None:
            self._cause = cause
            self._transport.abort()
        self._wake()

    def _cut_off(self, fault: str) -> None:
        _log.warning("a kernel was cut off: %s", fault)
        self.fault = fault
        self.close(fault)

    # -- asyncio.BufferedProtocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        small = self._many_at_once or (self._budget is not None and self._budget.used_up)
        return self._received[: _READ_OF_SMALL if small else _READ]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            bodies = self._splitter.feed(self._received[:nbytes])
            units = len(bodies)
            for body in bodies:
                frame = self._dialect.decode(body)
                self._frames.append(frame)
                self._queued_bytes += frame.size
                units += frame.size // _UNIT + frame.values // _UNIT_OF_VALUES
        except frames.MalformedFrame as error:
            self._cut_off(f"it sent a frame that our kernel does not send: {error}")
            return
        self._many_at_once = len(bodies) > _MANY
        self._limit_rate(len(bodies))
        if self._budget is not None and units:
            self._budget.spend(self, units)
        if not self._paused and (
            len(self._frames) > _QUEUED_FRAMES_MAX or self._queued_bytes > _QUEUED_BYTES_MAX
        ):
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._cause is None:
            self._cause = "it ended"
        if not self._lost.done():
            self._lost.set_result(None)
        if self._budget is not None:
            self._budget.leave(self)
        self.resume_writing()
        self._wake()
        if self.on_closed is not None:
            self.on_closed()

    def pause_writing(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._draining is not None:
            if not self._draining.done():
                self._draining.set_result(None)
            self._draining = None

    def _limit_rate(self, count: int) -> None:
        """Stop reading until the window ends if too many frames arrived in it."""
        now = self._loop.time()
        if now >= self._window:
            self._window, self._in_window = now + _WINDOW_S, 0
        self._in_window += count
        if self._in_window > _FRAMES_A_WINDOW and not self._slowed:
            self._slowed = True
            self._transport.pause_reading()
            self._loop.call_at(self._window, self._resume)

    def _resume(self) -> None:
        self._slowed = False
        self._read_on()

    def _read_on(self) -> None:
        if self._cause is None and not (self._slowed or self._paused or self._held_back):
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiting is not None:
            if not self._waiting.done():
                self._waiting.set_result(None)
        elif self.on_unread is not None and self._frames:
            self.on_unread()
