"""Delete the content of conversations, sandboxes and users from every table.

The functions take a connection, and run inside a transaction of `Store.write`. Rows that only have
names and times stay: those of the life of a sandbox, until they are buried.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence

from sbx.store import Store
from sbx.store.idempotency import Slot
from sbx.store.runs import Begun

# Events that have names, times and causes only. Others name hosts, grants or messages.
_PLAIN_EVENTS = (
    *("created", "started", "stopped", "expiring", "extended", "expired", "restored", "deleted"),
    *("conversation_deleted", "mounted", "unmounted", "honeytoken", "unfrozen"),
)
_RUNS = (
    "SELECT id FROM runs WHERE sandbox_id IN (SELECT value FROM json_each(:sandboxes))"
    " AND (:name IS NULL OR conversation = :name)"
)


def erase_content(
    on: sqlite3.Connection,
    sandboxes: Iterable[str],
    conversation: str | None = None,
    slots: Sequence[Slot] = (),
) -> None:
    """Delete the runs, the rows of uploads, and the events with content: those of the sandboxes, or
    of one conversation of them. Idempotent calls that began these runs, and those of `slots`, lose
    their replies."""
    ids = json.dumps([*sandboxes])
    values = {"sandboxes": ids, "name": conversation, "plain": json.dumps(_PLAIN_EVENTS)}
    within = "sandbox_id IN (SELECT value FROM json_each(:sandboxes)) AND (:name IS NULL OR "
    on.execute(
        f"UPDATE idempotency SET body = NULL, erased = 1 WHERE run_id IN ({_RUNS})",  # noqa: S608
        values,
    )
    _forget_replies(on, slots)
    on.execute(f"DELETE FROM runs WHERE {within} conversation = :name)", values)  # noqa: S608
    on.execute(f"DELETE FROM uploads WHERE {within} conversation = :name)", values)  # noqa: S608
    on.execute(
        f"DELETE FROM events WHERE {within}"  # noqa: S608
        " json_extract(details, '$.conversation') = :name)"
        " AND type NOT IN (SELECT value FROM json_each(:plain))",
        values,
    )


def erase_context(on: sqlite3.Connection, sandbox_id: str, conversation: str, context: str) -> None:
    """Delete the runs of a context, with their replies, and its name in the events."""
    place = (sandbox_id, conversation, context)
    where = "sandbox_id = ? AND conversation = ? AND context = ?"
    on.execute(
        "UPDATE idempotency SET body = NULL, erased = 1"  # noqa: S608
        f" WHERE run_id IN (SELECT id FROM runs WHERE {where})",
        place,
    )
    on.execute(f"DELETE FROM runs WHERE {where}", place)  # noqa: S608
    on.execute(
        "UPDATE events SET details = json_remove(details, '$.context') WHERE sandbox_id = ?"
        " AND json_extract(details, '$.conversation') = ?"
        " AND json_extract(details, '$.context') = ?",
        place,
    )


def slots_of(runs: Sequence[Begun]) -> list[Slot]:
    """Return the idempotency keys of the calls that began these runs."""
    return [run.reservation for run in runs if run.reservation is not None]


def erase_runs(on: sqlite3.Connection, runs: Sequence[Begun]) -> None:
    """Delete the records of these runs."""
    _forget_replies(on, slots_of(runs))
    on.executemany("DELETE FROM runs WHERE id = ?", [(run.id,) for run in runs])


def _forget_replies(on: sqlite3.Connection, slots: Sequence[Slot]) -> None:
    on.executemany(
        "UPDATE idempotency SET body = NULL, erased = 1 WHERE owner = ? AND key = ?", slots
    )


def erase_inputs(
    on: sqlite3.Connection,
    owner: str,
    user_id: str | None,
    agent_id: str | None,
    conversation: str | None = None,
) -> None:
    """Delete the parameters and answers of the tasks of a user and agent, or of one conversation
    of them."""
    on.execute(
        "UPDATE task_inputs SET parameters = 'null', answer = NULL, error = NULL, cache_key = NULL"
        " WHERE (:name IS NULL OR conversation_id = :name) AND task_id IN"
        " (SELECT id FROM tasks WHERE owner = :owner AND user_id = :user AND agent_id = :agent)",
        {"owner": owner, "user": user_id, "agent": agent_id, "name": conversation},
    )


def related(on: sqlite3.Connection, sandbox_id: str) -> list[str]:
    """Return the sandbox, the others with its workspace, and the earlier ones of its session."""
    rows = on.execute(
        "SELECT other.id FROM sandboxes AS this JOIN sandboxes AS other ON other.id = this.id"
        " OR other.workspace_id = this.workspace_id"
        " OR (other.owner = this.owner AND other.session_id = this.session_id)"
        " WHERE this.id = ?",
        (sandbox_id,),
    )
    return [row[0] for row in rows]


# -- a user ------------------------------------------------------------------------------------


def count_of_user(on: sqlite3.Connection, owner: str, user_id: str) -> dict[str, int]:
    """Return the number of rows of a user, by kind."""
    values = {"owner": owner, "user": user_id}
    return {
        kind: on.execute(f"SELECT count(*) FROM {rows}", values).fetchone()[0]  # noqa: S608
        for kind, rows in _OF_USER.items()
    }


def begin_user(on: sqlite3.Connection, owner: str, user_id: str) -> None:
    """Record that the data of a user is being deleted, and revoke the tokens."""
    values = {"owner": owner, "user": user_id}
    on.execute("INSERT OR IGNORE INTO forgotten_users VALUES (:owner, :user)", values)
    on.execute(
        "UPDATE tokens SET revoked_at = created_at"
        " WHERE owner = :owner AND user_id = :user AND revoked_at IS NULL",
        values,
    )


async def users_in_deletion(store: Store) -> list[tuple[str, str]]:
    """Return the users whose deletion has begun, and has not ended, each with the owner."""
    return [
        (row["owner"], row["user_id"]) for row in await store.rows("SELECT * FROM forgotten_users")
    ]


def erase_user(on: sqlite3.Connection, owner: str, user_id: str) -> None:
    """Delete all rows of a user, whose sandboxes were deleted before. The row of a sandbox whose
    files are not removed yet stays, and with it the intention."""
    values = {"owner": owner, "user": user_id}
    for statement in (
        "DELETE FROM chats WHERE owner = :owner AND user_id = :user",
        "DELETE FROM tasks WHERE owner = :owner AND user_id = :user",
        "DELETE FROM console_sessions WHERE token_id IN (SELECT id FROM tokens"
        " WHERE owner = :owner AND user_id = :user)",
        "DELETE FROM tokens WHERE owner = :owner AND user_id = :user",
        f"DELETE FROM {_REPLIES}",  # noqa: S608
        "DELETE FROM sandboxes WHERE owner = :owner AND user_id = :user AND files_removed = 1",
        "DELETE FROM workspaces WHERE owner = :owner AND deleted_at IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE workspace_id = workspaces.id)",
        "DELETE FROM forgotten_users WHERE owner = :owner AND user_id = :user AND NOT EXISTS"
        " (SELECT 1 FROM sandboxes WHERE owner = :owner AND user_id = :user)",
    ):
        on.execute(statement, values)


_SANDBOXES = "(SELECT id FROM sandboxes WHERE owner = :owner AND user_id = :user)"
_CHATS = "(SELECT id FROM chats WHERE owner = :owner AND user_id = :user)"
_TOKENS = "(SELECT id FROM tokens WHERE owner = :owner AND user_id = :user)"
_REPLIES = (
    "idempotency WHERE json_extract(owner, '$[0]') = 'token'"
    " AND json_extract(owner, '$[1]') = :owner AND json_extract(owner, '$[2]') = :user"
)
_OF_USER = {  # the rows of a user, by kind
    "sessions": _SANDBOXES,
    "conversations": "(SELECT agent_id, name FROM conversations JOIN sandboxes ON id = sandbox_id"
    " WHERE owner = :owner AND user_id = :user UNION"
    " SELECT agent_id, conversation_id FROM chats WHERE owner = :owner AND user_id = :user)",
    "chats": _CHATS,
    "messages": f"messages WHERE chat_id IN {_CHATS}",
    "agent_runs": f"agent_runs WHERE chat_id IN {_CHATS}",
    "approvals": f"approvals WHERE chat_id IN {_CHATS}",
    "rules": f"approval_rules WHERE chat_id IN {_CHATS}",
    "runs": f"runs WHERE sandbox_id IN {_SANDBOXES}",
    "uploads": f"uploads WHERE sandbox_id IN {_SANDBOXES}",
    "events": f"events WHERE sandbox_id IN {_SANDBOXES}",
    "tasks": "tasks WHERE owner = :owner AND user_id = :user",
    "tokens": _TOKENS,
    "logins": f"console_sessions WHERE token_id IN {_TOKENS}",
    "replies": _REPLIES,
}
