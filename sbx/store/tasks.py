"""Tasks from templates, and the state of each input."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store

_KEPT = 200  # ended tasks of an owner


class TaskRow(Struct, frozen=True):
    id: str
    owner: str
    template: str
    user_id: str
    agent_id: str
    created_at: float
    ended_at: float | None = None


class TaskInputRow(Struct, frozen=True):
    """`state`: `waiting`, `running`, `interrupted`, or the reason of the end of its run."""

    number: int
    parameters: Mapping[str, str]
    conversation_id: str
    state: str = "waiting"
    run_id: str | None = None
    answer: str | None = None
    error: Mapping[str, Any] | None = None
    tokens: int = 0


async def add(store: Store, task: TaskRow, inputs: Sequence[TaskInputRow]) -> None:
    """Add a task. Delete the oldest ended tasks of its owner beyond the limit."""

    def act(on: sqlite3.Connection) -> None:
        on.execute("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(task))
        on.executemany(
            "INSERT INTO task_inputs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(task.id, *_columns(each)) for each in inputs],
        )
        on.execute(
            "DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE owner = ?"
            " AND ended_at IS NOT NULL ORDER BY created_at DESC LIMIT -1 OFFSET ?)",
            (task.owner, _KEPT),
        )

    await store.write(act)


async def put_input(store: Store, task_id: str, row: TaskInputRow) -> None:
    """Change an input. It has no answer and no error once its conversation was deleted."""
    number, _, name, state, run_id, answer, error, tokens = _columns(row)

    def act(on: sqlite3.Connection) -> None:
        kept = on.execute(
            "SELECT 1 FROM chats JOIN tasks USING (owner, user_id, agent_id)"
            " WHERE tasks.id = ? AND chats.conversation_id = ?",
            (task_id, name),
        ).fetchone()
        texts = (answer, error) if kept or run_id is None else (None, None)
        on.execute(
            "UPDATE task_inputs SET state = ?, run_id = ?, answer = ?, error = ?, tokens = ?"
            " WHERE task_id = ? AND number = ?",
            (state, run_id, *texts, tokens, task_id, number),
        )

    await store.write(act)


async def end(store: Store, task_id: str, at: float) -> None:
    """End a task. Inputs that are not complete are `interrupted`."""

    def act(on: sqlite3.Connection) -> None:
        on.execute(
            "UPDATE task_inputs SET state = 'interrupted'"
            " WHERE task_id = ? AND state IN ('waiting', 'running')",
            (task_id,),
        )
        on.execute("UPDATE tasks SET ended_at = ? WHERE id = ?", (at, task_id))

    await store.write(act)


async def mark_interrupted(store: Store, at: float) -> None:
    """Mark the inputs that the previous service left incomplete. Call this before anything runs."""

    def act(on: sqlite3.Connection) -> None:
        on.execute(
            "UPDATE task_inputs SET state = 'interrupted' WHERE state IN ('waiting', 'running')"
        )
        on.execute("UPDATE tasks SET ended_at = ? WHERE ended_at IS NULL", (at,))

    await store.write(act)


async def list_for_owner(store: Store, owner: str, limit: int) -> list[TaskRow]:
    """Return the tasks of an owner, the newest first."""
    rows = await store.rows(
        "SELECT * FROM tasks WHERE owner = ? ORDER BY created_at DESC, id LIMIT ?", owner, limit
    )
    return [TaskRow(*row) for row in rows]


async def get(store: Store, owner: str, task_id: str) -> tuple[TaskRow, list[TaskInputRow]] | None:
    row = await store.row("SELECT * FROM tasks WHERE owner = ? AND id = ?", owner, task_id)
    if row is None:
        return None
    inputs = await store.rows(
        "SELECT number, parameters, conversation_id, state, run_id, answer, error, tokens"
        " FROM task_inputs WHERE task_id = ? ORDER BY number",
        task_id,
    )
    return TaskRow(*row), [_input(each) for each in inputs]


def _columns(row: TaskInputRow) -> tuple[Any, ...]:
    return (
        row.number,
        json.dumps(dict(row.parameters)),
        row.conversation_id,
        row.state,
        row.run_id,
        row.answer,
        None if row.error is None else json.dumps(dict(row.error)),
        row.tokens,
    )


def _input(row: Any) -> TaskInputRow:
    number, parameters, conversation_id, state, run_id, answer, error, tokens = row
    return TaskInputRow(
        number,
        json.loads(parameters),
        conversation_id,
        state,
        run_id,
        answer,
        None if error is None else json.loads(error),
        tokens,
    )
