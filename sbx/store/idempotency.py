"""Replies to calls with an Idempotency-Key, kept for a repetition of the call.

The number of keys of one owner and the bytes of their replies are bounded. A key whose reply is not
kept still records that its call was done. A row's `owner` is a `Caller.space`, of which one owner
may have several.

A reservation is a row without a status. It learns the id of the run in the transaction that first
records the run, see `began`.
"""

import json
import sqlite3
from collections.abc import Iterable

from msgspec import Struct

from sbx.errors import Unavailable
from sbx.store import Store

ONE_MAX = 1 << 20  # bytes of a reply
BYTES_MAX = 64 << 20  # of the replies of an owner
KEYS_MAX = 100_000  # of an owner; each takes some 300 bytes
_RETRY_AFTER_S = 60.0

Slot = tuple[str, str]  # space and key


class StoredReply(Struct, frozen=True):
    """A reply, and the fingerprint of its call. `body` None: the body was not kept.

    `status` None: the call was reserved and has no reply. Then `run_id` is the run that it began,
    if one was recorded, and `run_status` the status of that run in the history.
    """

    fingerprint: str
    status: int | None
    body: bytes | None
    run_id: str | None = None
    run_status: str | None = None


class Reservation(Struct):
    """The key of a call. `is_new`: this call wrote its row, and may remove it."""

    slot: Slot
    is_new: bool = False


class _OwnerUsage(Struct):
    keys: int = 0
    bytes: int = 0


class StoredReplies:
    """The table. The writer's thread counts the rows of each owner in its transactions. After a
    failed attempt it counts again: the changes of the rows were rolled back, those of the counts
    were not."""

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
        self._usage: dict[str, _OwnerUsage] | None = None
        self._failures = 0  # of the store, when the rows were counted

    async def reserve(
        self, reservation: Reservation, fingerprint: str, *, at: float, since: float
    ) -> StoredReply | None:
        """Reserve a key for a call, and return None; or return the record of the earlier call.

        A reservation without a reply is not taken over: its call may have been done. Delete rows
        that are older than `since`.

        Raise Unavailable `too_many_idempotency_keys`.
        """
        space, key = reservation.slot

        def act(on: sqlite3.Connection) -> StoredReply | Unavailable | None:
            usage = self._counted(on)
            gone = on.execute(
                "DELETE FROM idempotency WHERE created_at < ? RETURNING owner, length(body)",
                (since,),
            )
            _subtract(usage, gone.fetchall())
            row = on.execute(
                "SELECT i.fingerprint, i.status, i.body, i.run_id, r.status AS run_status"
                " FROM idempotency AS i LEFT JOIN runs AS r ON r.id = i.run_id"
                " WHERE i.owner = ? AND i.key = ?",
                (space, key),
            ).fetchone()
            if row is not None:
                return StoredReply(*row)
            mine = usage.setdefault(_owner(space), _OwnerUsage())
            if mine.keys >= self._keys_max:
                return _too_many(self._keys_max)  # raised later, so that old rows stay deleted
            mine.keys += 1
            on.execute(
                "INSERT INTO idempotency (owner, key, fingerprint, created_at) VALUES (?, ?, ?, ?)",
                (space, key, fingerprint, at),
            )
            reservation.is_new = True
            return None

        kept = await self._store.write(act)
        if isinstance(kept, Unavailable):
            raise kept
        return kept

    async def keep(self, slot: Slot, fingerprint: str, status: int, body: bytes, at: float) -> None:
        """Keep the reply of a reserved call from `at` on, without its body if that is too long.
        Make room among the owner's oldest. If the reservation expired during the call, add its row
        again."""
        space, key = slot

        def act(on: sqlite3.Connection) -> None:
            erased = on.execute(
                "SELECT 1 FROM idempotency WHERE owner = ? AND key = ? AND erased", slot
            ).fetchone()
            kept = body if len(body) <= self._one_max and erased is None else None
            mine = self._counted(on).setdefault(_owner(space), _OwnerUsage())
            if kept is not None:
                if mine.bytes + len(kept) > self._bytes_max:
                    self._make_room(on, _owner(space), mine)
                mine.bytes += len(kept)
            updated = on.execute(
                "UPDATE idempotency SET status = ?, body = ?, created_at = ?"
                " WHERE owner = ? AND key = ?",
                (status, kept, at, space, key),
            )
            if updated.rowcount == 0:
                mine.keys += 1
                on.execute(
                    "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (space, key, fingerprint, status, kept, at),
                )

        await self._store.write(act)

    def release(self, reservation: Reservation) -> None:
        def act(on: sqlite3.Connection) -> None:
            if not reservation.is_new:
                return
            usage = self._counted(on)
            gone = on.execute(
                "DELETE FROM idempotency WHERE owner = ? AND key = ? AND status IS NULL"
                " RETURNING owner, length(body)",
                reservation.slot,
            )
            _subtract(usage, gone.fetchall())

        self._store.write_later(act)

    def _counted(self, on: sqlite3.Connection) -> dict[str, _OwnerUsage]:
        if self._usage is None or self._failures != self._store.failures:
            self._failures = self._store.failures
            self._usage = {}
            for space, keys, size in on.execute(
                "SELECT owner, count(*), sum(length(body)) FROM idempotency GROUP BY owner"
            ):
                mine = self._usage.setdefault(_owner(space), _OwnerUsage())
                mine.keys += keys
                mine.bytes += size or 0
        return self._usage

    def _make_room(self, on: sqlite3.Connection, owner: str, mine: _OwnerUsage) -> None:
        """Remove the bodies of the oldest replies, and some more, so that this is rare. Count them
        first: deletions erase bodies without a word to this class."""
        mine.bytes = on.execute(
            "SELECT coalesce(sum(length(body)), 0) FROM idempotency"
            " WHERE json_extract(owner, '$[1]') = ?",
            (owner,),
        ).fetchone()[0]
        goal = self._bytes_max * 3 // 4 - self._one_max
        rows = on.execute(
            "SELECT rowid, length(body) FROM idempotency INDEXED BY idempotency_by_age"
            " WHERE body IS NOT NULL AND json_extract(owner, '$[1]') = ? ORDER BY created_at",
            (owner,),
        )
        gone = []
        for number, size in rows:
            if mine.bytes <= goal:
                break
            gone.append((number,))
            mine.bytes -= size
        rows.close()
        on.executemany("UPDATE idempotency SET body = NULL WHERE rowid = ?", gone)


def began(on: sqlite3.Connection, slot: Slot, run_id: str) -> None:
    """Record the run that a reserved call began. Part of the transaction that records the run."""
    on.execute(
        "UPDATE idempotency SET run_id = ? WHERE owner = ? AND key = ? AND status IS NULL",
        (run_id, *slot),
    )


def _subtract(usage: dict[str, _OwnerUsage], gone: Iterable[tuple[str, int | None]]) -> None:
    for space, size in gone:
        owner = _owner(space)
        if (mine := usage.get(owner)) is not None:
            mine.keys -= 1
            mine.bytes -= size or 0
            if mine.keys <= 0:
                del usage[owner]


def _owner(space: str) -> str:
    owner: str = json.loads(space)[1]
    return owner


def _too_many(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} idempotency keys of this owner are kept, and there may be no more",
        code="too_many_idempotency_keys",
        hint="omit the key if a call may run twice, or wait: each is kept for an hour",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
