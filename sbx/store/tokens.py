"""Issued tokens by their id (`jti`), with their bounds and their validity."""

import json
import sqlite3

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store, record
from sbx.store.errors import decoded


class TokenRecord(Struct, frozen=True):
    """The bounds of a token. None does not limit. `key_id`: the key that made it, if one did."""

    id: str
    owner: str
    user_id: str
    agent_id: str | None
    conversation_id: str | None
    scopes: frozenset[str] | None
    created_at: float
    expires_at: float
    revoked_at: float | None = None
    key_id: str | None = None


async def add(store: Store, token: TokenRecord, most: int) -> bool:
    """Store a token; False if its owner has `most` valid ones. As many that have ended stay."""
    new = [json.dumps(sorted(v)) if isinstance(v, frozenset) else v for v in astuple(token)]

    def act(on: sqlite3.Connection) -> bool:
        ended = "(revoked_at IS NOT NULL OR expires_at <= ?)"
        whose = token.created_at, token.owner
        count, over = on.execute(
            f"SELECT count(*), total({ended}) FROM tokens WHERE owner = ?",  # noqa: S608
            whose,
        ).fetchone()
        if count - over >= most:
            return False
        if over >= most:
            on.execute(f"DELETE FROM tokens WHERE {ended} AND owner = ?", whose)  # noqa: S608
        on.execute(
            "INSERT INTO tokens (id, owner, user_id, agent_id, conversation_id, scopes,"
            " created_at, expires_at, revoked_at, key_id)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            new,
        )
        return True

    return await store.write(act)


async def get(store: Store, token_id: str) -> TokenRecord | None:
    row = await store.row("SELECT * FROM tokens WHERE id = ?", token_id)
    return None if row is None else _record(row)


async def every(store: Store, owner: str | None) -> list[TokenRecord]:
    """Return all tokens of an owner, or of all owners, also invalid ones, oldest first."""
    rows = await store.rows(
        "SELECT * FROM tokens WHERE :owner IS NULL OR owner = :owner ORDER BY created_at, rowid",
        owner=owner,
    )
    return [_record(row) for row in rows]


def revoke(on: sqlite3.Connection, record_id: str, at: float) -> None:
    """Revoke a token, within a transaction. A revoked token stays unchanged."""
    on.execute(
        "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (at, record_id)
    )


async def forget_ended(store: Store, before: float) -> int:
    return await store.write(
        lambda on: on.execute("DELETE FROM tokens WHERE expires_at < ?", (before,)).rowcount
    )


def _record(row: sqlite3.Row) -> TokenRecord:
    scopes = row["scopes"]
    return record(TokenRecord, row, scopes=None if scopes is None else frozenset(decoded(scopes)))
