"""Conversations of `sbx chat` in this process, in a separate `Service` for chats.

There is one sandbox for each policy, and each chat is a conversation of that sandbox. If the agent
works in a project, the conversation of the sandbox has only the uploads.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sbx.agent.sandbox import ToolSandbox
from sbx.cli.chat_store import (
    OWNER,
    ChatConversation,
    ChatSelection,
    approvals_of,
    changes_of,
    history_of,
    plain_errors,
    row_of,
)
from sbx.errors import BadRequest
from sbx.runtime.settings import Settings
from sbx.service.auth import Caller
from sbx.service.projects.box import ProjectSession
from sbx.service.projects.projects import Project
from sbx.service.service import Service
from sbx.store import chats
from sbx.store.chats import ChatRow

_HERE = "chat"  # agent id of these rows; for a conversation in a service it is the sandbox id
_LONG_S = 30 * 86_400.0  # keep the variables while the user is away
_LIST_MAX = 500


@asynccontextmanager
async def opened_here(options: ChatSelection) -> AsyncIterator[ChatConversation]:
    async with service_at(options.directory) as service:
        row = await row_of(service.store, options, _HERE)
        row = await chats.ensure(service.store, await _placed(service, row, options))
        approvals = await approvals_of(service.store, options)
        changes = await changes_of(service.store, row, options)
        history = history_of(service.store, row)
        try:
            async with AsyncExitStack() as stack:
                sandbox, sandboxed = await _sandbox(service, row, stack)
                asks = isinstance(sandbox, ProjectSession) and sandbox.asks_about_host_executables
                yield ChatConversation(row, sandbox, history, approvals, sandboxed, changes, asks)
        finally:
            if not await history.messages(limit=1):
                await drop(service, row)


@asynccontextmanager
async def service_at(directory: Path) -> AsyncIterator[Service]:
    settings = Settings(
        data_dir=directory,
        project_dirs=(Path("/"),),  # the user chooses the directory
        project_owners=(os.geteuid(),),
        fast_path=False,  # a zygote pays off from the second kernel on
        idle_timeout=_LONG_S,
        gc_interval=0,
    )
    service = Service(settings)
    with plain_errors(directory):
        await service.start()
    try:
        yield service
    finally:
        await service.close()


async def _placed(service: Service, row: ChatRow, options: ChatSelection) -> ChatRow:
    """Return the row with its sandbox and its project. Create them if they do not exist."""
    if row.sandbox_id is None:
        row = replace(row, sandbox_id=await _sandbox_of(service, options.policy))
    if options.project is None:
        return row
    project = await _project_at(service, options.project, sandboxed=options.sandboxed)
    if options.resume is not None and row.project_id != project.id:
        raise BadRequest(
            f"the conversation {row.conversation_id} does not work in {options.project}",
            hint="omit --project to continue in its own directory",
        )
    return replace(row, project_id=project.id)


async def _sandbox_of(service: Service, policy: str) -> str:
    """Return the id of the sandbox of all conversations with this policy. Create it if needed."""
    caller, cursor = _caller(service), None
    while True:
        page = await service.sandboxes.list(caller, limit=_LIST_MAX, cursor=cursor)
        for view in page.items:
            if view.profile == policy:
                return view.id
        if (cursor := page.next_cursor) is None:
            return (await service.sandboxes.create(caller, profile=policy)).id


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
    service: Service, row: ChatRow, stack: AsyncExitStack
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
            policy=(await use.view()).profile,
            uploads=conversation,
        )
    )
    if isinstance(box, ProjectSession):
        box.user_decides = True
    return box, box.sandboxed


async def drop(service: Service, row: ChatRow) -> None:
    if row.sandbox_id is not None:
        await service.sandboxes.delete_conversation(
            _caller(service), row.sandbox_id, row.conversation_id
        )
    await chats.delete(service.store, row.id)


def _caller(service: Service) -> Caller:
    return service.access.of_service()
