"""Projects: working directories of the host with names. No directory belongs to two owners."""

import sqlite3

from msgspec import Struct
from msgspec.structs import astuple

from sbx.errors import Conflict
from sbx.store import Store, record


class ProjectRow(Struct, frozen=True):
    """A project. `ask_commands`: whether each command needs an approval before it runs.
    `conversations`: how many it has."""

    id: str
    owner: str
    name: str
    working_directory: str
    sandbox_enabled: bool
    created_at: float
    ask_commands: bool = False
    conversations: int = 0


_COLUMNS = "id, owner, name, working_directory, sandbox_enabled, created_at, ask_commands"
_CHATS = "(SELECT count(*) FROM chats WHERE project_id = projects.id) AS conversations"
_PROJECT = f"{_COLUMNS}, {_CHATS}"


def add(on: sqlite3.Connection, row: ProjectRow) -> None:
    """Raise Conflict `directory_in_use`."""
    _refuse_shared(on, row)
    on.execute(
        f"INSERT INTO projects ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
        astuple(row)[:-1],
    )


def change(on: sqlite3.Connection, row: ProjectRow) -> bool:
    """Set the name, directory and switches of a project. Return False if this owner has no such
    project. Raise Conflict `directory_in_use`."""
    _refuse_shared(on, row)
    changed = on.execute(
        "UPDATE projects SET name = ?, working_directory = ?, sandbox_enabled = ?,"
        " ask_commands = ? WHERE id = ? AND owner = ? AND deleted_at IS NULL",
        (
            *(row.name, row.working_directory, row.sandbox_enabled, row.ask_commands),
            *(row.id, row.owner),
        ),
    )
    return changed.rowcount == 1


def _refuse_shared(on: sqlite3.Connection, row: ProjectRow) -> None:
    """Refuse a directory that is, holds or lies in one of another owner's project: each of the two
    could read and change the other's files."""
    shared = on.execute(
        "SELECT 1 FROM projects WHERE owner != :owner AND deleted_at IS NULL AND ("
        " working_directory = :path"
        " OR substr(working_directory, 1, length(:path) + 1) = :path || '/'"
        " OR substr(:path, 1, length(working_directory) + 1) = working_directory || '/')",
        {"owner": row.owner, "path": row.working_directory},
    ).fetchone()
    if shared is not None:
        raise Conflict(
            f"{row.working_directory} is, contains or lies in a directory of another owner's"
            " project",
            code="directory_in_use",
            hint="name another directory, or let the other owner delete the project first",
            details={"field": "working_directory"},
        )


def begin_deletion(on: sqlite3.Connection, owner: str, project_id: str, at: float) -> bool:
    """Hide a project whose conversations are being deleted. Return whether it existed."""
    hidden = on.execute(
        "UPDATE projects SET deleted_at = ? WHERE id = ? AND owner = ? AND deleted_at IS NULL",
        (at, project_id, owner),
    )
    return hidden.rowcount == 1


async def in_directory(store: Store, directory: str) -> list[str]:
    """Return the ids of the projects of all owners in this directory."""
    rows = await store.rows("SELECT id FROM projects WHERE working_directory = ?", directory)
    return [row["id"] for row in rows]


async def in_deletion(store: Store) -> list[ProjectRow]:
    """Return the projects whose deletion has begun, and has not ended."""
    rows = await store.rows(f"SELECT {_PROJECT} FROM projects WHERE deleted_at IS NOT NULL")  # noqa: S608
    return [_row(row) for row in rows]


def delete(on: sqlite3.Connection, owner: str, project_id: str) -> bool:
    """Delete a project with its chats and rules. Return whether it existed."""
    gone = on.execute("DELETE FROM projects WHERE id = ? AND owner = ?", (project_id, owner))
    return gone.rowcount == 1


async def get(store: Store, owner: str, project_id: str) -> ProjectRow | None:
    row = await store.row(
        f"SELECT {_PROJECT} FROM projects WHERE id = ? AND owner = ? AND deleted_at IS NULL",  # noqa: S608
        project_id,
        owner,
    )
    return None if row is None else _row(row)


async def list_for_owner(
    store: Store, owner: str, after: str | None, limit: int
) -> list[ProjectRow]:
    rows = await store.rows(
        f"SELECT {_PROJECT} FROM projects WHERE owner = ? AND id > ?"  # noqa: S608
        " AND deleted_at IS NULL ORDER BY id LIMIT ?",
        owner,
        after or "",
        limit,
    )
    return [_row(row) for row in rows]


def _row(row: sqlite3.Row) -> ProjectRow:
    switches = {name: bool(row[name]) for name in ("sandbox_enabled", "ask_commands")}
    return record(ProjectRow, row, **switches)
