"""One conversation of `sbx chat`: which one is wanted, and what was said in it."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sbx.agent.approvals import Approvals, Place
from sbx.agent.history import History, mend
from sbx.agent.sandbox import Sandbox
from sbx.agent.stored_history import StoredHistory
from sbx.clock import SystemClock
from sbx.errors import BadRequest, Conflict, NotFound
from sbx.protocol.changes import ChangesMode, ChangesSetting
from sbx.runtime.store import Store, chats
from sbx.runtime.store.approvals import StoredApprovals
from sbx.runtime.store.chats import ChatRow
from sbx.runtime.store.messages import Messages

OWNER = "local"
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which conversation. `resume`: its id, "" for the one that was used last, None for a new one;
    `project`: a directory by its path without symlinks; `sandboxed`: whether its sandbox is on.
    `changes` and `ask_outside`: which changes of its files are asked about; None: as it is kept."""

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
class Talk:
    """An open conversation. `asks_to_restore`: its policy has `host_executables = "ask"`."""

    row: ChatRow
    sandbox: Sandbox
    history: History
    approvals: Approvals
    sandboxed: bool = True
    changes: ChangesSetting = field(default_factory=ChangesSetting)
    asks_to_restore: bool = False

    @property
    def id(self) -> str:
        return self.row.conversation_id

    @property
    def elsewhere(self) -> str | None:
        """The sandbox in a service that has its files, and stays there."""
        return self.row.agent_id if _is_there(self.row) else None

    @property
    def in_project(self) -> bool:
        return self.row.project_id is not None

    @property
    def place(self) -> Place:
        row = self.row
        return Place(row.owner, row.conversation_id, row.user_id, row.agent_id, row.project_id)


async def row_of(store: Store, wanted: Wanted, agent_id: str) -> ChatRow:
    """The one that is wanted, or a new one, which is not kept yet."""
    now = CLOCK.now()
    if wanted.resume is None:
        return ChatRow(
            id=f"talk-{secrets.token_hex(8)}",
            owner=OWNER,
            conversation_id=f"chat-{secrets.token_hex(4)}",
            user_id=OWNER,
            agent_id=agent_id,
            created_at=now,
            last_used_at=now,
        )
    row = await _kept(store, wanted.resume, there=bool(wanted.connect))
    if _is_there(row) != bool(wanted.connect):
        where = "in a service" if _is_there(row) else "on this machine"
        raise BadRequest(
            f"the files of the conversation {row.conversation_id} are {where}",
            hint="name that service with --connect" if not wanted.connect else "drop --connect",
        )
    return replace(row, last_used_at=now)


async def _kept(store: Store, conversation_id: str, *, there: bool) -> ChatRow:
    if conversation_id:
        found = next(iter(await chats.named(store, OWNER, conversation_id)), None)
    else:
        rows = await chats.of_owner(store, OWNER)
        found = next((row for row in rows if _is_there(row) == there), None)
    if found is None:
        which = conversation_id or "to go on with"
        raise NotFound(
            f"there is no conversation {which}",
            code="no_conversation",
            hint="sbx chat --list shows those that are kept",
        )
    return found


def _is_there(row: ChatRow) -> bool:
    """Whether its sandbox is in a service: one in a house is a row of the same store."""
    return row.sandbox_id is None


async def approvals_of(store: Store, wanted: Wanted) -> Approvals:
    """Whatever an earlier process left pending is denied, and the model is told so."""
    approvals = Approvals(StoredApprovals(store), CLOCK, timeout_s=wanted.approval_timeout_s)
    why: dict[str, dict[str, str]] = {}
    for denied in await approvals.recover():
        if denied.decision is not None:
            of_talk = why.setdefault(denied.conversation_id, {})
            of_talk[denied.tool_call_id] = denied.decision.why
    for conversation_id, calls in why.items():
        for row in await chats.named(store, OWNER, conversation_id):
            await mend(history_of(store, row), calls)
    return approvals


async def changes_of(store: Store, row: ChatRow, wanted: Wanted) -> ChangesSetting:
    """Store the wanted setting, and return the one that counts."""
    kept = await chats.changes_setting(store, row.id)
    setting = ChangesSetting(
        kept.mode if wanted.changes is None else wanted.changes,
        kept.ask_outside if wanted.ask_outside is None else wanted.ask_outside,
    )
    if setting != kept:
        await chats.set_changes(store, row.id, setting)
    return setting


def history_of(store: Store, row: ChatRow) -> StoredHistory:
    return StoredHistory(Messages(store, CLOCK), row.id)


@contextmanager
def told_plainly(directory: Path) -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        if error.code != "data_dir_in_use":
            raise
        raise Conflict(
            f"another sbx chat uses the conversations in {directory}",
            code="data_dir_in_use",
            hint="end that one, or keep this one's elsewhere with --data-dir",
        ) from error
