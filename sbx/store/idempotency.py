"""Replies to calls with an Idempotency-Key, kept for a second call of the same.

The number of keys of one owner and the bytes of their replies are bounded. A key whose reply is not
kept still records that its call was done. A row's `owner` is a `Caller.space`, of which one owner
may have several.

A reservation is a row without a status. It learns the id of the run in the transaction that first
records the run, see `began`.
"""

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from sbx.errors import Unavailable
from sbx.store import Store

ONE_MAX = 1 << 20  # bytes of a reply
BYTES_MAX = 64 << 20  # of the replies of an owner
KEYS_MAX = 100_000  # of an owner; each takes some 300 bytes
_RETRY_AFTER_S = 60.0

Slot = tuple[str, str]  # space and key


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply, and the fingerprint of the call that it answers. `body` None: it was not kept.

    `status` None: the call was reserved and has no reply. Then `run_id` is the run that it began,
    as far as one was recorded, and `run_status` the status of that run in the history.
    """

    fingerprint: str
    status: int | None
    body: bytes | None
    run_id: str | None = None
    run_status: str | None = None


@dataclass(slots=True)
class Reservation:
    """A key that a call asks for. `made`: its row was written by this call, which may remove it."""

    slot: Slot
    made: bool = False


@dataclass(slots=True)
class _Held:
    keys: int = 0
    bytes: int = 0


class StoredReplies:
    """The table. The rows of each owner are counted in the writer's thread, by its transactions
    alone. After a failed attempt they are counted again: its changes of the rows were rolled back,
    and its changes of the counts were not."""

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
        self._failures = 0  # of the store, when the rows were counted

    async def reserve(
        self, reservation: Reservation, fingerprint: str, *, at: float, since: float
    ) -> StoredReply | None:
        """Reserve a key for a call that is about to be made; None when it is now reserved.

        Otherwise return the record of the earlier call. A reservation without a reply is not taken
        over: its call may have been done. Forget rows that are older than `since`.

        Raises Unavailable `too_many_idempotency_keys`.
        """
        space, key = reservation.slot

        def act(on: sqlite3.Connection) -> StoredReply | Unavailable | None:
            held = self._counted(on)
            gone = on.execute(
                "DELETE FROM idempotency WHERE created_at < ? RETURNING owner, length(body)",
                (since,),
            )
            _subtract(held, gone.fetchall())
            row = on.execute(
                "SELECT i.fingerprint, i.status, i.body, i.run_id, r.status AS run_status"
                " FROM idempotency AS i LEFT JOIN runs AS r ON r.id = i.run_id"
                " WHERE i.owner = ? AND i.key = ?",
                (space, key),
            ).fetchone()
            if row is not None:
                return StoredReply(*row)
            mine = held.setdefault(_owner(space), _Held())
            if mine.keys >= self._keys_max:
                return _too_many(self._keys_max)  # raised later, so that old rows stay forgotten
            mine.keys += 1
            on.execute(
                "INSERT INTO idempotency (owner, key, fingerprint, created_at) VALUES (?, ?, ?, ?)",
                (space, key, fingerprint, at),
            )
            reservation.made = True
            return None

        kept = await self._store.write(act)
        if isinstance(kept, Unavailable):
            raise kept
        return kept

    async def keep(self, slot: Slot, fingerprint: str, status: int, body: bytes, at: float) -> None:
        """The reply of a reserved call; it is kept from `at` on, without its body if that is too
        long. For a long one the oldest of its owner give way. A call may take longer than a
        reservation is kept: then the row is made again."""
        space, key = slot

        def act(on: sqlite3.Connection) -> None:
            kept = body if len(body) <= self._one_max else None
            held = self._counted(on).setdefault(_owner(space), _Held())
            if kept is not None:
                if held.bytes + len(kept) > self._bytes_max:
                    self._make_room(on, _owner(space), held)
                held.bytes += len(kept)
            updated = on.execute(
                "UPDATE idempotency SET status = ?, body = ?, created_at = ?"
                " WHERE owner = ? AND key = ?",
                (status, kept, at, space, key),
            )
            if updated.rowcount == 0:
                held.keys += 1
                on.execute(
                    "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (space, key, fingerprint, status, kept, at),
                )

        await self._store.write(act)

    def release(self, reservation: Reservation) -> None:
        """Give up the reservation of a call that failed, if this call made it."""

        def act(on: sqlite3.Connection) -> None:
            if not reservation.made:
                return
            held = self._counted(on)
            gone = on.execute(
                "DELETE FROM idempotency WHERE owner = ? AND key = ? AND status IS NULL"
                " RETURNING owner, length(body)",
                reservation.slot,
            )
            _subtract(held, gone.fetchall())

        self._store.write_later(act)

    def _counted(self, on: sqlite3.Connection) -> dict[str, _Held]:
        if self._held is None or self._failures != self._store.failures:
            self._failures = self._store.failures
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
        found = on.execute(
            "SELECT rowid, length(body) FROM idempotency INDEXED BY idempotency_by_age"
            " WHERE body IS NOT NULL AND json_extract(owner, '$[1]') = ? ORDER BY created_at",
            (owner,),
        )
        gone = []
        for number, size in found:
            if held.bytes <= goal:
                break
            gone.append((number,))
            held.bytes -= size
        found.close()
        on.executemany("UPDATE idempotency SET body = NULL WHERE rowid = ?", gone)


def began(on: sqlite3.Connection, slot: Slot, run_id: str) -> None:
    """Record the run that a reserved call began. Part of the transaction that records the run."""
    on.execute(
        "UPDATE idempotency SET run_id = ? WHERE owner = ? AND key = ? AND status IS NULL",
        (run_id, *slot),
    )


def _subtract(held: dict[str, _Held], gone: Iterable[tuple[str, int | None]]) -> None:
    for space, size in gone:
        owner = _owner(space)
        if (mine := held.get(owner)) is not None:
            mine.keys -= 1
            mine.bytes -= size or 0
            if mine.keys <= 0:
                del held[owner]


def _owner(space: str) -> str:
    """Return the owner of a `Caller.space`."""
    owner: str = json.loads(space)[1]
    return owner


def _too_many(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} idempotency keys of this owner are kept, and there may be no more",
        code="too_many_idempotency_keys",
        hint="leave the key out where a call may be made twice, or wait: each is kept for an hour",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
