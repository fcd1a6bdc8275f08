"""Sandboxes, workspaces and conversations as the store keeps them, and every query on them.

Functions that take a connection run inside a transaction of `Store.write`.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sbx.store import Store, chats, values


@dataclass(frozen=True, slots=True)
class SandboxRow:
    id: str
    owner: str
    profile: str
    request: Mapping[str, Any]
    workspace_id: str
    created_at: float
    expires_at: float | None = None
    idle_expires_at: float | None = None
    stopped: bool = False
    failure: dict[str, Any] | None = None
    deleted_at: float | None = None
    cause: str | None = None
    files_removed: bool = False
    session_id: str | None = None
    user_id: str | None = None
    agent_id: str | None = None
    business_domain_id: str | None = None
    upload_limits: dict[str, Any] | None = None
    recreated_because: str | None = None


@dataclass(frozen=True, slots=True)
class WorkspaceRow:
    """`directory` is opaque, below the data directory; `uid` the host uid that owns its files."""

    id: str
    owner: str
    managed_by: str | None
    directory: str
    uid: int | None
    size_limit_mb: int | None
    created_at: float
    last_accessed_at: float
    deleted_at: float | None = None


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """`directory` is opaque, below that of the sandbox's workspace."""

    sandbox_id: str
    name: str
    directory: str
    created_at: float
    last_used_at: float


@dataclass(frozen=True, slots=True)
class EndedSandbox:
    """A sandbox that was deleted, and whose files are still there."""

    id: str
    cause: str | None
    expires_at: float | None
    deleted_at: float
    workspace_id: str
    managed: bool
    directory: str


_SANDBOX = ", ".join(field.name for field in fields(SandboxRow))
_WORKSPACE = ", ".join(field.name for field in fields(WorkspaceRow))


# -- writing -----------------------------------------------------------------------------------


def add(on: sqlite3.Connection, row: SandboxRow) -> bool:
    """False when its session has a live sandbox already: then nothing was done."""
    try:
        on.execute(
            f"INSERT INTO sandboxes ({_SANDBOX}) VALUES ({', '.join('?' * 19)})",  # noqa: S608
            [json.dumps(value) if isinstance(value, Mapping) else value for value in values(row)],
        )
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            return False
        raise
    return True


def extend(on: sqlite3.Connection, sandbox_id: str, expires_at: float) -> None:
    on.execute("UPDATE sandboxes SET expires_at = ? WHERE id = ?", (expires_at, sandbox_id))


def set_stopped(
    on: sqlite3.Connection, sandbox_id: str, stopped: bool, failure: Mapping[str, Any] | None
) -> None:
    on.execute(
        "UPDATE sandboxes SET stopped = ?, failure = ?, idle_expires_at = NULL WHERE id = ?",
        (stopped, _dumped(failure), sandbox_id),
    )


def touch(
    on: sqlite3.Connection, sandbox_id: str, workspace_id: str, at: float, idle: float | None
) -> None:
    """It was used."""
    on.execute("UPDATE sandboxes SET idle_expires_at = ? WHERE id = ?", (idle, sandbox_id))
    on.execute("UPDATE workspaces SET last_accessed_at = ? WHERE id = ?", (at, workspace_id))


def delete(on: sqlite3.Connection, sandbox_id: str, at: float, cause: str) -> None:
    """Leave the tombstones of a sandbox and of the workspace that it manages. Its chats are deleted
    unless it expired."""
    on.execute(
        "UPDATE sandboxes SET deleted_at = ?, cause = ?, idle_expires_at = NULL"
        " WHERE id = ? AND deleted_at IS NULL",
        (at, cause, sandbox_id),
    )
    on.execute(
        "UPDATE workspaces SET deleted_at = ? WHERE managed_by = ? AND deleted_at IS NULL",
        (at, sandbox_id),
    )
    if cause != "expired":
        chats.drop_of_sandbox(on, sandbox_id)


def files_are_removed(on: sqlite3.Connection, sandbox_id: str) -> None:
    on.execute("UPDATE sandboxes SET files_removed = 1 WHERE id = ?", (sandbox_id,))
    on.execute(
        "UPDATE workspaces SET uid = NULL WHERE managed_by = ? AND deleted_at IS NOT NULL",
        (sandbox_id,),
    )


def reset(on: sqlite3.Connection) -> None:
    """What only a living process can have is gone with it."""
    on.execute("UPDATE sandboxes SET idle_expires_at = NULL WHERE idle_expires_at IS NOT NULL")
    on.execute(
        "UPDATE sandboxes SET failure = NULL WHERE failure IS NOT NULL"
        " AND json_extract(failure, '$.code') IS NOT 'honeytoken'"  # only an operator unfreezes it
    )


def bury(on: sqlite3.Connection, before: float) -> int:
    """Forget what ended before this time and has no files any more, and what happened before it to
    sandboxes that live; how many of the first there were."""
    gone = on.execute(
        "DELETE FROM sandboxes WHERE deleted_at < ? AND files_removed = 1 AND NOT EXISTS"
        " (SELECT 1 FROM workspaces AS w WHERE w.id = workspace_id AND w.deleted_at IS NULL)",
        (before,),
    ).rowcount
    on.execute(
        "DELETE FROM workspaces WHERE deleted_at < ?"
        " AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE workspace_id = workspaces.id)",
        (before,),
    )
    on.execute("DELETE FROM events WHERE at < ? AND type != 'created'", (before,))
    return gone


def add_workspace(on: sqlite3.Connection, row: WorkspaceRow) -> None:
    on.execute(
        f"INSERT INTO workspaces ({_WORKSPACE}) VALUES ({', '.join('?' * 9)})",  # noqa: S608
        values(row),
    )


def drop_workspace(on: sqlite3.Connection, workspace_id: str, sandbox_id: str) -> None:
    """Undo `add_workspace` for a sandbox that was not made; another's stays."""
    on.execute("DELETE FROM workspaces WHERE id = ? AND managed_by = ?", (workspace_id, sandbox_id))


def free_uid(on: sqlite3.Connection, workspace_id: str) -> None:
    """No file belongs to it any more."""
    on.execute("UPDATE workspaces SET uid = NULL WHERE id = ?", (workspace_id,))


def users_of_workspace(on: sqlite3.Connection, workspace_id: str) -> list[str]:
    """The live sandboxes that use it."""
    return [
        row[0]
        for row in on.execute(
            "SELECT id FROM sandboxes WHERE workspace_id = ? AND deleted_at IS NULL ORDER BY id",
            (workspace_id,),
        )
    ]


def workspace_is_there(on: sqlite3.Connection, workspace_id: str) -> bool:
    found = on.execute(
        "SELECT 1 FROM workspaces WHERE id = ? AND deleted_at IS NULL", (workspace_id,)
    )
    return found.fetchone() is not None


def delete_workspace(on: sqlite3.Connection, workspace_id: str, at: float) -> None:
    on.execute("UPDATE workspaces SET deleted_at = ? WHERE id = ?", (at, workspace_id))
    on.execute(
        "INSERT OR IGNORE INTO removals (directory) SELECT directory FROM workspaces WHERE id = ?",
        (workspace_id,),
    )


def is_removed(on: sqlite3.Connection, directory: str, conversation: str = "") -> None:
    """Forget a directory of `removals` that is out of reach."""
    on.execute(
        "DELETE FROM removals WHERE directory = ? AND conversation = ?", (directory, conversation)
    )


def take_uid(on: sqlite3.Connection, workspace_id: str, uid: int) -> int | None:
    """Return the host uid of a workspace, after giving it this one if it has none; None if another
    workspace has this one."""
    found = on.execute("SELECT uid FROM workspaces WHERE id = ?", (workspace_id,)).fetchone()
    if found is not None and found[0] is not None:
        has: int = found[0]
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
    """Let a workspace that was never opened lie in this directory, as this uid, with its first
    conversation; False where another workspace's files have that uid."""
    if uid is not None and on.execute("SELECT 1 FROM workspaces WHERE uid = ?", (uid,)).fetchone():
        return False
    moved = (directory, uid, workspace_id)
    on.execute("UPDATE workspaces SET directory = ?, uid = ? WHERE id = ?", moved)
    add_conversation(on, conversation, workspace_id)
    return True


def add_conversation(
    on: sqlite3.Connection, row: ConversationRow, workspace_id: str
) -> ConversationRow:
    """Return the conversation as it is stored: with the directory that another sandbox made for
    this name in the workspace, if one did."""
    found = on.execute(
        "SELECT directory FROM conversations JOIN sandboxes ON sandboxes.id = sandbox_id"
        " WHERE workspace_id = ? AND name = ? LIMIT 1",
        (workspace_id, row.name),
    ).fetchone()
    directory = row.directory if found is None else found[0]
    on.execute(
        "INSERT INTO conversations (sandbox_id, name, directory, created_at, last_used_at)"
        " VALUES (?, ?, ?, ?, ?)",
        (row.sandbox_id, row.name, directory, row.created_at, row.last_used_at),
    )
    return ConversationRow(row.sandbox_id, row.name, directory, row.created_at, row.last_used_at)


def delete_conversation(
    on: sqlite3.Connection, sandbox_id: str, workspace_id: str, name: str
) -> list[str]:
    """Delete it, with its chats, for every sandbox of the workspace. Return the directories that
    are unused now."""
    chats.drop_of_conversation(on, sandbox_id, name)
    where = (
        "WHERE name = ? AND sandbox_id IN (SELECT id FROM sandboxes WHERE workspace_id = ?)",
        (name, workspace_id),
    )
    directories = [
        row[0]
        for row in on.execute(f"SELECT DISTINCT directory FROM conversations {where[0]}", where[1])  # noqa: S608
    ]
    on.execute(f"DELETE FROM conversations {where[0]}", where[1])  # noqa: S608
    on.executemany(
        "INSERT OR IGNORE INTO removals (directory, conversation)"
        " SELECT directory, ? FROM workspaces WHERE id = ?",
        [(directory, workspace_id) for directory in directories],
    )
    on.execute(
        "DELETE FROM uploads WHERE conversation = ? AND sandbox_id IN"
        " (SELECT id FROM sandboxes WHERE workspace_id = ?)",
        (name, workspace_id),
    )
    return directories


# -- reading -----------------------------------------------------------------------------------


async def living(store: Store) -> list[SandboxRow]:
    """Every sandbox that was not deleted."""
    rows = await store.rows(
        f"SELECT {_SANDBOX} FROM sandboxes WHERE deleted_at IS NULL ORDER BY id"  # noqa: S608
    )
    return [_sandbox(row) for row in rows]


async def of_id(store: Store, owner: str, sandbox_id: str) -> SandboxRow | None:
    """By its own id or its session's, the last one that had it; deleted ones too."""
    row = await store.row(
        f"SELECT {_SANDBOX} FROM sandboxes WHERE owner = :owner"  # noqa: S608
        " AND (id = :id OR session_id = :id)"
        " ORDER BY deleted_at IS NULL DESC, created_at DESC LIMIT 1",
        owner=owner,
        id=sandbox_id,
    )
    return None if row is None else _sandbox(row)


async def with_files_to_remove(store: Store, *, limit: int = 1000) -> list[EndedSandbox]:
    """Sandboxes that ended and still have files of their own."""
    rows = await store.rows(
        "SELECT sandboxes.id, cause, expires_at, sandboxes.deleted_at, workspace_id, directory,"
        " managed_by IS NOT NULL AS managed"
        " FROM sandboxes JOIN workspaces ON workspaces.id = workspace_id"
        " WHERE sandboxes.deleted_at IS NOT NULL AND files_removed = 0"
        " ORDER BY sandboxes.deleted_at LIMIT ?",
        limit,
    )
    return [
        EndedSandbox(
            row["id"],
            row["cause"],
            row["expires_at"],
            row["deleted_at"],
            row["workspace_id"],
            bool(row["managed"]),
            row["directory"],
        )
        for row in rows
    ]


async def removals(store: Store) -> list[tuple[str, str]]:
    """Return the directories that were deleted and may still be there, each with its conversation
    or '' for all of it."""
    rows = await store.rows("SELECT directory, conversation FROM removals")
    return [(row["directory"], row["conversation"]) for row in rows]


async def workspaces(store: Store) -> list[WorkspaceRow]:
    """Every workspace that was not deleted."""
    rows = await store.rows(
        f"SELECT {_WORKSPACE} FROM workspaces WHERE deleted_at IS NULL ORDER BY id"  # noqa: S608
    )
    return [WorkspaceRow(*row) for row in rows]


async def conversations(store: Store, sandbox_id: str) -> list[ConversationRow]:
    rows = await store.rows(
        "SELECT * FROM conversations WHERE sandbox_id = ? ORDER BY name", sandbox_id
    )
    return [ConversationRow(**dict(row)) for row in rows]


async def conversation_in_workspace(store: Store, workspace_id: str, name: str) -> bool:
    """Whether any sandbox of the workspace has a conversation of this name."""
    found = await store.row(
        "SELECT 1 FROM conversations JOIN sandboxes ON sandboxes.id = sandbox_id"
        " WHERE workspace_id = ? AND name = ? LIMIT 1",
        workspace_id,
        name,
    )
    return found is not None


async def directories(store: Store) -> dict[str, frozenset[str]]:
    """Every directory of a workspace that may be on the disk, with those of its conversations."""
    rows = await store.rows(
        "SELECT workspaces.directory AS workspace, conversations.directory AS conversation"
        " FROM workspaces"
        " LEFT JOIN sandboxes ON sandboxes.workspace_id = workspaces.id"
        " LEFT JOIN conversations ON conversations.sandbox_id = sandboxes.id"
        " WHERE workspaces.deleted_at IS NULL OR (sandboxes.deleted_at IS NOT NULL"
        " AND files_removed = 0)"
    )
    found: dict[str, set[str]] = {}
    for row in rows:
        inside = found.setdefault(row["workspace"], set())
        if row["conversation"] is not None:
            inside.add(row["conversation"])
    return {workspace: frozenset(inside) for workspace, inside in found.items()}


async def kernels_left(store: Store) -> dict[str, frozenset[tuple[str, str]]]:
    """Which contexts of living sandboxes, each by its conversation and its name, had a kernel whose
    variables nobody gave up, as their events tell: started, and not stopped by request since."""
    rows = await store.rows(
        "SELECT sandbox_id, json_extract(details, '$.conversation') AS name,"
        " coalesce(json_extract(details, '$.context'), 'default') AS context FROM events AS one"
        " WHERE type = 'started' AND seq > COALESCE((SELECT MAX(seq) FROM events AS later"
        "  WHERE later.sandbox_id = one.sandbox_id AND type = 'stopped'"
        "  AND cause = 'requested'), 0)"
        " AND sandbox_id IN (SELECT id FROM sandboxes WHERE deleted_at IS NULL)"
    )
    found: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        found.setdefault(row["sandbox_id"], set()).add((row["name"], row["context"]))
    return {sandbox: frozenset(names) for sandbox, names in found.items()}


def _sandbox(row: sqlite3.Row) -> SandboxRow:
    columns = dict(row)
    for name in ("request", "failure", "upload_limits"):
        columns[name] = None if columns[name] is None else json.loads(columns[name])
    for name in ("stopped", "files_removed"):
        columns[name] = bool(columns[name])
    return SandboxRow(**columns)


def _dumped(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value)
