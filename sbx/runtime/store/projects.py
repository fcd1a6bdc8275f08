"""Projects: working directories of the host, each with a name. The directory is nobody's here."""

import sqlite3
from dataclasses import dataclass

from sbx.runtime.store import Store


@dataclass(frozen=True, slots=True)
class ProjectRow:
    id: str
    owner: str
    name: str
    working_directory: str
    sandbox_enabled: bool
    created_at: float


_PROJECT = "id, owner, name, working_directory, sandbox_enabled, created_at"


def add(on: sqlite3.Connection, row: ProjectRow) -> None:
    on.execute(
        f"INSERT INTO projects ({_PROJECT}) VALUES (?, ?, ?, ?, ?, ?)",  # noqa: S608
        (
            row.id,
            row.owner,
            row.name,
            row.working_directory,
            row.sandbox_enabled,
            row.created_at,
        ),
    )


def change(on: sqlite3.Connection, row: ProjectRow) -> bool:
    """Give the project of this owner and id this name, directory and switch; False where there is
    none."""
    changed = on.execute(
        "UPDATE projects SET name = ?, working_directory = ?, sandbox_enabled = ?"
        " WHERE id = ? AND owner = ?",
        (row.name, row.working_directory, row.sandbox_enabled, row.id, row.owner),
    )
    return changed.rowcount == 1


def delete(on: sqlite3.Connection, owner: str, project_id: str) -> bool:
    """With its chats and its rules; whether there was one."""
    gone = on.execute("DELETE FROM projects WHERE id = ? AND owner = ?", (project_id, owner))
    return gone.rowcount == 1


async def of_id(store: Store, owner: str, project_id: str) -> ProjectRow | None:
    row = await store.row(
        f"SELECT {_PROJECT} FROM projects WHERE id = ? AND owner = ?",  # noqa: S608
        project_id,
        owner,
    )
    return None if row is None else _row(row)


async def of_owner(store: Store, owner: str, after: str | None, limit: int) -> list[ProjectRow]:
    """By id, those above `after`."""
    rows = await store.rows(
        f"SELECT {_PROJECT} FROM projects WHERE owner = ? AND id > ? ORDER BY id LIMIT ?",  # noqa: S608
        owner,
        after or "",
        limit,
    )
    return [_row(row) for row in rows]


def _row(row: sqlite3.Row) -> ProjectRow:
    return ProjectRow(
        row["id"],
        row["owner"],
        row["name"],
        row["working_directory"],
        bool(row["sandbox_enabled"]),
        row["created_at"],
    )
