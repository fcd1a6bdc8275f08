"""The numbered steps from an empty file to the schema of today.

A step is a file `NNNN.sql` next to this one. Its number is the version of the store after it; the
store carries that number as `PRAGMA user_version`. Each step is one transaction: a crash in the
middle leaves the version before it.
"""

import sqlite3
from collections.abc import Sequence
from functools import cache
from importlib import resources

from msgspec import Struct

APPLICATION_ID = 0x53425853  # "SBXS": marks a store of sbx among other SQLite files
BACKUP_ID = 0x53425842  # "SBXB": a copy by `sbx store backup`; no service starts from it


class Migration(Struct, frozen=True):
    version: int
    sql: str


@cache
def shipped() -> tuple[Migration, ...]:
    files = sorted(
        (item for item in resources.files(__package__).iterdir() if item.name.endswith(".sql")),
        key=lambda item: item.name,
    )
    steps = tuple(Migration(int(item.name[:4]), item.read_text("utf-8")) for item in files)
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    return steps


def version_of(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def migrate(connection: sqlite3.Connection, steps: Sequence[Migration]) -> None:
    """Run every step that is new for this store. Foreign keys must be off: a step may rebuild a
    table that others refer to. The connection must be in autocommit mode."""
    for step in steps:
        if step.version > version_of(connection):
            _take(connection, step)


def _take(connection: sqlite3.Connection, step: Migration) -> None:
    try:
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{step.sql}\n"
            f"PRAGMA application_id = {APPLICATION_ID};\n"
            f"PRAGMA user_version = {step.version};\n"
        )
        if broken := connection.execute("PRAGMA foreign_key_check").fetchall():
            raise sqlite3.IntegrityError(f"version {step.version} breaks {len(broken)} references")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
