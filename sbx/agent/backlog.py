"""What was told already, for who comes late: bounded, and the live output is let go first."""

import json
from collections import deque

from sbx.protocol.agent import Json

_EVENT_SIZE = 400  # bytes, about, of what holds it


class Backlog:
    """Events by their numbers, the first being 1, within about `most` bytes."""

    def __init__(self, most: int) -> None:
        self.last = 0
        self.size = 0
        self._most = most
        self._kept: dict[int, tuple[Json, int]] = {}
        self._live: deque[int] = deque()  # the numbers of what may be let go first

    def add(self, event: Json, *, live: bool) -> None:
        """Keep one more. `live`: a piece of output, which its end tells whole."""
        self.last += 1
        size = len(json.dumps(event, default=str)) + _EVENT_SIZE
        self._kept[self.last] = event, size
        self.size += size
        if live:
            self._live.append(self.last)
        while self.size > self._most and len(self._kept) > 1:
            self._let_go(self._live.popleft() if self._live else next(iter(self._kept)))

    def next(self, after: int) -> tuple[int, Json] | None:
        """The first one after this number that is kept."""
        for number in range(max(0, after) + 1, self.last + 1):
            if (found := self._kept.get(number)) is not None:
                return number, found[0]
        return None

    def _let_go(self, number: int) -> None:
        _, size = self._kept.pop(number)
        self.size -= size
