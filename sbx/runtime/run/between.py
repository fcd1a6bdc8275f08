"""What a kernel shows while nobody asks it anything: threads and tasks that a cell left behind.

It is read as it comes, in turns like those of requests, so that no two read at once and a request
that waits is let in. A kernel of ours shows as much between two requests as one run may write; what
comes beyond that is left in the socket until the next request, and waits there with who wrote it.
"""

import asyncio
import contextlib
import logging

from sbx.kernels import frames
from sbx.kernels.kernel import Kernel, KernelDied
from sbx.runtime.run.context import Context
from sbx.runtime.run.relay import Tell, Told, told

_log = logging.getLogger(__name__)
_AT_ONCE = 64  # frames of a turn
_AROUND = 1 << 20  # bytes that the frames of what may be shown take themselves


class IdleOutputReader:
    """Tells what comes between the requests to this kernel, from now on until `close`."""

    def __init__(self, context: Context, kernel: Kernel, tell: Tell) -> None:
        self._context = context
        self._kernel = kernel
        self._tell = tell
        self._room = 0
        self._reading: asyncio.Task[None] | None = None
        kernel.on_unsolicited(self._arrived)
        self.reset()

    def reset(self) -> None:
        """A request is over: what comes now has all the room again."""
        self._room = self._context.output_max + _AROUND
        if self._kernel.has_next:
            self._arrived()

    async def close(self) -> None:
        self._kernel.on_unsolicited(None)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def _arrived(self) -> None:
        if self._room > 0 and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            with contextlib.suppress(KernelDied):
                while self._has_next:
                    async with self._context.turn:
                        await self._read_some()
        except frames.MalformedFrame as error:
            _log.warning("a kernel was cut off: %s", error)
            self._kernel.cut_off = f"it sent what no kernel of ours sends: {error}"
            await self._kernel.kill()

    async def _read_some(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._has_next:
                return
            frame = await self._kernel.next_unsolicited()
            self._room -= frame.size
            if isinstance(frame.content, Told):
                await told(self._tell, frame.content)

    @property
    def _has_next(self) -> bool:
        return self._room > 0 and self._kernel.has_next
