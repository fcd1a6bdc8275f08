"""Following what changes in a conversation's files, for asyncio; ends with the conversation.

What the listener does not take yet stays in linux' own bounded queue, which says when it was full:
a slow listener costs no memory, and is told that it missed something.

Code inside that renames without end makes changes faster than Python reads them, and who reads
holds the interpreter's lock: the cells of all other sandboxes answered twenty times slower. So the
watches of a conversation read one after another, and rest for nine times as long as each took.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from sbx import errors
from sbx.aio import WorkerThreads, long_call, run_to_completion
from sbx.protocol.files import FileEvent
from sbx.workspace.watch import Watching

WATCHES_MAX = 16  # of one conversation
_GATHER_S = 0.05  # in which changes of one burst come together
_REST = 9  # times as long as it was read
_REST_MAX_S = 2.0


class _Watch:
    """One that is followed."""

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.ended = asyncio.Event()
        self.readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.arm()

    def arm(self) -> None:
        """Set `readable` as soon as it is, once: a descriptor that nobody reads for a while would
        else wake the loop in each of its turns."""
        self.readable.clear()
        if not self.stopped:
            self._loop.add_reader(self.watching.fd, self._wake)

    def _wake(self) -> None:
        self._loop.remove_reader(self.watching.fd)
        self.readable.set()

    @property
    def stopped(self) -> bool:
        return self.ended.is_set()

    def stop(self) -> None:
        """Wake its listener, who ends; a second time does nothing."""
        if not self.stopped:
            self.ended.set()
            self._loop.remove_reader(self.watching.fd)
            self.readable.set()


class Watches:
    """The watches of one conversation."""

    def __init__(self) -> None:
        self._open: set[_Watch] = set()
        self._opening = 0
        self._stopped = False
        self._turn = asyncio.Lock()
        self._rested_at = 0.0

    async def follow(
        self, threads: WorkerThreads, begin: Callable[[], tuple[str, Watching]]
    ) -> AsyncGenerator[FileEvent, None]:
        """The changes that the Watching of `begin` sees; first `started` with its path. Ends, and
        closes it, when the conversation does. Raises Unavailable `too_many_watches`, and as
        `begin`."""
        if len(self._open) + self._opening >= WATCHES_MAX:
            raise errors.Unavailable(
                f"a conversation is watched {WATCHES_MAX} times at most",
                code="too_many_watches",
                hint="end one of the watches",
                details={"limit": WATCHES_MAX},
            )
        with threads.in_use():
            self._opening += 1
            try:
                base, watch = await self._begun(threads, begin)
            finally:
                self._opening -= 1
            try:
                yield FileEvent("started", base)
                if watch.watching.take_missed():
                    yield FileEvent("overflow", base)
                while not watch.stopped:
                    for change in await self._next(threads, watch):
                        yield change
            finally:
                watch.stop()
                self._open.discard(watch)
                await run_to_completion(threads.call(watch.watching.close))

    async def _begun(
        self, threads: WorkerThreads, begin: Callable[[], tuple[str, Watching]]
    ) -> tuple[str, _Watch]:
        async with long_call():
            opening = asyncio.ensure_future(threads.call(begin))
            try:
                base, watching = await run_to_completion(opening)
            except asyncio.CancelledError:
                if not opening.cancelled() and opening.exception() is None:
                    opening.result()[1].close()
                raise
        watch = _Watch(watching)
        if self._stopped:
            watch.stop()
        self._open.add(watch)
        return base, watch

    async def _next(self, threads: WorkerThreads, watch: _Watch) -> list[FileEvent]:
        await watch.readable.wait()
        if watch.stopped:
            return []
        await asyncio.sleep(_GATHER_S)
        async with self._turn:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rested_at - time.monotonic()):
                    await watch.ended.wait()
            if watch.stopped:
                return []
            began = time.monotonic()
            try:
                return await run_to_completion(threads.call(watch.watching.read))
            finally:
                now = time.monotonic()
                self._rested_at = now + min(_REST_MAX_S, _REST * (now - began))
                watch.arm()

    def stop(self) -> None:
        """End all of them."""
        self._stopped = True
        for watch in tuple(self._open):
            watch.stop()
