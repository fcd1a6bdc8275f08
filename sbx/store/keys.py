"""Bearer keys and their owners. The store has only the hash of a key."""

import sqlite3

from msgspec import Struct

from sbx.store import Store, record


class KeyRecord(Struct, frozen=True):
    """A key without its secret. `last_used_at` is exact to a minute."""

    id: str
    owner: str
    name: str | None
    operator: bool
    created_at: float
    last_used_at: float | None = None
    revoked_at: float | None = None


async def add(store: Store, key: KeyRecord, digest: str) -> bool:
    """Store a key by its SHA-256 in hex. Return False if it exists, revoked or not."""

    def act(on: sqlite3.Connection) -> bool:
        inserted = on.execute(
            "INSERT INTO keys (id, owner, name, hash, operator, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (hash) DO NOTHING",
            (key.id, key.owner, key.name, digest, key.operator, key.created_at),
        )
        return inserted.rowcount == 1

    return await store.write(act)


async def get_by_digest(store: Store, digest: str) -> KeyRecord | None:
    row = await store.row("SELECT * FROM keys WHERE hash = ?", digest)
    return None if row is None else _record(row)


async def get(store: Store, key_id: str) -> KeyRecord | None:
    row = await store.row("SELECT * FROM keys WHERE id = ?", key_id)
    return None if row is None else _record(row)


async def every(store: Store) -> list[KeyRecord]:
    return [
        _record(row) for row in await store.rows("SELECT * FROM keys ORDER BY created_at, rowid")
    ]


def revoke(on: sqlite3.Connection, record_id: str, at: float) -> None:
    """Revoke a key, within a transaction. A revoked key stays unchanged."""
    on.execute(
        "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (at, record_id)
    )


def used(store: Store, key_id: str, at: float) -> None:
    store.write_later(
        lambda on: on.execute("UPDATE keys SET last_used_at = ? WHERE id = ?", (at, key_id))
    )


def _record(row: sqlite3.Row) -> KeyRecord:
    return record(KeyRecord, row, operator=bool(row["operator"]))
