"""The conversations of the store, and their contexts in addition to `default`.

Functions that take a connection run inside a transaction of `Store.write`.
"""

import sqlite3
from collections.abc import Sequence

from msgspec import Struct

from sbx.store import Store, chats, erasure
from sbx.store.idempotency import Slot


class ConversationRow(Struct, frozen=True):
    """`directory` is a random name below the directory of the sandbox's workspace."""

    sandbox_id: str
    name: str
    directory: str
    created_at: float
    last_used_at: float


def add_conversation(
    on: sqlite3.Connection, row: ConversationRow, workspace_id: str
) -> ConversationRow:
    """Return the conversation as it is stored: with the directory that another sandbox made for
    this name in the workspace, if one did."""
    existing = on.execute(
        "SELECT directory FROM conversations JOIN sandboxes ON sandboxes.id = sandbox_id"
        " WHERE workspace_id = ? AND name = ? LIMIT 1",
        (workspace_id, row.name),
    ).fetchone()
    directory = row.directory if existing is None else existing[0]
    on.execute(
        "INSERT INTO conversations (sandbox_id, name, directory, created_at, last_used_at)"
        " VALUES (?, ?, ?, ?, ?)",
        (row.sandbox_id, row.name, directory, row.created_at, row.last_used_at),
    )
    return ConversationRow(row.sandbox_id, row.name, directory, row.created_at, row.last_used_at)


def delete_conversation(
    on: sqlite3.Connection,
    sandbox_id: str,
    workspace_id: str,
    name: str,
    slots: Sequence[Slot] = (),
) -> tuple[bool, list[str]]:
    """Delete it with its content, for every sandbox of the workspace and of the session. Return
    whether it or a chat of it existed, and the directories that are unused now."""
    existed = chats.drop_of_conversation(on, sandbox_id, name)
    erasure.erase_content(on, erasure.related(on, sandbox_id), name, slots)
    owner, user_id, agent_id = on.execute(
        "SELECT owner, user_id, agent_id FROM sandboxes WHERE id = ?", (sandbox_id,)
    ).fetchone()
    erasure.erase_inputs(on, owner, user_id, agent_id, name)
    where = (
        "WHERE name = ? AND sandbox_id IN (SELECT id FROM sandboxes WHERE workspace_id = ?)",
        (name, workspace_id),
    )
    directories = [
        row[0]
        for row in on.execute(f"SELECT DISTINCT directory FROM conversations {where[0]}", where[1])  # noqa: S608
    ]
    existed |= on.execute(f"DELETE FROM conversations {where[0]}", where[1]).rowcount > 0  # noqa: S608
    on.executemany(
        "INSERT OR IGNORE INTO removals (directory, conversation)"
        " SELECT directory, ? FROM workspaces WHERE id = ?",
        [(directory, workspace_id) for directory in directories],
    )
    return existed, directories


async def conversations(store: Store, sandbox_id: str) -> list[ConversationRow]:
    rows = await store.rows(
        "SELECT * FROM conversations WHERE sandbox_id = ? ORDER BY name", sandbox_id
    )
    return [ConversationRow(**dict(row)) for row in rows]


async def conversation_in_workspace(store: Store, workspace_id: str, name: str) -> bool:
    """Return whether any sandbox of the workspace has a conversation of this name."""
    row = await store.row(
        "SELECT 1 FROM conversations JOIN sandboxes ON sandboxes.id = sandbox_id"
        " WHERE workspace_id = ? AND name = ? LIMIT 1",
        workspace_id,
        name,
    )
    return row is not None


class ContextRow(Struct, frozen=True):
    sandbox_id: str
    conversation: str
    name: str
    created_at: float


def add_context(on: sqlite3.Connection, row: ContextRow, directory: str) -> bool:
    """Return False, and do nothing, if its conversation was deleted. `directory` is that of the
    conversation: a later one of the same name has another."""
    added = on.execute(
        "INSERT INTO contexts (sandbox_id, conversation, name, created_at)"
        " SELECT sandbox_id, name, ?, ? FROM conversations"
        " WHERE sandbox_id = ? AND name = ? AND directory = ?"
        " ON CONFLICT DO UPDATE SET created_at = excluded.created_at",
        (row.name, row.created_at, row.sandbox_id, row.conversation, directory),
    )
    return added.rowcount == 1


def drop_context(on: sqlite3.Connection, sandbox_id: str, conversation: str, name: str) -> None:
    """Delete a context with the records of its runs; later ones are not stored (`runs.put`)."""
    erasure.erase_context(on, sandbox_id, conversation, name)
    on.execute(
        "DELETE FROM contexts WHERE sandbox_id = ? AND conversation = ? AND name = ?",
        (sandbox_id, conversation, name),
    )


async def contexts(store: Store, sandbox_id: str) -> dict[str, set[str]]:
    rows = await store.rows(
        "SELECT conversation, name FROM contexts WHERE sandbox_id = ?", sandbox_id
    )
    names: dict[str, set[str]] = {}
    for row in rows:
        names.setdefault(row["conversation"], set()).add(row["name"])
    return names
