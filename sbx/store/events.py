"""The events of sandboxes with their times and causes. The last event is the tombstone."""

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from sbx.store import Store, record
from sbx.store.errors import decoded


class EventRow(Struct, frozen=True):
    """`seq` rises over all sandboxes and is never used twice."""

    seq: int
    sandbox_id: str
    at: float
    type: str
    cause: str | None
    details: Mapping[str, Any]


def add(
    on: sqlite3.Connection,
    sandbox_id: str,
    at: float,
    kind: str,
    cause: str | None = None,
    **details: Any,
) -> EventRow:
    inserted = on.execute(
        "INSERT INTO events (sandbox_id, at, type, cause, details) VALUES (?, ?, ?, ?, ?)",
        (sandbox_id, at, kind, cause, json.dumps(details)),
    )
    return EventRow(inserted.lastrowid or 0, sandbox_id, at, kind, cause, details)


def add_expiry(on: sqlite3.Connection, sandbox_id: str, at: float) -> None:
    """Record the expiry once, also if two runtimes see it, and once more after each restoration."""
    last = on.execute(
        "SELECT type FROM events WHERE sandbox_id = ? AND type IN ('expired', 'restored')"
        " ORDER BY seq DESC LIMIT 1",
        (sandbox_id,),
    ).fetchone()
    if last is None or last["type"] == "restored":
        add(on, sandbox_id, at, "expired")


async def list_for_sandbox(
    store: Store,
    sandbox_id: str,
    *,
    after: int = 0,
    limit: int = 100,
    conversation: str | None = None,
) -> list[EventRow]:
    """Return the events with `seq` above `after`, in order. With a `conversation`, return those of
    the whole sandbox and of this conversation."""
    rows = await store.rows(
        "SELECT * FROM events WHERE sandbox_id = :sandbox AND seq > :after"
        " AND (:conversation IS NULL OR :conversation ="
        "  COALESCE(json_extract(details, '$.conversation'), :conversation))"
        " ORDER BY seq LIMIT :limit",
        sandbox=sandbox_id,
        after=after,
        conversation=conversation,
        limit=limit,
    )
    return [_row(row) for row in rows]


def _row(row: sqlite3.Row) -> EventRow:
    return record(EventRow, row, details=decoded(row["details"]))
