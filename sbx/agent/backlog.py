"""The recorded events of a run for clients that connect late. The size is limited, and live output
is dropped first."""

import json
from collections import deque

from sbx.protocol.agent import Json

_EVENT_SIZE = 400  # bytes, the approximate overhead of one event


class EventLog:
    """Events by number, starting at 1, within about `most` bytes."""

    def __init__(self, most: int) -> None:
        self.last = 0
        self.size = 0
        self._limit = most
        self._kept: dict[int, tuple[Json, int]] = {}
        self._live: deque[int] = deque()  # the numbers of the events to drop first

    def add(self, event: Json, *, live: bool) -> None:
        """Keep one more event. `live` marks a piece of output that the end event repeats in
        full."""
        self.last += 1
        size = len(json.dumps(event, default=str)) + _EVENT_SIZE
        self._kept[self.last] = event, size
        self.size += size
        if live:
            self._live.append(self.last)
        while self.size > self._limit and len(self._kept) > 1:
            self._drop(self._live.popleft() if self._live else next(iter(self._kept)))

    def next(self, after: int) -> tuple[int, Json] | None:
        """Return the first kept event after this number, with its own number."""
        for number in range(max(0, after) + 1, self.last + 1):
            if (entry := self._kept.get(number)) is not None:
                return number, entry[0]
        return None

    def _drop(self, number: int) -> None:
        _, size = self._kept.pop(number)
        self.size -= size
