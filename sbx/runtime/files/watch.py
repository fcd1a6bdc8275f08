"""The changes of the files of a conversation as events, until the conversation ends.

Unread changes stay in the bounded queue of Linux, which reports when it was full. A slow listener
costs no memory, and gets an `overflow` event.

Code can rename files faster than Python reads the changes, and a read holds the interpreter's lock:
the cells of all other sandboxes answered twenty times slower. Therefore the watches of a
conversation read one after another, and rest for nine times as long as each read took.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from sbx import errors
from sbx.aio import WorkerThreads, long_call, run_to_completion
from sbx.protocol.files import FileEvent
from sbx.workspace.watch import Watching

WATCHES_MAX = 16  # of one conversation
_GATHER_S = 0.05  # for the other changes of a burst
_REST = 9  # times the duration of the read
_REST_MAX_S = 2.0
_REPLACED_S = 10.0  # from the write of a file to the report of its watch


class _Watch:
    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.ended = asyncio.Event()
        self.readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.arm()

    def arm(self) -> None:
        """Set `readable` once: a descriptor that is not read for a while would wake the loop in
        each of its turns."""
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
        """Wake the listener, which ends. A second call does nothing."""
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
        self._replaced: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @contextmanager
    def replacing(self, path: str) -> Iterator[None]:
        """Report the write of this existing file as a change: the rename of a write in one step
        looks like a new file."""
        now = time.monotonic()
        self._replaced = {name: end for name, end in self._replaced.items() if end > now}
        self._replaced[path] = math.inf
        try:
            yield
        finally:
            self._replaced[path] = time.monotonic() + _REPLACED_S

    def _as_written(self, change: FileEvent) -> FileEvent:
        is_write = self._replaced.get(change.path, 0.0) > time.monotonic()
        return replace(change, kind="modified") if change.kind == "created" and is_write else change

    async def follow(
        self, threads: WorkerThreads, begin: Callable[[], tuple[str, Watching]]
    ) -> AsyncGenerator[FileEvent, None]:
        """Yield `started` with the path, then the changes that the Watching of `begin` sees. Close
        it at the end of the conversation. Raise Unavailable `too_many_watches`, and as `begin`."""
        if len(self._open) + self._opening >= WATCHES_MAX:
            raise errors.Unavailable(
                f"a conversation has at most {WATCHES_MAX} watches",
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
                        yield self._as_written(change)
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
            started_at = time.monotonic()
            try:
                return await run_to_completion(threads.call(watch.watching.read))
            finally:
                now = time.monotonic()
                self._rested_at = now + min(_REST_MAX_S, _REST * (now - started_at))
                watch.arm()

    def stop(self) -> None:
        self._stopped = True
        for watch in tuple(self._open):
            watch.stop()
