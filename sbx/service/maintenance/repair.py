"""A new store from the readable rows of the present one, with the rows that others need.

A sandbox whose workspace row is lost stops the start of a service. Its directory is found by those
of its conversations, whose names are random, and it gets a new row; else it gets an empty
directory.
Rows that belong to a row that is lost are dropped. Directories that no row names stay where they
are: the next start moves them to `unclaimed`.
"""

import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec import Struct

from sbx.errors import SbxError, Unavailable
from sbx.service.maintenance import backup, place
from sbx.service.maintenance.backup import ReplacedStore
from sbx.service.maintenance.check import Directories, on_disk, sandboxes_without_workspace
from sbx.service.maintenance.salvage import SavedTable, salvage
from sbx.store import FILE_NAME, database, marks
from sbx.store.marks import Mark
from sbx.store.migrations import shipped, version_of


class Repaired(Struct, frozen=True):
    """`tables`: of a damaged store, the saved rows. `found_again`: sandboxes whose directory was
    found; `without_files`: those that begin with an empty one. `dropped`: rows of lost rows.
    Without `replaced` there was nothing to repair."""

    tables: dict[str, SavedTable]
    found_again: tuple[str, ...]
    without_files: tuple[str, ...]
    dropped: int
    replaced: ReplacedStore | None


def repair(data: Path) -> Repaired:
    """Repair the store, and keep a copy of the damaged one.

    Raise Conflict `service_running`, Unavailable `store_unreadable` if no row can be read, and the
    errors of a start for a store that does not belong to the directory.
    """
    path = data / FILE_NAME
    with place.as_owner(data), place.ended(data), backup.new_file(data) as fresh:
        problem, mark = _examined(data)
        tables: dict[str, SavedTable] = {}
        if problem is None:
            with database.translating(path):
                backup.copy(path, fresh)
        else:
            tables = _saved(path, fresh, problem)
        with database.translating(fresh), closing(database.open_writing(fresh, shipped())) as on:
            found_again, without_files = _with_workspaces(on, on_disk(data), data)
            dropped = _without_orphans(on)
        changed = (found_again, without_files, dropped)
        replaced = None
        if problem is not None or any(changed):
            rows = sum(table.saved for table in tables.values())
            replaced = backup.replace(data, fresh, mark, "store.repair", saved=rows)
        return Repaired(tables, found_again, without_files, dropped, replaced)


def _examined(data: Path) -> tuple[SbxError | None, Mark | None]:
    """Return the damage of the store, and its mark if it has none. Raises for a store that is
    missing, is newer, or does not belong here."""
    path, directory = data / FILE_NAME, marks.read_from_directory(data)
    mark, exists = None, not database.is_missing(path)
    if exists:
        try:
            with database.translating(path):
                mark = database.examine(path, shipped()[-1].version).mark
        except SbxError as error:
            if error.code == "store_corrupt":
                return error, None
            raise
    verdict = marks.judge(mark, directory, exists=exists, has_sandboxes=True)
    if (refusal := marks.refusal(verdict, path, mark, directory)) is not None:
        raise refusal
    return None, mark


def _saved(path: Path, fresh: Path, problem: SbxError) -> dict[str, SavedTable]:
    """Save the rows into a new store of the same version, whose tables have the same names."""
    try:
        with database.only_looking(path) as damaged:
            version = version_of(damaged)
            steps = [step for step in shipped() if step.version <= version] or shipped()
            database.make(fresh, steps)
            with closing(database.open_writing(fresh, steps)) as on:
                on.execute("PRAGMA foreign_keys = OFF")
                tables = salvage(damaged, on)
    except sqlite3.DatabaseError:
        tables = {}
    if not any(table.saved for table in tables.values()):
        restore = marks.command("restore", path.parent)
        raise Unavailable(
            f"no row of the store {path} can be read: {problem.message}",
            code="store_unreadable",
            hint=f"put a backup in its place: {restore} FILE; or begin with an empty store, which"
            f" keeps the files of all sandboxes apart: {restore} --empty",
        )
    return tables


def _with_workspaces(
    on: sqlite3.Connection, there: Directories, data: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give each sandbox without a workspace row a new one. Return the sandboxes whose directory was
    found, and the others."""
    found_again: list[str] = []
    without_files: list[str] = []
    claimed = {
        row[0] for row in on.execute("SELECT directory FROM workspaces WHERE deleted_at IS NULL")
    }
    of_conversation = {
        name: top for top, names in there.items() if top not in claimed for name in names
    }
    with _changing(on):
        for sandbox in sandboxes_without_workspace(on):
            row = on.execute("SELECT * FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()
            rows = on.execute(
                "SELECT directory FROM conversations WHERE sandbox_id IN"
                " (SELECT id FROM sandboxes WHERE workspace_id = ?)",
                (row["workspace_id"],),
            )
            names = (name for (name,) in rows.fetchall() if name in of_conversation)
            if (conversation := next(names, None)) is None:
                without_files.append(sandbox)
                directory, uid = secrets.token_hex(16), None
            else:
                found_again.append(sandbox)
                directory = of_conversation[conversation]
                uid = _uid(data, directory, conversation)
            _add_workspace(on, row, directory, uid)
    return tuple(found_again), tuple(without_files)


def _add_workspace(
    on: sqlite3.Connection, row: sqlite3.Row, directory: str, uid: int | None
) -> None:
    users = on.execute(
        "SELECT count(*) FROM sandboxes WHERE workspace_id = ?", (row["workspace_id"],)
    ).fetchone()[0]
    on.execute(
        "DELETE FROM workspaces WHERE id = ?", (row["workspace_id"],)
    )  # one that was deleted
    on.execute(
        "INSERT INTO workspaces (id, owner, managed_by, directory, uid, created_at,"
        " last_accessed_at, deleted_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row["workspace_id"],
            row["owner"],
            row["id"] if users == 1 else None,  # a shared workspace belongs to no sandbox
            directory,
            uid,
            row["created_at"],
            time.time(),
            row["deleted_at"] if users == 1 else None,
        ),
    )


def _uid(data: Path, directory: str, conversation: str) -> int | None:
    """Return the host uid of the files; None where it is that of the service."""
    try:
        files = os.lstat(data / "sandboxes" / directory / conversation / "files")
    except FileNotFoundError:  # a service was killed before it made them
        return None
    return None if files.st_uid == os.lstat(data).st_uid else files.st_uid


def _without_orphans(on: sqlite3.Connection) -> int:
    """Drop the rows that refer to a row that is lost; how many those were."""
    dropped = 0
    with _changing(on):
        while broken := {row[0] for row in on.execute("PRAGMA foreign_key_check")}:
            before = dropped
            for table in sorted(broken):
                for query in _orphans(on, table):
                    dropped += on.execute(query).rowcount
            if dropped == before:
                raise AssertionError(f"references of {broken} stay broken")
        on.execute(
            "UPDATE workspaces SET managed_by = NULL WHERE managed_by IS NOT NULL AND deleted_at IS"
            " NULL AND managed_by NOT IN (SELECT id FROM sandboxes)"
        )
    return dropped


def _orphans(on: sqlite3.Connection, table: str) -> Iterator[str]:
    keys: dict[int, list[sqlite3.Row]] = {}
    for row in on.execute(f"PRAGMA foreign_key_list({table})").fetchall():
        keys.setdefault(row["id"], []).append(row)
    for columns in keys.values():
        parent = columns[0]["table"]
        pairs = [(f"{table}.{column['from']}", f"parent.{column['to']}") for column in columns]
        has = " AND ".join(f"{child} IS NOT NULL" for child, _ in pairs)
        same = " AND ".join(f"{child} = {of_parent}" for child, of_parent in pairs)
        yield (
            f"DELETE FROM {table} WHERE {has} AND NOT EXISTS"  # noqa: S608
            f" (SELECT 1 FROM {parent} AS parent WHERE {same})"
        )


@contextmanager
def _changing(on: sqlite3.Connection) -> Iterator[None]:
    """One transaction, without the foreign keys that it repairs."""
    on.execute("PRAGMA foreign_keys = OFF")
    on.execute("BEGIN")
    try:
        yield
    except BaseException:
        on.execute("ROLLBACK")
        raise
    on.execute("COMMIT")
