"""Tasks from templates, and the state of each input, or of each step of an input."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from sbx.store import Store
from sbx.store.errors import decoded

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
    """`state`: `waiting`, `running`, `interrupted`, `skipped`, or the reason of the end of its run.
    `step`: empty in a task without steps. `cache_key`: a hash of its input, if its result may be
    used again; `cached`: it is the result of an earlier one. `erased`: its content is deleted."""

    number: int
    parameters: Mapping[str, str]
    conversation_id: str
    state: str = "waiting"
    run_id: str | None = None
    answer: str | None = None
    error: Mapping[str, Any] | None = None
    tokens: int = 0
    step: str = ""
    cache_key: str | None = None
    cached: bool = False
    erased: bool = False


async def add(store: Store, task: TaskRow, inputs: Sequence[TaskInputRow]) -> None:
    """Add a task. Delete the oldest ended tasks of its owner beyond the limit."""

    def act(on: sqlite3.Connection) -> None:
        on.execute("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(task))
        on.executemany(
            f"INSERT INTO task_inputs (task_id, {_COLUMNS})"  # noqa: S608
            f" VALUES (?{', ?' * len(_COLUMNS.split(','))})",
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

    def act(on: sqlite3.Connection) -> None:
        kept = on.execute(
            "SELECT 1 FROM chats JOIN tasks USING (owner, user_id, agent_id)"
            " WHERE tasks.id = ? AND chats.conversation_id = ?",
            (task_id, row.conversation_id),
        ).fetchone()
        error = None if row.error is None else json.dumps(dict(row.error))
        texts = (row.answer, error) if kept or row.run_id is None else (None, None)
        on.execute(
            "UPDATE task_inputs SET state = ?, run_id = ?, answer = ?, error = ?, tokens = ?,"
            " conversation_id = ?, cache_key = ?, cached = ?"
            " WHERE task_id = ? AND number = ? AND step = ?",
            (
                *(row.state, row.run_id, *texts, row.tokens),
                *(row.conversation_id, row.cache_key, row.cached),
                *(task_id, row.number, row.step),
            ),
        )

    await store.write(act)


async def resume(store: Store, task_id: str, inputs: Sequence[TaskInputRow]) -> None:
    """Begin an ended task again, in which these inputs wait."""

    def act(on: sqlite3.Connection) -> None:
        on.execute("UPDATE tasks SET ended_at = NULL WHERE id = ?", (task_id,))
        on.executemany(
            "UPDATE task_inputs SET state = 'waiting', run_id = NULL, answer = NULL, error = NULL,"
            " tokens = 0, conversation_id = ? WHERE task_id = ? AND number = ? AND step = ?",
            [(each.conversation_id, task_id, each.number, each.step) for each in inputs],
        )

    await store.write(act)


async def cached(store: Store, task: TaskRow, cache_key: str, since: float) -> TaskInputRow | None:
    """Return the last result of the same input for this user and agent, whose conversation still
    exists, of a task since then."""
    row = await store.row(
        f"SELECT {_COLUMNS}, parameters = 'null' AS erased FROM task_inputs"  # noqa: S608
        " WHERE cache_key = ? AND state = 'done' AND NOT cached AND answer IS NOT NULL"
        " AND task_id IN (SELECT id FROM tasks WHERE owner = ? AND user_id = ? AND agent_id = ?"
        "  AND created_at >= ?)"
        " AND EXISTS (SELECT 1 FROM chats WHERE owner = ? AND user_id = ? AND agent_id = ?"
        "  AND chats.conversation_id = task_inputs.conversation_id)"
        " ORDER BY rowid DESC LIMIT 1",
        cache_key,
        *(task.owner, task.user_id, task.agent_id, since),
        *(task.owner, task.user_id, task.agent_id),
    )
    return None if row is None else _input(row)


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
        f"SELECT {_COLUMNS}, parameters = 'null' AS erased FROM task_inputs"  # noqa: S608
        " WHERE task_id = ? ORDER BY number, rowid",
        task_id,
    )
    return TaskRow(*row), [_input(each) for each in inputs]


_COLUMNS = (
    "number, parameters, conversation_id, state, run_id, answer, error, tokens, step, cache_key,"
    " cached"
)


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
        row.step,
        row.cache_key,
        row.cached,
    )


def _input(row: Any) -> TaskInputRow:
    values = dict(row)
    error = values["error"]
    values["parameters"] = decoded(values["parameters"]) or {}
    values["error"] = None if error is None else decoded(error)
    values |= {name: bool(values[name]) for name in ("cached", "erased")}
    return TaskInputRow(**values)
