"""The messages of chats, as JSON: appended together or not at all, in a fixed order."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from sbx.aio import Clock
from sbx.errors import NotFound, TooLarge
from sbx.store import Store
from sbx.store.errors import decoded

MESSAGE_MAX = 16 << 20  # bytes of JSON
CHAT_MAX = 256 << 20  # bytes of JSON, of all messages of a chat
_PAGE_MAX = 8 << 20  # bytes of JSON in one page, except for a single larger message
_LIST_MAX = 1000


class MessageRow(Struct, frozen=True):
    """`seq` rises by one from 1. A summary replaces all messages up to `covers`."""

    seq: int
    message: Mapping[str, Any]
    created_at: float
    covers: int | None = None


class Messages:
    """The messages of every chat, by the id of the chat. The limits are in bytes."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        message_max: int = MESSAGE_MAX,
        chat_max: int = CHAT_MAX,
    ) -> None:
        self._store = store
        self._clock = clock
        self._message_max = message_max
        self._chat_max = chat_max

    async def append(
        self, chat_id: str, messages: Sequence[Mapping[str, Any]], *, covers: int | None = None
    ) -> None:
        """Append all messages, or none.

        Raise TooLarge for one message, and `history_full` for all of a chat; NotFound for a chat
        that was deleted meanwhile.
        """
        await self._append(chat_id, [(message, covers) for message in messages])

    async def fill(
        self, chat_id: str, messages: Sequence[tuple[Mapping[str, Any], int | None]]
    ) -> bool:
        """Append all messages, each with the range that it covers, if the chat has none. Return
        whether it had none. Raise as `append`."""
        return await self._append(chat_id, messages, only_if_empty=True)

    async def _append(
        self,
        chat_id: str,
        messages: Sequence[tuple[Mapping[str, Any], int | None]],
        *,
        only_if_empty: bool = False,
    ) -> bool:
        at = self._clock.now()
        first = "SELECT 1 FROM messages WHERE chat_id = ? LIMIT 1"

        def act(on: sqlite3.Connection) -> bool:
            if only_if_empty and on.execute(first, (chat_id,)).fetchone() is not None:
                return False
            written = [
                (str(message["role"]), self._written(message), covers)
                for message, covers in messages
            ]
            size = sum(len(text) for _, text, _ in written)
            last, stored_bytes = _last_and_bytes(on, chat_id)
            if stored_bytes + size > self._chat_max:
                raise TooLarge(
                    f"the messages of a conversation may take {self._chat_max >> 20} MiB",
                    code="history_full",
                    hint="export it, and begin another conversation",
                    details={"limit": self._chat_max},
                )
            on.executemany(
                "INSERT INTO messages (chat_id, seq, role, message, covers, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (chat_id, last + number, role, text, covers, at)
                    for number, (role, text, covers) in enumerate(written, 1)
                ],
            )
            on.execute(
                "UPDATE chats SET last_seq = ?, bytes = ?, last_used_at = max(last_used_at, ?)"
                " WHERE id = ?",
                (last + len(written), stored_bytes + size, at, chat_id),
            )
            return True

        return await self._store.write(act)

    async def page(
        self, chat_id: str, *, after: int = 0, limit: int = 50
    ) -> tuple[list[MessageRow], bool]:
        """Return the messages with `seq` above `after`, and whether more follow. A page has 8 MiB
        at most. A missing chat has no messages."""
        limit = max(1, min(limit, _LIST_MAX))

        def act(on: sqlite3.Connection) -> tuple[list[MessageRow], bool]:
            rows = on.execute(
                "SELECT seq, message, created_at, covers FROM (SELECT *, sum(length(message))"
                " OVER (ORDER BY seq) - length(message) AS before FROM (SELECT * FROM messages"
                " WHERE chat_id = ? AND seq > ? ORDER BY seq LIMIT ?))"
                " WHERE before < ? ORDER BY seq",
                (chat_id, after, limit + 1, _PAGE_MAX),
            ).fetchall()[:limit]
            last = on.execute("SELECT last_seq FROM chats WHERE id = ?", (chat_id,)).fetchone()
            more = bool(rows) and rows[-1]["seq"] < last[0]
            return [_row(row) for row in rows], more

        return await self._store.read(act)

    async def last_seq(self, chat_id: str) -> int:
        """Return the number of the last message of a chat, or 0."""
        row = await self._store.row("SELECT last_seq FROM chats WHERE id = ?", chat_id)
        return 0 if row is None else row["last_seq"]

    def _written(self, message: Mapping[str, Any]) -> str:
        """Encode as ASCII: the output of a tool may have half a character, which is not UTF-8."""
        if _weight(message) <= self._message_max:  # or else it would take long to write
            text = json.dumps(message)
            if len(text) <= self._message_max:
                return text
        raise TooLarge(
            f"a message may take {self._message_max >> 20} MiB",
            hint="write long text into a file, and name the file",
            details={"limit": self._message_max},
        )


def _last_and_bytes(on: sqlite3.Connection, chat_id: str) -> tuple[int, int]:
    row = on.execute("SELECT last_seq, bytes FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if row is None:
        raise NotFound("the conversation was deleted", code="no_conversation")
    return row["last_seq"], row["bytes"]


def _weight(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(_weight(part) for part in value.values())
        case list() | tuple():
            return sum(_weight(part) for part in value)
    return 0


def _row(row: sqlite3.Row) -> MessageRow:
    return MessageRow(row["seq"], decoded(row["message"]), row["created_at"], row["covers"])
