"""Numbered events that clients follow from a distance, and continue to follow after a disconnect.

The first event has the number 1, and a number names the same event each time. A client that
reconnects passes the number of the last event that it received, and gets the later ones.

    EventLog       the events of one run, in memory
    EndedRuns      the runs that ended a short time ago, for clients that follow them again
    ChangeSignal   a wake-up for readers of a log that is stored elsewhere: in a table, in a file
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from sbx.aio import Clock

E = TypeVar("E")
K = TypeVar("K", bound=Hashable)

RETENTION_S = 60.0  # for which a service keeps the log of a run that has ended


class ChangeSignal:
    """Wake all tasks that wait for the next change."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    @property
    def next(self) -> asyncio.Event:
        """Return the event that the next change sets. Get it before you read the log: a change
        that happens during the read is then not missed."""
        if self._next is None:
            self._next = asyncio.Event()
        return self._next

    def notify(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None


class EventLog(Generic[E]):
    """The events of one run. Any number of tasks can follow it.

    With `size_max`, the log keeps about this many bytes: it drops droppable events first, then the
    oldest ones, and the numbers that remain have gaps. The size of an event is the one that the
    caller of `append` passes. The caller bounds a log without `size_max`.
    """

    def __init__(self, size_max: int | None = None) -> None:
        self.closed = False
        self.size = 0
        self._size_max = size_max
        self._events: list[E | None] = []  # None is a dropped event
        self._sizes: dict[int, int] = {}  # of a log with `size_max`, by number, the oldest first
        self._droppable: deque[int] = deque()
        self._error: BaseException | None = None
        self._changes = ChangeSignal()
        self._end: asyncio.Event | None = None  # made by the first waiter

    @property
    def last(self) -> int:
        """The number of the newest event; 0 without events."""
        return len(self._events)

    def append(self, event: E, size: int = 0, *, droppable: bool = False) -> None:
        """Add an event with the next number. A `droppable` event repeats in a later one."""
        self._events.append(event)
        if self._size_max is not None:
            self._keep(size, self._size_max, droppable)
        self._changes.notify()

    def close(self, error: BaseException | None = None) -> None:
        """Declare that no event will follow. Followers end after the last event; they raise
        `error`, if there is one."""
        self.closed = True
        self._error = error
        self._changes.notify()
        if self._end is not None:
            self._end.set()

    async def next(self, after: int) -> tuple[int, E] | None:
        """Wait for the first event with a number above `after`, and return both. Return None, or
        raise the error of `close`, if the log is closed and has no such event."""
        after = max(0, after)
        while True:
            last = len(self._events)
            for number in range(after + 1, last + 1):
                if (event := self._events[number - 1]) is not None:
                    return number, event
            after = max(after, last)
            if self.closed:
                if self._error is not None:
                    raise self._error
                return None
            await self._changes.next.wait()

    async def follow(self, after: int = 0) -> AsyncGenerator[tuple[int, E], None]:
        """Yield the events with numbers above `after`, as `next` returns them."""
        while (entry := await self.next(after)) is not None:
            after = entry[0]
            yield entry

    async def read(self, after: int, limit: int) -> list[E]:
        """Wait as `next` does, and return up to `limit` events. At the end the list is empty."""
        entry = await self.next(after)
        if entry is None:
            return []
        first = entry[0] - 1
        return [event for event in self._events[first : first + limit] if event is not None]

    async def wait_closed(self) -> None:
        if not self.closed:
            self._end = self._end or asyncio.Event()
            await self._end.wait()

    def _keep(self, size: int, size_max: int, droppable: bool) -> None:
        number = len(self._events)
        self._sizes[number] = size
        self.size += size
        if droppable:
            self._droppable.append(number)
        while self.size > size_max and len(self._sizes) > 1:
            oldest = self._droppable.popleft() if self._droppable else next(iter(self._sizes))
            self._events[oldest - 1] = None
            self.size -= self._sizes.pop(oldest)


class _EndedRun(NamedTuple, Generic[E]):
    run: E
    owner: str
    size: int
    until: float


class EndedRuns(Generic[K, E]):
    """The runs that ended less than `seconds` ago, with at most `size_max` bytes together.

    The owner with the most bytes makes room, by its oldest run. So a run of an owner that is within
    an equal share stays, whatever the others keep.
    """

    def __init__(self, clock: Clock, size_max: int, seconds: float = RETENTION_S) -> None:
        self._clock = clock
        self._size_max = size_max
        self._seconds = seconds
        self._runs: dict[K, _EndedRun[E]] = {}  # the oldest first
        self._keys: defaultdict[str, dict[K, None]] = defaultdict(dict)  # of each owner
        self._sizes: Counter[str] = Counter()  # by owner
        self.size = 0

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, key: K, run: E, *, owner: str, size: int) -> None:
        """Keep a run that has just ended, unless it alone has more than `size_max` bytes."""
        self.pop(key)
        self._expire()
        if size > self._size_max:
            return
        self._runs[key] = _EndedRun(run, owner, size, self._clock.now() + self._seconds)
        self._keys[owner][key] = None
        self._sizes[owner] += size
        self.size += size
        while self.size > self._size_max:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.pop(next(iter(self._keys[largest])))

    def get(self, key: K) -> E | None:
        self._expire()
        ended = self._runs.get(key)
        return None if ended is None else ended.run

    def pop(self, key: K) -> None:
        """Forget a run, if it is there."""
        ended = self._runs.pop(key, None)
        if ended is None:
            return
        self.size -= ended.size
        self._sizes[ended.owner] -= ended.size
        del self._keys[ended.owner][key]
        if not self._keys[ended.owner]:
            del self._keys[ended.owner], self._sizes[ended.owner]

    def discard(self, matches: Callable[[E], bool]) -> None:
        """Forget each run for which `matches` is true."""
        for key in [key for key, ended in self._runs.items() if matches(ended.run)]:
            self.pop(key)

    def clear(self) -> None:
        self.discard(lambda _run: True)

    def _expire(self) -> None:
        now = self._clock.now()
        while self._runs:
            key, oldest = next(iter(self._runs.items()))
            if oldest.until > now:
                return
            self.pop(key)
