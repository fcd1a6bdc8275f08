"""A command that runs in a jail next to the kernel, with pipes or at its own terminal."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sbx.kernels import frames

TERMINAL_WINDOW = 256 << 10  # bytes of a terminal that may be on their way
_BEYOND_WINDOW = 2 << 20  # bytes: the pipe's content at the command's end may exceed its window
_UNREAD_MAX = 256 << 10  # bytes of input that no process inside has read
_ACTIVE_S = 2.0  # for how long a terminal counts as busy after the last byte

Request = Callable[[str, Any, str | None], Awaitable[None]]


class KernelDied(Exception):
    """The kernel ended during a request; `Kernel.ended` returns how."""


CommandFrame = frames.OutputFrame | frames.Tty | frames.Exited


class Command:
    """A command that runs inside, next to the kernel."""

    speaks: tuple[type[CommandFrame], ...] = (frames.OutputFrame, frames.Exited)

    def __init__(self, request: Request, name: str, window: int | None = None) -> None:
        """Set up the command's queue of frames.

        `request` sends a frame to PID 1. `window` is the number of bytes that the command may write
        before `took` acknowledges them. Without a window, its reader (the task of a run) stops it
        at its output limit.
        """
        self._request = request
        self._name = name
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        self._pending_max = None if window is None else 2 * window + _BEYOND_WINDOW
        self._pending = 0
        self.unread = 0  # bytes of its standard input that it has not read yet
        self.reads = True  # whether its standard input is open, as far as the host knows
        self.killed_with_kernel = False
        self._pid: int | None = None
        self._begun = asyncio.Event()
        self._was_read = asyncio.Event()

    async def next(self) -> frames.OutputFrame | frames.Exited:
        """Return the next output; Exited is the last. Raise KernelDied if the jail ends first."""
        frame = await self.next_frame()
        assert not isinstance(frame, frames.Tty)
        return frame

    async def pid(self) -> int | None:
        """Return the pid inside, if it was requested; None if no process was started."""
        await self._begun.wait()
        return self._pid

    def spawned(self, pid: int) -> None:
        self._pid = pid
        self._begun.set()

    async def next_frame(self) -> CommandFrame:
        """Do the same as `next`, for a command with pipes or at a terminal."""
        frame: CommandFrame | None = await self._frames.get()
        if frame is None:
            raise KernelDied
        self._pending -= _size(frame)
        return frame

    @property
    def has_next(self) -> bool:
        """Whether `next` will return a frame without waiting."""
        return not self._frames.empty()

    async def took(self, size: int) -> None:
        """Acknowledge this many bytes of output: the command may write as many again."""
        await self._request("took", {"bytes": size}, self._name)

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        await self._request("signal", {"signal": number}, self._name)

    async def write(self, text: str | None) -> None:
        """Write to its standard input; None closes it. The caller must limit `unread`."""
        if text is None:
            self.reads = False
        else:
            self.unread += len(text.encode())
        await self._request("stdin", {"text": text}, self._name)

    async def feed(self, data: bytes) -> None:
        """Write bytes to its input, as soon as it has read enough of the earlier ones."""
        await self._feed("stdin", data)

    async def _feed(self, order: str, data: bytes) -> None:
        while self.unread >= _UNREAD_MAX and self.reads:
            self._was_read.clear()
            await self._was_read.wait()
        self.unread += len(data)
        await self._request(order, {"data": data}, self._name)

    @property
    def busy(self) -> bool:
        """Whether the command is active and has to be watched now."""
        return True

    def put(self, frame: CommandFrame | None) -> None:
        if frame is not None:
            self._pending += _size(frame)
        self._begun.set()
        if frame is None or isinstance(frame, frames.Exited):
            self.reads = False
            self._was_read.set()
        self._frames.put_nowait(frame)

    def fed(self, frame: frames.Fed) -> None:
        self.unread = max(0, self.unread - frame.bytes)
        self.reads = self.reads and frame.open
        self._was_read.set()

    @property
    def overran(self) -> bool:
        """Whether more output came than the window allows: PID 1 is compromised."""
        return self._pending_max is not None and self._pending > self._pending_max


class TerminalCommand(Command):
    """A command on its own pty. Its output arrives as bytes, within a window."""

    speaks = (frames.Tty, frames.Exited)

    def __init__(self, request: Request, name: str, on_busy: Callable[[], None]) -> None:
        """`on_busy` is called when an idle terminal becomes busy."""
        super().__init__(request, name, TERMINAL_WINDOW)
        self._on_busy = on_busy
        self._active_at = float("-inf")

    @property
    def busy(self) -> bool:
        """Whether there was input or output recently. A shell that waits for input is idle."""
        return asyncio.get_running_loop().time() - self._active_at < _ACTIVE_S

    async def read(self) -> frames.Tty | frames.Exited:
        """Return the next frame, like `next`."""
        frame = await self.next_frame()
        assert not isinstance(frame, frames.OutputFrame)
        return frame

    async def feed(self, data: bytes) -> None:
        """Write terminal input. Wait while the processes inside do not read the earlier input."""
        self._is_active()
        await self._feed("type", data)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal. Linux sends SIGWINCH to the foreground group."""
        await self._request("resize", {"rows": rows, "columns": columns}, self._name)

    async def hang_up(self) -> None:
        """Close the pty. Linux sends SIGHUP to the session's leader and the foreground group."""
        await self._request("hang_up", {}, self._name)

    def put(self, frame: CommandFrame | None) -> None:
        if isinstance(frame, frames.Tty):
            self._is_active()
        super().put(frame)

    def _is_active(self) -> None:
        was, self._active_at = self.busy, asyncio.get_running_loop().time()
        if not was:
            self._on_busy()


def _size(frame: CommandFrame) -> int:
    match frame:
        case frames.OutputFrame():
            return len(frame.text)
        case frames.Tty():
            return len(frame.data)
    return 0
