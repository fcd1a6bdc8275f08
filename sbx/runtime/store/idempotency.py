"""Replies to calls with an Idempotency-Key, kept for a second call of the same.

What one owner may have kept is bounded: in keys, and in bytes of replies. A key whose reply is not
kept still says that its call was done. A row's `owner` is a `Caller.space`, of which one owner may
have several.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from sbx.errors import Unavailable
from sbx.runtime.store import Store

T = TypeVar("T")
ONE_MAX = 1 << 20  # bytes of a reply
BYTES_MAX = 64 << 20  # of the replies of an owner
KEYS_MAX = 100_000  # of an owner; each takes some 300 bytes
_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class KeptReply:
    """A reply, and the fingerprint of the call that it answers. `body` None: it was not kept."""

    fingerprint: str
    status: int
    body: bytes | None


@dataclass(slots=True)
class _Held:
    keys: int = 0
    bytes: int = 0


class KeptReplies:
    """The table. What each owner holds is counted in the writer's thread, by its transactions
    alone; one that fails has it counted anew."""

    def __init__(
        self,
        store: Store,
        *,
        one_max: int = ONE_MAX,
        bytes_max: int = BYTES_MAX,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._store = store
        self._one_max = one_max
        self._bytes_max = bytes_max
        self._keys_max = keys_max
        self._held: dict[str, _Held] | None = None

    async def reserve(
        self, space: str, key: str, fingerprint: str, *, at: float, since: float
    ) -> KeptReply | None:
        """Reserve a key for a call that is about to be made; None when it is now reserved.

        Else the reply that is kept for it. A reservation without a reply is taken over: whoever
        made it is gone, as one process alone uses a store and knows which calls it is in. What is
        older than `since` is forgotten here.

        Raises Unavailable `too_many_idempotency_keys`.
        """

        def act(on: sqlite3.Connection) -> KeptReply | Unavailable | None:
            held = self._counted(on)
            gone = on.execute(
                "DELETE FROM idempotency WHERE created_at < ? RETURNING owner, length(body)",
                (since,),
            )
            _subtract(held, gone.fetchall())
            row = on.execute(
                "SELECT * FROM idempotency WHERE owner = ? AND key = ?", (space, key)
            ).fetchone()
            if row is not None and row["status"] is not None:
                return KeptReply(row["fingerprint"], row["status"], row["body"])
            mine = held.setdefault(_owner(space), _Held())
            if row is None:
                if mine.keys >= self._keys_max:
                    return _too_many(self._keys_max)  # raised later: what was forgotten stays so
                mine.keys += 1
            on.execute(
                "INSERT OR REPLACE INTO idempotency (owner, key, fingerprint, created_at)"
                " VALUES (?, ?, ?, ?)",
                (space, key, fingerprint, at),
            )
            return None

        kept = await self._store.write(lambda on: self._whole(act, on))
        if isinstance(kept, Unavailable):
            raise kept
        return kept

    async def keep(self, space: str, key: str, status: int, body: bytes, at: float) -> None:
        """The reply of a reserved call; it is kept from `at` on, without its body if that is too
        long. For a long one the oldest of its owner give way."""

        def act(on: sqlite3.Connection) -> None:
            kept = body if len(body) <= self._one_max else None
            if kept is not None:
                held = self._counted(on).setdefault(_owner(space), _Held())
                if held.bytes + len(kept) > self._bytes_max:
                    self._make_room(on, _owner(space), held)
                held.bytes += len(kept)
            on.execute(
                "UPDATE idempotency SET status = ?, body = ?, created_at = ?"
                " WHERE owner = ? AND key = ?",
                (status, kept, at, space, key),
            )

        await self._store.write(lambda on: self._whole(act, on))

    def release(self, space: str, key: str) -> None:
        """Give up the reservation of a call that failed."""

        def act(on: sqlite3.Connection) -> None:
            held = self._counted(on)
            gone = on.execute(
                "DELETE FROM idempotency WHERE owner = ? AND key = ? AND status IS NULL"
                " RETURNING owner, length(body)",
                (space, key),
            )
            _subtract(held, gone.fetchall())

        self._store.write_later(lambda on: self._whole(act, on))

    def _whole(self, act: Callable[[sqlite3.Connection], T], on: sqlite3.Connection) -> T:
        try:
            return act(on)
        except sqlite3.Error:
            self._held = None  # what was counted is rolled back
            raise

    def _counted(self, on: sqlite3.Connection) -> dict[str, _Held]:
        if self._held is None:
            self._held = {}
            for space, keys, size in on.execute(
                "SELECT owner, count(*), sum(length(body)) FROM idempotency GROUP BY owner"
            ):
                held = self._held.setdefault(_owner(space), _Held())
                held.keys += keys
                held.bytes += size or 0
        return self._held

    def _make_room(self, on: sqlite3.Connection, owner: str, held: _Held) -> None:
        """Take the bodies of the oldest replies away, and some more, so that it is done rarely."""
        goal = self._bytes_max * 3 // 4 - self._one_max
        spaces = json.dumps([owner])[:-1] + ","
        found = on.execute(
            "SELECT rowid, length(body) FROM idempotency INDEXED BY idempotency_by_age"
            " WHERE body IS NOT NULL AND (owner = ? OR substr(owner, 1, ?) = ?)"
            " ORDER BY created_at",
            (owner, len(spaces), spaces),
        )
        gone = []
        for number, size in found:
            if held.bytes <= goal:
                break
            gone.append((number,))
            held.bytes -= size
        found.close()
        on.executemany("UPDATE idempotency SET body = NULL WHERE rowid = ?", gone)


def _subtract(held: dict[str, _Held], gone: Iterable[tuple[str, int | None]]) -> None:
    for space, size in gone:
        owner = _owner(space)
        if (mine := held.get(owner)) is not None:
            mine.keys -= 1
            mine.bytes -= size or 0
            if mine.keys <= 0:
                del held[owner]


def _owner(space: str) -> str:
    """Whose space it is, see `Caller.space`."""
    if space.startswith("["):
        try:
            return str(json.loads(space)[0])
        except (ValueError, LookupError):
            pass
    return space


def _too_many(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} idempotency keys of this owner are kept, and there may be no more",
        code="too_many_idempotency_keys",
        hint="leave the key out where a call may be made twice, or wait: each is kept for an hour",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
