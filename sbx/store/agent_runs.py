"""The runs of agents: one at a time in a chat, and how each ended.

A run is `running` in the store from its start. A run that is still `running` when a service starts
was interrupted by the end of the service before it; its messages so far are kept.
"""

import json
import sqlite3
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from sbx.errors import Conflict, NotFound
from sbx.store import Store, record
from sbx.store.errors import decoded

_LIST_MAX = 200


class AgentRunRow(Struct, frozen=True):
    """`reason` is the cause of its end; an interrupted run has none. `seq` is its place in
    lists. `report` has its steps, tools and failures, see sbx.agent.progress."""

    id: str
    chat_id: str
    model: str
    max_steps: int
    started_at: float
    status: Literal["running", "ended", "interrupted"] = "running"
    reason: str | None = None
    usage: Mapping[str, int] | None = None
    error: Mapping[str, Any] | None = None
    ended_at: float | None = None
    seq: int = 0
    report: Mapping[str, Any] | None = None


async def begin(store: Store, row: AgentRunRow) -> None:
    """Raise Conflict `run_in_progress`; NotFound for a deleted chat."""

    def act(on: sqlite3.Connection) -> None:
        running = on.execute(
            "SELECT id FROM agent_runs WHERE chat_id = ? AND status = 'running'", (row.chat_id,)
        ).fetchone()
        if running is not None:
            raise Conflict(
                "the agent is at work in this conversation",
                code="run_in_progress",
                hint="wait for its end, or abort it",
                details={"run_id": running[0]},
            )
        begun = on.execute(
            "INSERT INTO agent_runs (id, chat_id, status, model, max_steps, started_at)"
            " SELECT ?, id, 'running', ?, ?, ? FROM chats WHERE id = ?",
            (row.id, row.model, row.max_steps, row.started_at, row.chat_id),
        )
        if begun.rowcount == 0:
            raise NotFound("the conversation was deleted", code="no_conversation")

    await store.write(act)


async def end(
    store: Store,
    run_id: str,
    *,
    reason: str,
    at: float,
    usage: Mapping[str, int] | None = None,
    error: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Record the end of a run. Do nothing if it has ended, or was deleted with its chat."""
    ended = (
        reason,
        None if usage is None else json.dumps(dict(usage)),
        None if error is None else json.dumps(dict(error)),
        None if report is None else json.dumps(dict(report)),
        at,
        run_id,
    )
    await store.write(
        lambda on: on.execute(
            "UPDATE agent_runs SET status = 'ended', reason = ?, usage = ?, error = ?, report = ?,"
            " ended_at = max(?, started_at) WHERE id = ? AND status = 'running'",
            ended,
        )
    )


async def mark_interrupted(store: Store, at: float) -> int:
    """Mark the runs of the previous service as interrupted, and return their number. Call this
    before anything runs."""
    return await store.write(
        lambda on: (
            on.execute(
                "UPDATE agent_runs SET status = 'interrupted', ended_at = max(?, started_at)"
                " WHERE status = 'running'",
                (at,),
            ).rowcount
        )
    )


async def get(store: Store, chat_id: str, run_id: str) -> AgentRunRow | None:
    row = await store.row("SELECT * FROM agent_runs WHERE chat_id = ? AND id = ?", chat_id, run_id)
    return None if row is None else _row(row)


async def list_for_chat(
    store: Store, chat_id: str, *, limit: int = 50, before: int | None = None
) -> list[AgentRunRow]:
    """Return the newest first; with `before`, only those with a lower `seq`."""
    rows = await store.rows(
        "SELECT * FROM agent_runs WHERE chat_id = :chat AND (:before IS NULL OR seq < :before)"
        " ORDER BY seq DESC LIMIT :limit",
        chat=chat_id,
        before=before,
        limit=max(1, min(limit, _LIST_MAX)),
    )
    return [_row(row) for row in rows]


async def ended_of_owner(
    store: Store, owner: str, *, since: float, bounds: Mapping[str, str], limit: int = 10_000
) -> list[AgentRunRow]:
    """Return the last runs that have ended since a time. `bounds` are columns of their chats."""
    named = "".join(f" AND c.{name} = :{name}" for name in bounds)
    rows = await store.rows(
        "SELECT r.* FROM agent_runs AS r JOIN chats AS c ON c.id = r.chat_id"  # noqa: S608
        " WHERE c.owner = :owner AND r.status != 'running' AND r.started_at >= :since"
        f"{named} ORDER BY r.started_at DESC LIMIT :limit",
        owner=owner,
        since=since,
        limit=limit,
        **bounds,
    )
    return [_row(row) for row in rows]


def _row(row: sqlite3.Row) -> AgentRunRow:
    parts = {name: row[name] and decoded(row[name]) for name in ("usage", "error", "report")}
    return record(AgentRunRow, row, **parts)
