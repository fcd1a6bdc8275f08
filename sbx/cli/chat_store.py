"""The conversations of `sbx chat`: their rows and messages on this machine, and their sandboxes.

    here     the sandbox is in this process, in a separate `Service` for chats. There is one sandbox
             for each policy, and each chat is a conversation of that sandbox. If the agent works in
             a project, the conversation of the sandbox has only the uploads.
    there    the sandbox is in a service; only the messages are stored here

Only one process at a time uses a directory of conversations.
"""

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sbx.agent.approvals import AgentContext, Approvals
from sbx.agent.changing import denial
from sbx.agent.history import MessageHistory, StoredHistory, repair_history
from sbx.agent.profile import NO_PROFILE, AgentProfile
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools.approval_rules import Mode
from sbx.agent.tools.tool import ToolResult
from sbx.aio import Clock, in_thread
from sbx.client import Client
from sbx.errors import BadRequest, Conflict, NotFound
from sbx.protocol.changes import ChangeBudget, ChangesMode, ChangesSetting
from sbx.runtime.data_dir import DataDirLock
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.projects.projects import Project, mode_in
from sbx.service.projects.session import ProjectSession
from sbx.service.service import Service
from sbx.store import Store, chats
from sbx.store.approvals import ApprovalStore
from sbx.store.chats import ChatRow
from sbx.store.messages import Messages

OWNER = "local"
CLOCK = Clock()
_HERE = "chat"  # agent id of these rows; for a conversation in a service it is the sandbox id
_LONG_S = 30 * 86_400.0  # keep the variables while the user is away
_LIST_MAX = 500


@dataclass(frozen=True, slots=True)
class ChatSelection:
    """The options of a chat.

    `resume` is the id of a conversation, "" for the last used one, or None for a new one. `project`
    is the path of a directory, without symlinks. `sandboxed` is whether its sandbox is on.
    `sandbox` has the options of `narrowing.sandbox_options`, for the sandbox of a new conversation
    and for that of a project. `changes`, `ask_outside` and `budgets` select the changes of files
    that need approval, and `ask_commands` the setting of the project; None keeps the stored one.
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
    profile: AgentProfile = NO_PROFILE
    agent_id: str | None = None
    ask_outside: tuple[str, ...] | None = None
    budgets: tuple[ChangeBudget, ...] | None = None
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    ask_commands: bool | None = None


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
    mode: Mode = "free"

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


@asynccontextmanager
async def opened(options: ChatSelection) -> AsyncIterator[ChatConversation]:
    """Open a conversation until the context exits. Delete it if it has no message.

    Raise NotFound `no_conversation`, BadRequest, Conflict `data_dir_in_use`, and the errors of
    `Service`, of a sandbox, of a project and of the service.
    """
    opening = _opened_there(options) if options.connect else _opened_here(options)
    async with opening as conversation:
        yield conversation


async def listed(directory: Path) -> list[tuple[ChatRow, str]]:
    """Return the stored conversations, the last used first, each with its first message."""
    conversations = []
    async with _store(directory) as store:
        for row in await chats.list_for_owner(store, OWNER, limit=_LIST_MAX):
            first = await _history_of(store, row).messages(limit=1)
            conversations.append((row, first[0].message.content if first else ""))
    return conversations


async def removed(options: ChatSelection) -> None:
    """Delete a conversation and its files.

    Raise NotFound `no_conversation`, and BadRequest for a conversation in a service if the options
    do not name the service.
    """
    if options.connect:
        async with _store(options.directory) as store, _client(options) as client:
            row = await _row_of(store, options, "")
            with suppress(NotFound):  # the service has already removed it
                await client.delete(row.agent_id)
            await chats.delete(store, row.id)
    else:
        async with _service_at(options.directory) as service:
            await _drop(service, await _row_of(service.store, options, ""))


# -- in this process -------------------------------------------------------------------------------


@asynccontextmanager
async def _opened_here(options: ChatSelection) -> AsyncIterator[ChatConversation]:
    async with _service_at(options.directory) as service:
        row = await _row_of(service.store, options, _HERE)
        if row.project_id is None and options.project is None:
            _refuse_other_limits(options)
        row = await chats.ensure(service.store, await _placed(service, row, options))
        approvals = await _approvals_of(service.store, options)
        changes = await _changes_of(service.store, row, options)
        history = _history_of(service.store, row)
        try:
            async with AsyncExitStack() as stack:
                sandbox, sandboxed = await _sandbox(service, row, options.sandbox, stack)
                asks = isinstance(sandbox, ProjectSession) and sandbox.asks_about_host_executables
                mode: Mode = "free"
                if row.project_id is not None:
                    mode = mode_in(await service.projects.get(OWNER, row.project_id))
                yield ChatConversation(
                    row, sandbox, history, approvals, sandboxed, changes, asks, mode
                )
        finally:
            if not await history.messages(limit=1):
                await _drop(service, row)


@asynccontextmanager
async def _service_at(directory: Path) -> AsyncIterator[Service]:
    settings = Settings(
        data_dir=directory,
        project_dirs=(Path("/"),),  # the user chooses the directory
        project_owners=(os.geteuid(),),
        fast_path=False,  # a zygote pays off from the second kernel on
        idle_timeout=_LONG_S,
        gc_interval=0,
    )
    service = Service(settings)
    with _plain_errors(directory):
        await service.start()
    try:
        yield service
    finally:
        await service.close()


async def _placed(service: Service, row: ChatRow, options: ChatSelection) -> ChatRow:
    """Return the row with its sandbox and its project. Create them if they do not exist."""
    if row.sandbox_id is None:
        row = replace(row, sandbox_id=await _sandbox_of(service, options))
    if options.project is None:
        return row
    project = await _project_at(service, options.project, sandboxed=options.sandboxed)
    if options.resume is not None and row.project_id != project.id:
        raise BadRequest(
            f"the conversation {row.conversation_id} does not work in {options.project}",
            hint="omit --project to continue in its own directory",
        )
    if options.ask_commands is not None:
        await service.projects.change(OWNER, project.id, ask_commands=options.ask_commands)
    return replace(row, project_id=project.id)


async def _sandbox_of(service: Service, options: ChatSelection) -> str:
    """Return the id of the sandbox of all conversations with this policy and these options. Create
    it if needed."""
    caller, cursor = _caller(service), None
    policy, narrowed = options.policy, options.sandbox if options.project is None else {}
    _, decided = await service.runtime.decide(policy, **narrowed)
    while True:
        page = await service.sandboxes.list(caller, limit=_LIST_MAX, cursor=cursor)
        for view in page.items:
            if view.policy_name == policy and view.policy == decided:
                return view.id
        if (cursor := page.next_cursor) is None:
            return (await service.sandboxes.create(caller, policy=policy, **narrowed)).id


def _refuse_other_limits(options: ChatSelection) -> None:
    """Raise BadRequest for limits of a sandbox that exists."""
    if options.resume is not None and options.sandbox:
        raise BadRequest(
            "the sandbox of a stored conversation keeps its limits and variables",
            hint="omit --memory, --cpus, --env and --network-allow, or begin a new conversation",
        )


async def _project_at(service: Service, directory: Path, *, sandboxed: bool) -> Project:
    path, cursor = str(directory), None
    while True:
        page = await service.projects.list(OWNER, limit=_LIST_MAX, cursor=cursor)
        for project in page.items:
            if (project.working_directory, project.sandbox_enabled) == (path, sandboxed):
                return project
        if (cursor := page.next_cursor) is None:
            return await service.projects.create(
                OWNER,
                name=directory.name or path,
                working_directory=path,
                sandbox_enabled=sandboxed,
            )


async def _sandbox(
    service: Service, row: ChatRow, options: Mapping[str, Any], stack: AsyncExitStack
) -> tuple[ToolSandbox, bool]:
    """Return the agent's sandbox, and whether its restrictions are on. It is in use until the stack
    is closed."""
    assert row.sandbox_id is not None
    name = row.conversation_id
    using = service.sandboxes.using(
        _caller(service), row.sandbox_id, scope="execute", conversation=name
    )
    use = await stack.enter_async_context(using)
    conversation = use.conversation(name)
    if row.project_id is None:
        return conversation, True
    box = await stack.enter_async_context(
        service.projects.using(
            OWNER,
            row.project_id,
            name,
            policy=(await use.view()).policy_name,
            uploads=conversation,
            **options,
        )
    )
    if isinstance(box, ProjectSession):
        box.user_decides = True
    return box, box.sandboxed


async def _drop(service: Service, row: ChatRow) -> None:
    await service.deletions.chat(_caller(service), row)


def _caller(service: Service) -> Caller:
    return service.access.service_caller()


# -- in a service ----------------------------------------------------------------------------------


@asynccontextmanager
async def _opened_there(options: ChatSelection) -> AsyncIterator[ChatConversation]:
    if options.project is not None:
        raise BadRequest(
            "--project is a directory of this machine, and --connect uses a sandbox in a service",
            hint="omit one of them",
        )
    async with _store(options.directory) as store, _client(options) as client:
        if options.resume is None:
            box = await client.create(options.policy, **options.sandbox)
            row = await chats.ensure(store, await _row_of(store, options, box.id))
        else:
            _refuse_other_limits(options)
            row = await _row_of(store, options, "")
            box = client.sandbox(row.agent_id)
        history = _history_of(store, row)
        try:
            approvals = await _approvals_of(store, options)
            yield ChatConversation(row, box.conversation("default"), history, approvals)
        finally:
            if not await history.messages(limit=1):
                await chats.delete(store, row.id)
                await box.close()


def _client(options: ChatSelection) -> Client:
    return Client(options.connect, key=options.key)


@asynccontextmanager
async def _store(directory: Path) -> AsyncIterator[Store]:
    """Open the store of the messages without a `Service`."""
    with _plain_errors(directory):
        data = await in_thread(partial(DataDirLock, directory, keep=True))
    try:
        store = await Store.open_in(directory)
        try:
            yield store
        finally:
            await store.close()
    finally:
        await in_thread(data.close)


# -- the store ------------------------------------------------------------------------------------


async def _row_of(store: Store, options: ChatSelection, agent_id: str) -> ChatRow:
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
        rows = await chats.list_for_owner(store, OWNER)
        match = next((row for row in rows if _is_there(row) == there), None)
    if match is None:
        which = conversation_id or "to continue"
        raise NotFound(
            f"conversation {which} does not exist",
            code="no_conversation",
            hint="sbx chat --list shows the stored conversations",
        )
    return match


def _is_there(row: ChatRow) -> bool:
    """Return whether the sandbox of a conversation is in a service.

    A sandbox in this process is a row of the same store, and `row.sandbox_id` names it.
    """
    return row.sandbox_id is None


async def _approvals_of(store: Store, options: ChatSelection) -> Approvals:
    """Return the approvals. Deny the pending ones of an earlier process, and add the denials to the
    history for the model."""
    approvals = Approvals(ApprovalStore(store), CLOCK, timeout_s=options.approval_timeout_s)
    results: dict[str, dict[str, ToolResult]] = {}
    for denied in await approvals.recover():
        if denied.decision is not None:
            by_call = results.setdefault(denied.conversation_id, {})
            by_call[denied.tool_call_id] = denial(denied)
    for conversation_id, calls in results.items():
        for row in await chats.named(store, OWNER, conversation_id):
            await repair_history(_history_of(store, row), calls)
    return approvals


async def _changes_of(store: Store, row: ChatRow, options: ChatSelection) -> ChangesSetting:
    """Store the requested setting, and return the effective one."""
    stored = await chats.changes_setting(store, row.id)
    setting = ChangesSetting(
        stored.mode if options.changes is None else options.changes,
        stored.ask_outside if options.ask_outside is None else options.ask_outside,
        stored.budgets if options.budgets is None else options.budgets,
    )
    if setting != stored:
        await chats.set_changes(store, row.id, setting)
    return setting


def _history_of(store: Store, row: ChatRow) -> StoredHistory:
    return StoredHistory(Messages(store, CLOCK), row.id)


@contextmanager
def _plain_errors(directory: Path) -> Iterator[None]:
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
