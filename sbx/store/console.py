"""The data of people at the console: logins of browsers, and templates of prompts.

The store has only the hash of a cookie.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store, record
from sbx.store.errors import decoded

PREFIX = "login-"  # of the ids


class ConsoleSessionRow(Struct, frozen=True):
    """`token_id`: the token whose rights it has; `key_id`: the key that requested it. It ends with
    either. `last_seen_at` is exact to a minute."""

    id: str
    owner: str
    operator: bool
    token_id: str | None
    key_id: str | None
    user_agent: str
    created_at: float
    last_seen_at: float
    expires_at: float


async def add(store: Store, row: ConsoleSessionRow, digest: str) -> None:
    """Store a login by the SHA-256 of its cookie in hex."""
    await store.write(
        lambda on: on.execute(
            "INSERT INTO console_sessions (id, owner, operator, token_id, key_id, user_agent,"
            " created_at, last_seen_at, expires_at, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*astuple(row), digest),
        )
    )


async def get_by_digest(store: Store, digest: str) -> ConsoleSessionRow | None:
    row = await store.row("SELECT * FROM console_sessions WHERE hash = ?", digest)
    return None if row is None else record(ConsoleSessionRow, row, operator=bool(row["operator"]))


async def get(store: Store, session_id: str) -> ConsoleSessionRow | None:
    row = await store.row("SELECT * FROM console_sessions WHERE id = ?", session_id)
    return None if row is None else record(ConsoleSessionRow, row, operator=bool(row["operator"]))


async def list_for_owner(store: Store, owner: str) -> list[ConsoleSessionRow]:
    rows = await store.rows(
        "SELECT * FROM console_sessions WHERE owner = ? ORDER BY created_at, rowid", owner
    )
    return [record(ConsoleSessionRow, row, operator=bool(row["operator"])) for row in rows]


async def delete(store: Store, session_id: str, owner: str) -> bool:
    """Return whether the owner had it."""
    return await store.write(
        lambda on: (
            on.execute(
                "DELETE FROM console_sessions WHERE id = ? AND owner = ?", (session_id, owner)
            ).rowcount
            == 1
        )
    )


def seen(store: Store, session_id: str, at: float, expires_at: float) -> None:
    store.write_later(
        lambda on: on.execute(
            "UPDATE console_sessions SET last_seen_at = ?, expires_at = ? WHERE id = ?",
            (at, expires_at, session_id),
        )
    )


async def forget_ended(store: Store, before: float) -> int:
    return await store.write(
        lambda on: (
            on.execute("DELETE FROM console_sessions WHERE expires_at < ?", (before,)).rowcount
        )
    )


# -- templates -----------------------------------------------------------------------------------


class TemplateRow(Struct, frozen=True):
    """`variables`: name, label and default of each `{{name}}` in the prompt."""

    id: str
    owner: str
    name: str
    description: str
    prompt: str
    variables: Sequence[Mapping[str, str]]
    project_id: str | None
    max_steps: int | None
    created_at: float


async def put_template(store: Store, row: TemplateRow) -> None:
    """Add a template, or replace the one of its owner with this id."""

    def act(on: sqlite3.Connection) -> None:
        on.execute(
            "INSERT INTO templates (id, owner, name, description, prompt, variables, project_id,"
            " max_steps, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET name = excluded.name,"
            " description = excluded.description, prompt = excluded.prompt,"
            " variables = excluded.variables, project_id = excluded.project_id,"
            " max_steps = excluded.max_steps WHERE owner = excluded.owner",
            (
                *(row.id, row.owner, row.name, row.description, row.prompt),
                json.dumps([dict(each) for each in row.variables]),
                *(row.project_id, row.max_steps, row.created_at),
            ),
        )

    await store.write(act)


async def templates_of(store: Store, owner: str) -> list[TemplateRow]:
    rows = await store.rows(
        "SELECT * FROM templates WHERE owner = ? ORDER BY created_at, rowid", owner
    )
    return [record(TemplateRow, row, variables=decoded(row["variables"])) for row in rows]


async def delete_template(store: Store, template_id: str, owner: str) -> None:
    await store.write(
        lambda on: (
            on.execute(
                "DELETE FROM templates WHERE id = ? AND owner = ?", (template_id, owner)
            ).rowcount
        )
    )
