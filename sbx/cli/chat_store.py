"""One conversation of `sbx chat`: its options, its row in the store, and its history."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.history import MessageHistory, StoredHistory, repair_history
from sbx.agent.sandbox import ToolSandbox
from sbx.aio import SystemClock
from sbx.errors import BadRequest, Conflict, NotFound
from sbx.protocol.changes import ChangesMode, ChangesSetting
from sbx.store import Store, chats
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatRow
from sbx.store.messages import Messages

OWNER = "local"
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class ChatSelection:
    """The options of a chat.

    `resume` is the id of a conversation, "" for the last used one, or None for a new one. `project`
    is the path of a directory, without symlinks. `sandboxed` is whether its sandbox is on.
    `changes` and `ask_outside` select the changes of files that need approval; None keeps the
    stored setting.
    """

    directory: Path
    resume: str | None
    policy: str
    project: Path | None
    sandboxed: bool
    connect: str | None
    key: str | None
    approval_timeout_s: float
    changes: ChangesMode | None = None
    ask_outside: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """An open conversation. `asks_to_restore`: its policy has `host_executables = "ask"`."""

    row: ChatRow
    sandbox: ToolSandbox
    history: MessageHistory
    approvals: Approvals
    sandboxed: bool = True
    changes: ChangesSetting = field(default_factory=ChangesSetting)
    asks_to_restore: bool = False

    @property
    def id(self) -> str:
        return self.row.conversation_id

    @property
    def elsewhere(self) -> str | None:
        """The id of the sandbox in a service that stores the files, or None."""
        return self.row.agent_id if _is_there(self.row) else None

    @property
    def in_project(self) -> bool:
        return self.row.project_id is not None

    @property
    def place(self) -> AgentContext:
        row = self.row
        return AgentContext(
            row.owner, row.conversation_id, row.user_id, row.agent_id, row.project_id
        )


async def row_of(store: Store, options: ChatSelection, agent_id: str) -> ChatRow:
    """Return the row of the requested conversation, or a new row, which is not stored yet."""
    now = CLOCK.now()
    if options.resume is None:
        return ChatRow(
            id=f"talk-{secrets.token_hex(8)}",
            owner=OWNER,
            conversation_id=f"chat-{secrets.token_hex(4)}",
            user_id=OWNER,
            agent_id=agent_id,
            created_at=now,
            last_used_at=now,
        )
    row = await _stored(store, options.resume, there=bool(options.connect))
    if _is_there(row) != bool(options.connect):
        where = "in a service" if _is_there(row) else "on this machine"
        raise BadRequest(
            f"the files of the conversation {row.conversation_id} are {where}",
            hint="name that service with --connect" if not options.connect else "omit --connect",
        )
    return replace(row, last_used_at=now)


async def _stored(store: Store, conversation_id: str, *, there: bool) -> ChatRow:
    if conversation_id:
        match = next(iter(await chats.named(store, OWNER, conversation_id)), None)
    else:
        rows = await chats.of_owner(store, OWNER)
        match = next((row for row in rows if _is_there(row) == there), None)
    if match is None:
        which = conversation_id or "to continue"
        raise NotFound(
            f"there is no conversation {which}",
            code="no_conversation",
            hint="sbx chat --list shows the stored conversations",
        )
    return match


def _is_there(row: ChatRow) -> bool:
    """Return whether the sandbox of a conversation is in a service.

    A sandbox in this process is a row of the same store, and `row.sandbox_id` names it.
    """
    return row.sandbox_id is None


async def approvals_of(store: Store, options: ChatSelection) -> Approvals:
    """Return the approvals. Deny the pending ones of an earlier process, and add the denials to the
    history for the model."""
    approvals = Approvals(ApprovalStore(store), CLOCK, timeout_s=options.approval_timeout_s)
    reasons: dict[str, dict[str, str]] = {}
    for denied in await approvals.recover():
        if denied.decision is not None:
            by_call = reasons.setdefault(denied.conversation_id, {})
            by_call[denied.tool_call_id] = denied.decision.why
    for conversation_id, calls in reasons.items():
        for row in await chats.named(store, OWNER, conversation_id):
            await repair_history(history_of(store, row), calls)
    return approvals


async def changes_of(store: Store, row: ChatRow, options: ChatSelection) -> ChangesSetting:
    """Store the requested setting, and return the effective one."""
    stored = await chats.changes_setting(store, row.id)
    setting = ChangesSetting(
        stored.mode if options.changes is None else options.changes,
        stored.ask_outside if options.ask_outside is None else options.ask_outside,
    )
    if setting != stored:
        await chats.set_changes(store, row.id, setting)
    return setting


def history_of(store: Store, row: ChatRow) -> StoredHistory:
    return StoredHistory(Messages(store, CLOCK), row.id)


@contextmanager
def plain_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        if error.code != "data_dir_in_use":
            raise
        raise Conflict(
            f"another sbx chat uses the conversations in {directory}",
            code="data_dir_in_use",
            hint="end the other chat, or use another directory with --data-dir",
        ) from error
