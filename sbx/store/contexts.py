"""The contexts of conversations beside `default`, which every conversation has."""

import sqlite3
from dataclasses import dataclass

from sbx.store import Store


@dataclass(frozen=True, slots=True)
class ContextRow:
    sandbox_id: str
    conversation: str
    name: str
    created_at: float


def add(on: sqlite3.Connection, row: ContextRow) -> bool:
    """False where its conversation is not there any more: then nothing was done."""
    added = on.execute(
        "INSERT INTO contexts (sandbox_id, conversation, name, created_at)"
        " SELECT sandbox_id, name, ?, ? FROM conversations WHERE sandbox_id = ? AND name = ?"
        " ON CONFLICT DO UPDATE SET created_at = excluded.created_at",
        (row.name, row.created_at, row.sandbox_id, row.conversation),
    )
    return added.rowcount == 1


def drop(on: sqlite3.Connection, sandbox_id: str, conversation: str, name: str) -> None:
    """One that is not there is nothing."""
    on.execute(
        "DELETE FROM contexts WHERE sandbox_id = ? AND conversation = ? AND name = ?",
        (sandbox_id, conversation, name),
    )


async def of_sandbox(store: Store, sandbox_id: str) -> dict[str, set[str]]:
    """The names of contexts, by conversation."""
    rows = await store.rows(
        "SELECT conversation, name FROM contexts WHERE sandbox_id = ?", sandbox_id
    )
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["conversation"], set()).add(row["name"])
    return found
