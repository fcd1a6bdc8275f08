"""Templates of prompts that an owner made."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbx.store import Store, record


@dataclass(frozen=True, slots=True)
class TemplateRow:
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


async def put(store: Store, row: TemplateRow) -> None:
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


async def list_for_owner(store: Store, owner: str) -> list[TemplateRow]:
    rows = await store.rows(
        "SELECT * FROM templates WHERE owner = ? ORDER BY created_at, rowid", owner
    )
    return [record(TemplateRow, row, variables=json.loads(row["variables"])) for row in rows]


async def delete(store: Store, template_id: str, owner: str) -> None:
    await store.write(
        lambda on: (
            on.execute(
                "DELETE FROM templates WHERE id = ? AND owner = ?", (template_id, owner)
            ).rowcount
        )
    )
