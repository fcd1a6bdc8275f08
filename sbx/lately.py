"""What ended lately, and is still told to who asks."""

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from sbx.aio import Clock

K = TypeVar("K")
T = TypeVar("T")
_TOGETHER_S = 1.0  # so that what ended together is forgotten together


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    what: T
    at: float
    size: int


class Lately(Generic[K, T]):
    """Keeps for `seconds` what it is given, the newest `size_max` bytes of it; for one event loop.
    To be closed."""

    def __init__(self, clock: Clock, *, seconds: float, size_max: int) -> None:
        self._clock = clock
        self._seconds = seconds
        self._size_max = size_max
        self._kept: dict[K, _Kept[T]] = {}  # the oldest first
        self._size = 0
        self._forgetting: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Of all that is kept, in bytes."""
        return self._size

    def keep(self, key: K, what: T, size: int) -> None:
        """`size` in bytes, about. What had this key is forgotten."""
        if self._closed:
            return
        self.forget(key)
        self._kept[key] = _Kept(what, self._clock.now(), size)
        self._size += size
        while self._size > self._size_max:
            self.forget(next(iter(self._kept)))
        if self._kept and self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_in_time())

    def get(self, key: K) -> T | None:
        kept = self._kept.get(key)
        if kept is None or self._clock.now() - kept.at > self._seconds:
            return None
        return kept.what

    def forget(self, key: K) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._size -= kept.size

    async def close(self) -> None:
        """Forget all of it, and keep nothing more."""
        self._closed = True
        self._kept.clear()
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.wait([self._forgetting])

    async def _forget_in_time(self) -> None:
        """As long as there is something to be forgotten."""
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            left_s = oldest.at + self._seconds - self._clock.now()
            if left_s < 0:
                self.forget(key)
            else:
                await self._clock.sleep(left_s + _TOGETHER_S)
        self._forgetting = None
