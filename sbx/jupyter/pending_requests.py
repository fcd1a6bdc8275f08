"""The requests that wait for the kernel, in their order.

They are received while a cell runs, so that a cell that fails can abort all requests sent after it.
If too many requests wait, no more are read from the clients until there is room again.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from sbx.jupyter.parse import KernelRequest

_MOST = 10_000
_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request, and the channel that its reply goes to."""

    channel: str
    request: KernelRequest


class PendingRequests:
    """See the module."""

    def __init__(self) -> None:
        self._entries: deque[QueuedRequest] = deque()
        self._size = 0
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, entry: QueuedRequest) -> None:
        await self._room.wait()
        self.add(entry)

    def add(self, entry: QueuedRequest) -> None:
        """Add a request even if the line is full."""
        self._entries.append(entry)
        self._count(entry.request.size)

    async def take(self) -> QueuedRequest:
        """Wait for the next request and remove it from the line."""
        await self._some.wait()
        entry = self._entries.popleft()
        self._count(-entry.request.size)
        return entry

    def remove(self, kind: str | None = None) -> list[QueuedRequest]:
        """Remove and return all requests, or those of one kind."""
        removed = [entry for entry in self._entries if kind in (None, entry.request.kind)]
        self._entries = deque(
            entry for entry in self._entries if kind not in (None, entry.request.kind)
        )
        self._count(-sum(entry.request.size for entry in removed))
        return removed

    def _count(self, size: int) -> None:
        self._size += size
        self._some.set() if self._entries else self._some.clear()
        full = self._size >= _BYTES_MAX or len(self._entries) >= _MOST
        self._room.clear() if full else self._room.set()
