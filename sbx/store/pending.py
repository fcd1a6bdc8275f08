"""Writes that must not be lost: the ends of runs, and revocations.

A write that the store refuses (no space, a lock of another process) is kept in memory, and retried
until the store accepts it. The kept writes are bounded in number and in bytes.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from sbx.errors import Unavailable
from sbx.store import Store
from sbx.telemetry import metrics

Act = Callable[[sqlite3.Connection], object]
Kept = Callable[[], tuple[Act, int]]
OnDone = Callable[[bool], None]

_COUNT_MAX = 10_000
_BYTES_MAX = 64 << 20
_SIZE = 1024  # bytes of a write whose caller names no size
_RETRY_S = 0.05  # the first pause before a write is tried again; each one is twice as long
_RETRY_MAX_S = 1.0
_CLOSE_S = 10.0
_log = logging.getLogger(__name__)


class _Write(Struct, frozen=True):
    act: Act
    size: int
    on_done: OnDone | None

    def done(self, stored: bool) -> None:
        if self.on_done is not None:
            self.on_done(stored)


class PendingWrites:
    """Writes by a key, each a separate transaction that may run twice."""

    def __init__(
        self, store: Store, *, count_max: int = _COUNT_MAX, bytes_max: int = _BYTES_MAX
    ) -> None:
        self._store = store
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._waiting: dict[str, _Write] = {}
        self._size = 0
        self._refused = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    @property
    def count(self) -> int:
        return len(self._waiting)

    @property
    def refused(self) -> bool:
        """Return whether writes wait because the store refused the last one."""
        return self._refused and bool(self._waiting)

    @property
    def store_damaged(self) -> bool:
        return self._store.damaged

    async def write(
        self, key: str, act: Act, *, kept: Kept | None = None, on_done: OnDone | None = None
    ) -> bool:
        """Write now, and return whether the store has it; if not, it is retried.

        `kept` returns the act to keep in memory then, and its size in bytes. `on_done` gets later
        whether a kept write is stored. If too much waits already, the write is lost, and logged. A
        write whose caller is cancelled is kept, too. Raise the error of the store for a write that
        it can never accept.
        """
        earlier = self._remove(key)  # now, so that it is not tried again after this one
        try:
            await self._store.write(act)
        except asyncio.CancelledError:
            self._keep(key, act, kept, on_done)
            raise
        except Unavailable as error:
            self._note_refusal(error)
            self._keep(key, act, kept, on_done)
            return False
        except BaseException:
            if earlier is not None and key not in self._waiting:
                self._add(key, earlier)
            raise
        self._refused = False
        if earlier is not None:
            earlier.done(True)
        return True

    def discard(self, key: str) -> None:
        """Forget a write that waits, if there is one."""
        self._remove(key)

    async def flush(self) -> None:
        """Try every write that waits, in order, up to the first one that is refused."""
        for key, write in list(self._waiting.items()):
            if self._waiting.get(key) is not write:
                continue  # a newer one was written meanwhile, or is being written
            try:
                await self._store.write(write.act)
            except Unavailable as error:
                self._note_refusal(error)
                return
            except Exception as error:  # noqa: BLE001  # the border: the store never accepts this one
                self._lose(key, str(error))
                stored = False
            else:
                stored = True
            if self._waiting.get(key) is write:
                self._remove(key)
            write.done(stored)
        if self._refused:
            _log.info("the store accepts writes again, and all waiting ones are written")
        self._refused = False

    async def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write the waiting writes within `timeout_s`. The rest is lost, and logged by its key."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._waiting:
                    await self.flush()
                    if self._waiting:
                        await asyncio.sleep(_RETRY_S)
        for key, write in self._waiting.items():
            self._lose(key, "the service ended before the store accepted it")
            write.done(False)
        self._waiting.clear()

    def _keep(self, key: str, act: Act, kept: Kept | None, on_done: OnDone | None) -> None:
        self._remove(key)
        smaller, size = (act, _SIZE) if kept is None else kept()
        write = _Write(smaller, size, on_done)
        is_many = len(self._waiting) >= self._count_max
        if is_many or self._size + size > self._bytes_max or self._closed:
            self._lose(key, "the store refused it, and no more may wait")
            write.done(False)
            return
        self._add(key, write)

    def _add(self, key: str, write: _Write) -> None:
        self._waiting[key] = write
        self._size += write.size
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._retry())

    def _remove(self, key: str) -> _Write | None:
        write = self._waiting.pop(key, None)
        self._size -= 0 if write is None else write.size
        return write

    async def _retry(self) -> None:
        pause_s = _RETRY_S
        while self._waiting:
            await asyncio.sleep(pause_s)
            await self.flush()
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def _note_refusal(self, error: Unavailable) -> None:
        if not self._refused:
            _log.error("the store refuses writes, which are kept in memory: %s", error)
        self._refused = True

    def _lose(self, key: str, why: str) -> None:
        metrics.record_lost()
        _log.error("%s was not recorded and is lost: %s", key, why)
