"""The workspaces of the store, their host uids, and the directories that are to be removed.

Functions that take a connection run inside a transaction of `Store.write`.
"""

import sqlite3

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store
from sbx.store.conversations import ConversationRow, add_conversation


class WorkspaceRow(Struct, frozen=True):
    """`directory` is a random name below the data directory; `uid` is the host uid of its files."""

    id: str
    owner: str
    managed_by: str | None
    directory: str
    uid: int | None
    size_limit_mb: int | None
    created_at: float
    last_accessed_at: float
    deleted_at: float | None = None


_WORKSPACE = ", ".join(WorkspaceRow.__struct_fields__)


def add_workspace(on: sqlite3.Connection, row: WorkspaceRow) -> None:
    on.execute(
        f"INSERT INTO workspaces ({_WORKSPACE}) VALUES ({', '.join('?' * 9)})",  # noqa: S608
        astuple(row),
    )


def drop_workspace(on: sqlite3.Connection, workspace_id: str, sandbox_id: str) -> None:
    """Undo `add_workspace` for a sandbox that was not created. Keep that of another sandbox."""
    on.execute("DELETE FROM workspaces WHERE id = ? AND managed_by = ?", (workspace_id, sandbox_id))


def free_uid(on: sqlite3.Connection, workspace_id: str) -> None:
    on.execute("UPDATE workspaces SET uid = NULL WHERE id = ?", (workspace_id,))


def users_of_workspace(on: sqlite3.Connection, workspace_id: str) -> list[str]:
    return [
        row[0]
        for row in on.execute(
            "SELECT id FROM sandboxes WHERE workspace_id = ? AND deleted_at IS NULL ORDER BY id",
            (workspace_id,),
        )
    ]


def workspace_is_there(on: sqlite3.Connection, workspace_id: str) -> bool:
    rows = on.execute(
        "SELECT 1 FROM workspaces WHERE id = ? AND deleted_at IS NULL", (workspace_id,)
    )
    return rows.fetchone() is not None


def delete_workspace(on: sqlite3.Connection, workspace_id: str, at: float) -> None:
    on.execute("UPDATE workspaces SET deleted_at = ? WHERE id = ?", (at, workspace_id))
    on.execute(
        "INSERT OR IGNORE INTO removals (directory) SELECT directory FROM workspaces WHERE id = ?",
        (workspace_id,),
    )


def is_removed(on: sqlite3.Connection, directory: str, conversation: str = "") -> None:
    """Delete a directory from `removals`, because it is out of reach."""
    on.execute(
        "DELETE FROM removals WHERE directory = ? AND conversation = ?", (directory, conversation)
    )


def take_uid(on: sqlite3.Connection, workspace_id: str, uid: int) -> int | None:
    """Return the host uid of a workspace, after giving it this one if it has none; None if another
    workspace has this one."""
    row = on.execute("SELECT uid FROM workspaces WHERE id = ?", (workspace_id,)).fetchone()
    if row is not None and row[0] is not None:
        has: int = row[0]
        return has
    if on.execute("SELECT 1 FROM workspaces WHERE uid = ?", (uid,)).fetchone():
        return None
    on.execute("UPDATE workspaces SET uid = ? WHERE id = ?", (uid, workspace_id))
    return uid


def move_in(
    on: sqlite3.Connection,
    workspace_id: str,
    directory: str,
    uid: int | None,
    conversation: ConversationRow,
) -> bool:
    """Move a workspace that was never opened into this directory, with this uid and its first
    conversation. Return False if another workspace has that uid."""
    if uid is not None and on.execute("SELECT 1 FROM workspaces WHERE uid = ?", (uid,)).fetchone():
        return False
    moved = (directory, uid, workspace_id)
    on.execute("UPDATE workspaces SET directory = ?, uid = ? WHERE id = ?", moved)
    add_conversation(on, conversation, workspace_id)
    return True


async def removals(store: Store) -> list[tuple[str, str]]:
    """Return the deleted directories that may still exist, each with its conversation, or '' for
    the whole directory."""
    rows = await store.rows("SELECT directory, conversation FROM removals")
    return [(row["directory"], row["conversation"]) for row in rows]


async def workspaces(store: Store) -> list[WorkspaceRow]:
    rows = await store.rows(
        f"SELECT {_WORKSPACE} FROM workspaces WHERE deleted_at IS NULL ORDER BY id"  # noqa: S608
    )
    return [WorkspaceRow(*row) for row in rows]


async def directories(store: Store) -> dict[str, frozenset[str]]:
    """Return the directories of workspaces that may be on the disk, and of their conversations."""
    rows = await store.rows(
        "SELECT workspaces.directory AS workspace, conversations.directory AS conversation"
        " FROM workspaces"
        " LEFT JOIN sandboxes ON sandboxes.workspace_id = workspaces.id"
        " LEFT JOIN conversations ON conversations.sandbox_id = sandboxes.id"
        " WHERE workspaces.deleted_at IS NULL OR (sandboxes.deleted_at IS NOT NULL"
        " AND files_removed = 0)"
    )
    tree: dict[str, set[str]] = {}
    for row in rows:
        inside = tree.setdefault(row["workspace"], set())
        if row["conversation"] is not None:
            inside.add(row["conversation"])
    return {workspace: frozenset(inside) for workspace, inside in tree.items()}
