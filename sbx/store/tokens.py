"""Tokens that were given out, by their id (`jti`): their bounds, and whether they still hold."""

import json
import sqlite3
from dataclasses import dataclass

from sbx.store import Store, record, values


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token's bounds. What is None does not bound it."""

    id: str
    owner: str
    user_id: str
    agent_id: str | None
    conversation_id: str | None
    scopes: frozenset[str] | None
    created_at: float
    expires_at: float
    revoked_at: float | None = None


async def add(store: Store, token: TokenRecord) -> None:
    new = [json.dumps(sorted(v)) if isinstance(v, frozenset) else v for v in values(token)]
    await store.write(
        lambda on: on.execute(
            "INSERT INTO tokens (id, owner, user_id, agent_id, conversation_id, scopes,"
            " created_at, expires_at, revoked_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            new,
        )
    )


async def of_id(store: Store, token_id: str) -> TokenRecord | None:
    """The token, whether or not it still holds."""
    row = await store.row("SELECT * FROM tokens WHERE id = ?", token_id)
    return None if row is None else _record(row)


async def every(store: Store, owner: str | None) -> list[TokenRecord]:
    """All tokens of an owner, or of everyone; ended ones too, oldest first."""
    rows = await store.rows(
        "SELECT * FROM tokens WHERE :owner IS NULL OR owner = :owner ORDER BY created_at, rowid",
        owner=owner,
    )
    return [_record(row) for row in rows]


def revoke(on: sqlite3.Connection, record_id: str, at: float) -> None:
    """Within a transaction; one that was revoked before stays as it is."""
    on.execute(
        "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (at, record_id)
    )


async def forget_ended(store: Store, before: float) -> int:
    """Remove the records of tokens that expired before `before`; how many."""
    return await store.write(
        lambda on: on.execute("DELETE FROM tokens WHERE expires_at < ?", (before,)).rowcount
    )


def _record(row: sqlite3.Row) -> TokenRecord:
    scopes = row["scopes"]
    return record(
        TokenRecord, row, scopes=None if scopes is None else frozenset(json.loads(scopes))
    )
