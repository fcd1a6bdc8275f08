"""The rows of a damaged store, read table by table around the pages that cannot be read.

A table with a rowid is read in ranges: where a range fails after some rows, the rest of it is
halved, and both halves are read later, the larger ranges of a table first. So whatever can be
reached by a rowid is found. A table without one is read from both ends, and for each sandbox.
"""

import re
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

_LAST = (1 << 63) - 1
_FAILURES_MAX = 100_000  # of ranges in a table: a page that leads to all others may be damaged
_TABLE_S = 120.0
_NOT_COPIED = {"store_mark"}
_NAME = re.compile(r"[a-z_]+")


class SavedTable(Struct, frozen=True):
    """The number of saved and lost rows; `lost` is None if the damaged store gives no count."""

    saved: int
    lost: int | None


def salvage(damaged: sqlite3.Connection, fresh: sqlite3.Connection) -> dict[str, SavedTable]:
    """Copy all readable rows into the new store `fresh`, whose foreign keys are off."""
    damaged.execute("PRAGMA cell_size_check = ON")
    saved = {}
    for name, sql in fresh.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY rowid"
    ).fetchall():
        if _NAME.fullmatch(name) and not name.startswith("sqlite_") and name not in _NOT_COPIED:
            saved[name] = _table(damaged, fresh, name, has_rowid="WITHOUT ROWID" not in sql)
    return saved


def _table(
    damaged: sqlite3.Connection, fresh: sqlite3.Connection, name: str, *, has_rowid: bool
) -> SavedTable:
    columns = [column for column in _columns(fresh, name) if column in _columns(damaged, name)]
    if not columns:
        return SavedTable(0, None)
    fresh.execute("BEGIN")
    if has_rowid:
        rows, names = _by_rowid(damaged, name, columns), ["rowid", *columns]
    else:
        sandboxes = [row[0] for row in fresh.execute("SELECT id FROM sandboxes")]
        rows, names = _by_key(damaged, name, columns, sandboxes), columns
    places = ", ".join("?" * len(names))
    insert = f"INSERT OR IGNORE INTO {name} ({', '.join(names)}) VALUES ({places})"  # noqa: S608
    for row in rows:
        with suppress(sqlite3.IntegrityError):
            fresh.execute(insert, tuple(row))
    fresh.execute("COMMIT")
    saved = int(fresh.execute(f"SELECT count(*) FROM {name}").fetchone()[0])  # noqa: S608
    lost = None
    with suppress(sqlite3.DatabaseError):  # an index may know of all rows
        count = int(damaged.execute(f"SELECT count(*) FROM {name}").fetchone()[0])  # noqa: S608
        lost = max(0, count - saved)
    return SavedTable(saved, lost)


def _columns(on: sqlite3.Connection, table: str) -> list[str]:
    try:
        return [row[1] for row in on.execute(f"PRAGMA table_info({table})")]
    except sqlite3.DatabaseError:
        return []


def _by_rowid(
    on: sqlite3.Connection, table: str, columns: Sequence[str]
) -> Iterator[Sequence[object]]:
    query = (
        f"SELECT rowid, {', '.join(columns)} FROM {table} NOT INDEXED"  # noqa: S608
        " WHERE rowid BETWEEN ? AND ? ORDER BY rowid"
    )
    ranges = deque([(0, _LAST)])
    failures, end = 0, time.monotonic() + _TABLE_S
    while ranges and failures < _FAILURES_MAX and time.monotonic() < end:
        low, high = ranges.popleft()
        try:
            for row in on.execute(query, (low, high)):
                low = row[0] + 1
                yield row
        except sqlite3.DatabaseError:
            failures += 1
            if low < high:
                middle = (low + high) // 2
                ranges += [(low, middle), (middle + 1, high)]


def _by_key(
    on: sqlite3.Connection, table: str, columns: Sequence[str], sandboxes: Sequence[str]
) -> Iterator[Sequence[object]]:
    select = f"SELECT {', '.join(columns)} FROM {table}"  # noqa: S608
    keys = [row[1] for row in on.execute(f"PRAGMA table_info({table})") if row[5]]
    queries: list[tuple[str, tuple[str, ...]]] = [
        (f"{select} ORDER BY {', '.join(keys)}", ()),
        (f"{select} ORDER BY {', '.join(f'{key} DESC' for key in keys)}", ()),
    ]
    if "sandbox_id" in columns:
        queries += [(f"{select} WHERE sandbox_id = ?", (sandbox,)) for sandbox in sandboxes]
    for query, values in queries:
        try:
            yield from on.execute(query, values)
        except sqlite3.DatabaseError:
            continue
        if not values:
            return  # all of it, without an error
