"""The history of a conversation in a store that holds messages as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sbx.agent.history import Kept
from sbx.agent.messages import Message, from_json, to_json
from sbx.errors import Broken

_PAGE = 1000


class KeptJson(Protocol):
    """A stored message as JSON, see `Kept`."""

    @property
    def seq(self) -> int: ...
    @property
    def message(self) -> Mapping[str, Any]: ...
    @property
    def created_at(self) -> float: ...
    @property
    def covers(self) -> int | None: ...


class MessageRecords(Protocol):
    """The messages of many conversations, each under a key. The runtime's `Messages` implements
    it."""

    async def append(
        self, key: str, messages: Sequence[Mapping[str, Any]], /, *, covers: int | None = None
    ) -> None: ...

    async def page(
        self, key: str, /, *, after: int = 0, limit: int = 50
    ) -> tuple[Sequence[KeptJson], bool]:
        """Return messages above `after`, and whether more follow. The page may be shorter than
        `limit`."""
        ...


class StoredHistory:
    """A `History` in a store. `append` raises the errors of the store: TooLarge, and NotFound for a
    deleted conversation."""

    def __init__(self, records: MessageRecords, key: str) -> None:
        self._records = records
        self._key = key

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        await self._records.append(
            self._key, [to_json(message) for message in messages], covers=covers
        )

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]:
        kept: list[Kept] = []
        more = limit != 0
        while more:
            page_size = _PAGE if limit is None else min(_PAGE, limit - len(kept))
            rows, more = await self._records.page(self._key, after=after, limit=page_size)
            kept += [self._kept(row) for row in rows]
            after = rows[-1].seq if rows else after
            more = more and len(kept) != limit
        return kept

    def _kept(self, row: KeptJson) -> Kept:
        try:
            return Kept(row.seq, from_json(row.message), row.created_at, row.covers)
        except ValueError as error:
            raise Broken(f"message {row.seq} of {self._key} cannot be read: {error}") from error
