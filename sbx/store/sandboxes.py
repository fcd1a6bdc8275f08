"""Sandboxes, workspaces and conversations as the store keeps them, and every query on them.

Functions that take a connection run inside a transaction of `Store.write`.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sbx.store import Store, chats, record, values


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
        (stopped, None if failure is None else json.dumps(failure), sandbox_id),
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
        f"SELECT {_SANDBOX} FROM sandboxes WHERE owner = ?1 AND (id = ?2 OR session_id = ?2)"  # noqa: S608
        " ORDER BY deleted_at IS NULL DESC, created_at DESC LIMIT 1",
        owner,
        sandbox_id,
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
    return [record(EndedSandbox, row, managed=bool(row["managed"])) for row in rows]


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
