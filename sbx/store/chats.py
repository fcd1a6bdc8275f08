"""Conversations with a model: their owners, and the sandboxes in which their agents work.

A chat is deleted with its conversation, with the sandbox or session that is deleted on request, and
with its project. Its messages, runs, approvals and rules are deleted with it. The chat of a session
that only expired stays as long as the session's tombstone, for a user who comes back.
"""

import json
import sqlite3
from dataclasses import asdict

from msgspec import Struct, structs
from msgspec.structs import astuple, replace

from sbx.errors import Conflict, NotFound
from sbx.protocol.changes import ChangeBudget, ChangesMode, ChangesSetting
from sbx.store import Store, erasure
from sbx.store.errors import decoded


class ChatRow(Struct, frozen=True):
    """`sandbox_id` is the last sandbox of the agent. A chat without `project_id` is temporary.
    `title`: that of its user, or the begin of the first message. `profile_id`: the version of the
    profile of its agent."""

    id: str
    owner: str
    conversation_id: str
    user_id: str
    agent_id: str
    created_at: float
    last_used_at: float
    business_domain_id: str | None = None
    sandbox_id: str | None = None
    project_id: str | None = None
    title: str | None = None
    profile_id: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Return the names that identify it: the owner first, the conversation last."""
        return self.owner, self.user_id, self.agent_id, self.conversation_id


_CHAT = ", ".join(ChatRow.__struct_fields__)


async def ensure(store: Store, row: ChatRow) -> ChatRow:
    """Return the chat with this `key`, marked as used now in this sandbox; add it if it is missing.

    A row without a project accepts the project of the existing chat. Raise Conflict
    `conversation_of_another` if the chat belongs to another project; NotFound for a missing
    project.
    """

    def act(on: sqlite3.Connection) -> ChatRow:
        matches = _named(on, row.owner, row.conversation_id, row.user_id, row.agent_id)
        if not matches:
            return _added(on, row)
        there = matches[0]
        if row.project_id not in (None, there.project_id):
            raise Conflict(
                f"the conversation {row.conversation_id} belongs to another project",
                code="conversation_of_another",
                hint="choose another conversation_id",
            )
        used = replace(
            there,
            last_used_at=max(there.last_used_at, row.last_used_at),
            sandbox_id=row.sandbox_id or there.sandbox_id,
            title=there.title or row.title,
        )
        on.execute(
            "UPDATE chats SET last_used_at = ?, sandbox_id = ?, title = ? WHERE id = ?",
            (used.last_used_at, used.sandbox_id, used.title, used.id),
        )
        return used

    return await store.write(act)


async def named(
    store: Store,
    owner: str,
    conversation_id: str,
    *,
    user_id: str | None = None,
    agent_id: str | None = None,
) -> list[ChatRow]:
    """Return the owner's chats with this conversation id; at most one of each user and agent."""
    return await store.read(lambda on: _named(on, owner, conversation_id, user_id, agent_id))


async def list_for_owner(store: Store, owner: str, *, limit: int = 1000) -> list[ChatRow]:
    rows = await store.rows(
        f"SELECT {_CHAT} FROM chats WHERE owner = ?"  # noqa: S608
        " ORDER BY last_used_at DESC, id LIMIT ?",
        owner,
        limit,
    )
    return [ChatRow(*row) for row in rows]


class ChatFilter(Struct, frozen=True, kw_only=True):
    """The chats of a list: None selects all. `search` is a part of a title; `after` is the time of
    the last use and the id of the last chat of the page before."""

    owner: str
    user_id: str | None = None
    agent_id: str | None = None
    conversation_id: str | None = None
    project_id: str | None = None
    search: str | None = None
    after: tuple[float, str] | None = None


async def page(
    store: Store, chosen: ChatFilter, *, now: float, limit: int
) -> list[tuple[ChatRow, int]]:
    """Return chats with the number of their pending approvals, the last used first."""
    used, chat_id = chosen.after or (None, None)
    rows = await store.rows(
        f"SELECT {_CHAT}, (SELECT count(*) FROM approvals AS a WHERE a.chat_id = chats.id"  # noqa: S608
        "   AND a.decided_by IS NULL AND a.expires_at > :now)"
        " FROM chats WHERE owner = :owner"
        " AND (:user_id IS NULL OR user_id = :user_id)"
        " AND (:agent_id IS NULL OR agent_id = :agent_id)"
        " AND (:conversation_id IS NULL OR conversation_id = :conversation_id)"
        " AND (:project_id IS NULL OR project_id = :project_id)"
        " AND (:search IS NULL OR instr(lower(coalesce(title, conversation_id)), lower(:search)))"
        " AND (:used IS NULL OR (last_used_at, id) < (:used, :chat_id))"
        " ORDER BY last_used_at DESC, id DESC LIMIT :limit",
        **structs.asdict(chosen) | {"after": None},
        used=used,
        chat_id=chat_id,
        now=now,
        limit=limit,
    )
    return [(ChatRow(*row[:-1]), row[-1]) for row in map(tuple, rows)]


async def set_title(store: Store, chat_id: str, title: str) -> None:
    await store.write(
        lambda on: on.execute("UPDATE chats SET title = ? WHERE id = ?", (title, chat_id)).rowcount
    )


async def changes_setting(store: Store, chat_id: str) -> ChangesSetting:
    """Return which changes of files need an approval in this chat; the default if it is deleted."""
    row = await store.row(
        "SELECT changes, ask_outside, change_budgets FROM chats WHERE id = ?", chat_id
    )
    if row is None:
        return ChangesSetting()
    mode: ChangesMode = "allow" if row["changes"] == "allow" else "ask"
    budgets = tuple(ChangeBudget(**budget) for budget in decoded(row["change_budgets"]))
    return ChangesSetting(mode, tuple(decoded(row["ask_outside"])), budgets)


async def set_changes(store: Store, chat_id: str, setting: ChangesSetting) -> None:
    """Store the setting of this chat. Do nothing if it is deleted."""
    budgets = json.dumps([asdict(budget) for budget in setting.budgets])
    values = (setting.mode, json.dumps(setting.ask_outside), budgets, chat_id)
    await store.write(
        lambda on: (
            on.execute(
                "UPDATE chats SET changes = ?, ask_outside = ?, change_budgets = ? WHERE id = ?",
                values,
            ).rowcount
        )
    )


async def of_project(store: Store, project_id: str) -> list[ChatRow]:
    rows = await store.rows(f"SELECT {_CHAT} FROM chats WHERE project_id = ?", project_id)  # noqa: S608
    return [ChatRow(*row) for row in rows]


async def of_user(store: Store, owner: str, user_id: str) -> list[ChatRow]:
    rows = await store.rows(
        f"SELECT {_CHAT} FROM chats WHERE owner = ? AND user_id = ?",  # noqa: S608
        owner,
        user_id,
    )
    return [ChatRow(*row) for row in rows]


async def in_projects(store: Store, sandbox_id: str) -> list[ChatRow]:
    """Return the chats of this sandbox that work in a project."""
    rows = await store.rows(
        f"SELECT {_CHAT} FROM chats WHERE sandbox_id = ? AND project_id IS NOT NULL",  # noqa: S608
        sandbox_id,
    )
    return [ChatRow(*row) for row in rows]


async def delete(store: Store, chat_id: str) -> bool:
    """Return whether the chat existed. Its content in sandboxes that have ended goes with it."""

    def act(on: sqlite3.Connection) -> bool:
        row = on.execute(f"SELECT {_CHAT} FROM chats WHERE id = ?", (chat_id,)).fetchone()  # noqa: S608
        if row is None:
            return False
        chat = ChatRow(*row)
        of_session = (chat.owner, chat.user_id, chat.agent_id, chat.sandbox_id)
        sandboxes = on.execute(
            "SELECT id FROM sandboxes WHERE deleted_at IS NOT NULL AND"
            " ((owner, user_id, agent_id) = (?, ?, ?) OR id = ?)",
            of_session,
        )
        erasure.erase_content(on, [each[0] for each in sandboxes], chat.conversation_id)
        names = (chat.owner, chat.user_id, chat.agent_id, chat.conversation_id)
        erasure.erase_inputs(on, *names)
        on.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
        return True

    return await store.write(act)


async def delete_unused(store: Store, row: ChatRow) -> None:
    """Delete a chat that a refused request created: it has no messages and no runs."""
    if row.created_at == row.last_used_at:
        await store.write(
            lambda on: on.execute(
                "DELETE FROM chats WHERE id = ? AND last_seq = 0 AND last_used_at = created_at"
                " AND NOT EXISTS (SELECT 1 FROM agent_runs WHERE chat_id = chats.id)",
                (row.id,),
            )
        )


def drop_of_conversation(on: sqlite3.Connection, sandbox_id: str, name: str) -> bool:
    """Delete the chats about a conversation of this sandbox: of each sandbox with the same
    workspace, or with the same user and agent if this one is their session. Return whether one
    existed."""
    dropped = on.execute(
        "DELETE FROM chats WHERE conversation_id = :name"
        " AND owner = (SELECT owner FROM sandboxes WHERE id = :sandbox)"
        " AND (sandbox_id IN (SELECT id FROM sandboxes WHERE workspace_id ="
        "   (SELECT workspace_id FROM sandboxes WHERE id = :sandbox))"
        "  OR (user_id, agent_id) = (SELECT user_id, agent_id FROM sandboxes"
        "   WHERE id = :sandbox AND session_id IS NOT NULL))",
        {"sandbox": sandbox_id, "name": name},
    )
    return dropped.rowcount > 0


def drop_of_sandbox(on: sqlite3.Connection, sandbox_id: str) -> None:
    """Delete the chats of this sandbox and, if it is a session, those of its user and agent, with
    the inputs of their tasks. If they have a newer session, keep them: they belong to that one."""
    succeeded = _first(
        on,
        "SELECT 1 FROM sandboxes AS one JOIN sandboxes AS other"
        " ON other.owner = one.owner AND other.session_id = one.session_id"
        " AND other.deleted_at IS NULL AND other.id != one.id WHERE one.id = ?",
        (sandbox_id,),
    )
    if succeeded is None:
        on.execute("DELETE FROM chats WHERE sandbox_id = ?", (sandbox_id,))
        on.execute(
            "DELETE FROM chats WHERE (owner, user_id, agent_id) = (SELECT owner, user_id, agent_id"
            " FROM sandboxes WHERE id = ? AND session_id IS NOT NULL)",
            (sandbox_id,),
        )
        row = _first(
            on, "SELECT owner, user_id, agent_id FROM sandboxes WHERE id = ?", (sandbox_id,)
        )
        if row is not None:
            erasure.erase_inputs(on, *row)


def _added(on: sqlite3.Connection, row: ChatRow) -> ChatRow:
    project = (row.project_id, row.owner)
    if row.project_id is not None and not _first(
        on, "SELECT 1 FROM projects WHERE id = ? AND owner = ? AND deleted_at IS NULL", project
    ):
        raise NotFound(f"project {row.project_id} does not exist")
    on.execute(
        f"INSERT INTO chats ({_CHAT}) VALUES ({', '.join('?' * 12)})",  # noqa: S608
        astuple(row),
    )
    return row


def _named(
    on: sqlite3.Connection,
    owner: str,
    conversation_id: str,
    user_id: str | None,
    agent_id: str | None,
) -> list[ChatRow]:
    rows = on.execute(
        f"SELECT {_CHAT} FROM chats WHERE owner = :owner AND conversation_id = :name"  # noqa: S608
        " AND (:user IS NULL OR user_id = :user) AND (:agent IS NULL OR agent_id = :agent)"
        " ORDER BY user_id, agent_id LIMIT 100",
        {"owner": owner, "name": conversation_id, "user": user_id, "agent": agent_id},
    )
    return [ChatRow(*row) for row in rows]


def _first(on: sqlite3.Connection, sql: str, args: tuple[str | None, ...]) -> sqlite3.Row | None:
    row: sqlite3.Row | None = on.execute(sql, args).fetchone()
    return row
