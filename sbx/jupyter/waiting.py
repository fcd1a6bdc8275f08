"""The requests that wait for the kernel, in their order.

They are taken in while a cell runs, so that one that fails finds all that were sent behind it. Who
sends more than may wait is not read from until there is room again.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from sbx.jupyter.requests import Request

_MOST = 10_000
_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the channel that its reply goes to."""

    channel: str
    request: Request


class Waiting:
    """See the module."""

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque()
        self._size = 0
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, asked: Asked) -> None:
        await self._room.wait()
        self.add(asked)

    def add(self, asked: Asked) -> None:
        """Whether or not there is room."""
        self._asked.append(asked)
        self._count(asked.request.size)

    async def take(self) -> Asked:
        """The next one, as soon as there is one."""
        await self._some.wait()
        asked = self._asked.popleft()
        self._count(-asked.request.size)
        return asked

    def remove(self, kind: str | None = None) -> list[Asked]:
        """Take all out, or those of one kind."""
        removed = [asked for asked in self._asked if kind in (None, asked.request.kind)]
        self._asked = deque(
            asked for asked in self._asked if kind not in (None, asked.request.kind)
        )
        self._count(-sum(asked.request.size for asked in removed))
        return removed

    def _count(self, size: int) -> None:
        self._size += size
        self._some.set() if self._asked else self._some.clear()
        full = self._size >= _BYTES_MAX or len(self._asked) >= _MOST
        self._room.clear() if full else self._room.set()
