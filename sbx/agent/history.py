"""Where the messages of conversations are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sbx.agent.messages import Message


@dataclass(frozen=True, slots=True)
class Kept:
    """A message in its place. `seq` rises by one from 1; `created_at` in seconds of the epoch. A
    summary stands for all up to `covers`."""

    seq: int
    message: Message
    created_at: float
    covers: int | None = None


class History(Protocol):
    """The messages of one conversation, in order. What `append` returned for is kept for good, and
    all messages of one call together or none."""

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None: ...

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]: ...


class MemoryHistory:
    """Kept by this object alone."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._kept: list[Kept] = []
        self._add(messages, None)

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        self._add(messages, covers)

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]:
        end = None if limit is None else after + limit
        return tuple(self._kept[after:end])

    def _add(self, messages: Sequence[Message], covers: int | None) -> None:
        for message in messages:
            self._kept.append(Kept(len(self._kept) + 1, message, 0.0, covers))
