"""The sandboxes of the store, and every query on them.

Functions that take a connection run inside a transaction of `Store.write`.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store, chats, erasure, record
from sbx.store.errors import decoded
from sbx.store.idempotency import Slot


class SandboxRow(Struct, frozen=True):
    """`ttl_s`: seconds from the last use to an expiry that slides; None: it does not. `restored`:
    it expired, and a later request found its files. `labels`: of the surface that created it."""

    id: str
    owner: str
    policy_name: str
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
    ttl_s: float | None = None
    restored: bool = False
    labels: Mapping[str, Any] | None = None


class EndedSandbox(Struct, frozen=True):
    id: str
    cause: str | None
    expires_at: float | None
    deleted_at: float
    workspace_id: str
    managed: bool
    directory: str


_SANDBOX = ", ".join(SandboxRow.__struct_fields__)
_PLACES = ", ".join("?" for _ in SandboxRow.__struct_fields__)


# -- writing -----------------------------------------------------------------------------------


def add(on: sqlite3.Connection, row: SandboxRow) -> bool:
    """Return False, and do nothing, if its session already has a live sandbox."""
    try:
        on.execute(
            f"INSERT INTO sandboxes ({_SANDBOX}) VALUES ({_PLACES})",  # noqa: S608
            _columns(row),
        )
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            return False
        raise
    return True


def restore(on: sqlite3.Connection, row: SandboxRow) -> None:
    """Replace the row of an expired session."""
    on.execute(
        f"UPDATE sandboxes SET ({_SANDBOX}) = ({_PLACES}) WHERE id = ?",  # noqa: S608
        [*_columns(row), row.id],
    )


def extend(
    on: sqlite3.Connection, sandbox_id: str, expires_at: float | None, ttl_s: float | None
) -> None:
    on.execute(
        "UPDATE sandboxes SET expires_at = ?, ttl_s = ? WHERE id = ?",
        (expires_at, ttl_s, sandbox_id),
    )


def set_labels(on: sqlite3.Connection, sandbox_id: str, labels: Mapping[str, Any]) -> None:
    on.execute("UPDATE sandboxes SET labels = ? WHERE id = ?", (json.dumps(labels), sandbox_id))


def set_stopped(
    on: sqlite3.Connection, sandbox_id: str, stopped: bool, failure: Mapping[str, Any] | None
) -> None:
    on.execute(
        "UPDATE sandboxes SET stopped = ?, failure = ?, idle_expires_at = NULL WHERE id = ?",
        (stopped, None if failure is None else json.dumps(failure), sandbox_id),
    )


def touch(on: sqlite3.Connection, row: SandboxRow, at: float, idle: float | None) -> None:
    on.execute(
        "UPDATE sandboxes SET idle_expires_at = ?, expires_at = ? WHERE id = ?",
        (idle, row.expires_at, row.id),
    )
    on.execute("UPDATE workspaces SET last_accessed_at = ? WHERE id = ?", (at, row.workspace_id))


def delete(
    on: sqlite3.Connection, sandbox_id: str, at: float, cause: str, slots: Sequence[Slot] = ()
) -> None:
    """Leave the tombstones of a sandbox and of the workspace that it manages, without content.
    Delete its chats, unless it expired."""
    on.execute(
        "UPDATE sandboxes SET deleted_at = ?, cause = ?, idle_expires_at = NULL"
        " WHERE id = ? AND deleted_at IS NULL",
        (at, cause, sandbox_id),
    )
    on.execute(
        "UPDATE workspaces SET deleted_at = ? WHERE managed_by = ? AND deleted_at IS NULL",
        (at, sandbox_id),
    )
    _erase(on, [sandbox_id], slots)
    if cause != "expired":
        erase(on, sandbox_id)


def erase(on: sqlite3.Connection, sandbox_id: str) -> None:
    """Delete the chats of a deleted sandbox, and the content of earlier ones of its session. Its
    files are not kept longer, also if it ended by its expiry."""
    chats.drop_of_sandbox(on, sandbox_id)
    ended = on.execute(
        "SELECT id FROM sandboxes WHERE deleted_at IS NOT NULL AND (id = :id OR"
        " (owner, session_id) = (SELECT owner, session_id FROM sandboxes WHERE id = :id))",
        {"id": sandbox_id},
    )
    ids = [each[0] for each in ended]
    _erase(on, ids)
    on.executemany("UPDATE sandboxes SET cause = 'requested' WHERE id = ?", [(i,) for i in ids])


def _erase(on: sqlite3.Connection, sandboxes: Sequence[str], slots: Sequence[Slot] = ()) -> None:
    erasure.erase_content(on, sandboxes, slots=slots)
    for sandbox_id in sandboxes:
        on.execute("DELETE FROM contexts WHERE sandbox_id = ?", (sandbox_id,))
        on.execute(
            "UPDATE events SET details = json_remove(details, '$.context', '$.target', '$.where')"
            " WHERE sandbox_id = ?",
            (sandbox_id,),
        )
        on.execute(
            "UPDATE sandboxes SET request = '{}', labels = NULL, failure = NULL,"
            " upload_limits = NULL WHERE id = ?",
            (sandbox_id,),
        )


def files_are_removed(on: sqlite3.Connection, sandbox_id: str) -> None:
    on.execute("UPDATE sandboxes SET files_removed = 1 WHERE id = ?", (sandbox_id,))
    on.execute(
        "UPDATE workspaces SET uid = NULL WHERE managed_by = ? AND deleted_at IS NOT NULL",
        (sandbox_id,),
    )


def reset(on: sqlite3.Connection) -> None:
    """Remove the state of the previous process."""
    on.execute("UPDATE sandboxes SET idle_expires_at = NULL WHERE idle_expires_at IS NOT NULL")
    on.execute(
        "UPDATE sandboxes SET failure = NULL WHERE failure IS NOT NULL"
        " AND json_extract(failure, '$.code') IS NOT 'honeytoken'"  # only an operator unfreezes it
    )


def bury(on: sqlite3.Connection, before: float) -> int:
    """Delete the sandboxes that ended before this time and have no files, and the earlier events of
    live sandboxes. Return the number of deleted sandboxes."""
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
    rows = await store.rows(
        f"SELECT {_SANDBOX} FROM sandboxes WHERE deleted_at IS NULL ORDER BY id"  # noqa: S608
    )
    return [_sandbox(row) for row in rows]


async def get(store: Store, owner: str, sandbox_id: str) -> SandboxRow | None:
    """Return the last sandbox with this id or session id, also a deleted one."""
    row = await store.row(
        f"SELECT {_SANDBOX} FROM sandboxes WHERE owner = :owner"  # noqa: S608
        " AND (id = :id OR session_id = :id)"
        " ORDER BY deleted_at IS NULL DESC, created_at DESC LIMIT 1",
        owner=owner,
        id=sandbox_id,
    )
    return None if row is None else _sandbox(row)


async def ended_of_user(store: Store, owner: str, user_id: str) -> list[str]:
    """Return the ids of the deleted sandboxes of a user."""
    rows = await store.rows(
        "SELECT id FROM sandboxes WHERE owner = ? AND user_id = ? AND deleted_at IS NOT NULL",
        owner,
        user_id,
    )
    return [row["id"] for row in rows]


async def ended_of(store: Store, owner: str, *, since: float, limit: int) -> list[SandboxRow]:
    """Return the sandboxes of an owner that were deleted after this time, the last one first."""
    rows = await store.rows(
        f"SELECT {_SANDBOX} FROM sandboxes WHERE owner = ? AND deleted_at > ?"  # noqa: S608
        " ORDER BY deleted_at DESC LIMIT ?",
        owner,
        since,
        limit,
    )
    return [_sandbox(row) for row in rows]


async def with_files_to_remove(
    store: Store, *, limit: int = 1000, only: str | None = None
) -> list[EndedSandbox]:
    """`only`: the id of the only sandbox to return."""
    rows = await store.rows(
        "SELECT sandboxes.id, cause, expires_at, sandboxes.deleted_at, workspace_id, directory,"
        " managed_by IS NOT NULL AS managed"
        " FROM sandboxes JOIN workspaces ON workspaces.id = workspace_id"
        " WHERE sandboxes.deleted_at IS NOT NULL AND files_removed = 0"
        " AND (:only IS NULL OR sandboxes.id = :only)"
        " ORDER BY sandboxes.deleted_at LIMIT :limit",
        only=only,
        limit=limit,
    )
    return [record(EndedSandbox, row, managed=bool(row["managed"])) for row in rows]


async def kernels_left(store: Store) -> dict[str, frozenset[tuple[str, str]]]:
    """Return the contexts of live sandboxes, as pairs of conversation and name, whose kernel was
    started and, by their events, not stopped by request since."""
    rows = await store.rows(
        "SELECT sandbox_id, json_extract(details, '$.conversation') AS name,"
        " coalesce(json_extract(details, '$.context'), 'default') AS context FROM events AS one"
        " WHERE type = 'started' AND seq > COALESCE((SELECT MAX(seq) FROM events AS later"
        "  WHERE later.sandbox_id = one.sandbox_id AND type = 'stopped'"
        "  AND cause = 'requested'), 0)"
        " AND sandbox_id IN (SELECT id FROM sandboxes WHERE deleted_at IS NULL)"
    )
    contexts: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        contexts.setdefault(row["sandbox_id"], set()).add((row["name"], row["context"]))
    return {sandbox: frozenset(names) for sandbox, names in contexts.items()}


def _columns(row: SandboxRow) -> list[Any]:
    return [json.dumps(value) if isinstance(value, Mapping) else value for value in astuple(row)]


def _sandbox(row: sqlite3.Row) -> SandboxRow:
    columns = dict(row)
    for name in ("request", "failure", "upload_limits", "labels"):
        columns[name] = None if columns[name] is None else decoded(columns[name])
    for name in ("stopped", "files_removed", "restored"):
        columns[name] = bool(columns[name])
    return SandboxRow(**columns)
