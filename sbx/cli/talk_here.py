"""Conversations of `sbx chat` in this process: a house of the chat's own.

Each is one of the conversations of a sandbox, of which there is one for each policy; or its agent
works in a project, and then that conversation has only the uploads.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sbx.agent.sandbox import Sandbox
from sbx.cli.talk import (
    OWNER,
    Talk,
    Wanted,
    approvals_of,
    changes_of,
    history_of,
    row_of,
    told_plainly,
)
from sbx.errors import BadRequest
from sbx.runtime.access import Caller
from sbx.runtime.house import House
from sbx.runtime.project_box import ProjectBox
from sbx.runtime.projects import Project
from sbx.runtime.settings import Settings
from sbx.runtime.store import chats
from sbx.runtime.store.chats import ChatRow

_HERE = "chat"  # the agent of these; of one in a service it is its sandbox there
_LONG_S = 30 * 86_400.0  # who comes back from lunch is to find the variables
_LIST_MAX = 500


@asynccontextmanager
async def opened_here(wanted: Wanted) -> AsyncIterator[Talk]:
    async with house_at(wanted.directory) as house:
        row = await row_of(house.store, wanted, _HERE)
        row = await chats.ensure(house.store, await _placed(house, row, wanted))
        approvals = await approvals_of(house.store, wanted)
        changes = await changes_of(house.store, row, wanted)
        history = history_of(house.store, row)
        try:
            async with AsyncExitStack() as held:
                sandbox, sandboxed = await _sandbox(house, row, held)
                asks = isinstance(sandbox, ProjectBox) and sandbox.asks_about_host_executables
                yield Talk(row, sandbox, history, approvals, sandboxed, changes, asks)
        finally:
            if not await history.messages(limit=1):
                await drop(house, row)


@asynccontextmanager
async def house_at(directory: Path) -> AsyncIterator[House]:
    settings = Settings(
        data_dir=directory,
        project_dirs=(Path("/"),),  # who runs this names a directory of his own
        project_owners=(os.geteuid(),),
        fast_path=False,  # a zygote pays for the second kernel
        idle_timeout=_LONG_S,
        gc_interval=0,
    )
    house = House(settings)
    with told_plainly(directory):
        await house.start()
    try:
        yield house
    finally:
        await house.close()


async def _placed(house: House, row: ChatRow, wanted: Wanted) -> ChatRow:
    """In its sandbox and its project, which are made where there are none."""
    if row.sandbox_id is None:
        row = replace(row, sandbox_id=await _sandbox_of(house, wanted.policy))
    if wanted.project is None:
        return row
    project = await _project_at(house, wanted.project, sandboxed=wanted.sandboxed)
    if wanted.resume is not None and row.project_id != project.id:
        raise BadRequest(
            f"the conversation {row.conversation_id} works in another place than {wanted.project}",
            hint="leave --project out: it goes on where it was",
        )
    return replace(row, project_id=project.id)


async def _sandbox_of(house: House, policy: str) -> str:
    """The id of the one sandbox in which all conversations with this policy are."""
    caller, cursor = _caller(house), None
    while True:
        page = await house.sandboxes.list(caller, limit=_LIST_MAX, cursor=cursor)
        for view in page.items:
            if view.profile == policy:
                return view.id
        if (cursor := page.next_cursor) is None:
            return (await house.sandboxes.create(caller, profile=policy)).id


async def _project_at(house: House, directory: Path, *, sandboxed: bool) -> Project:
    at, cursor = str(directory), None
    while True:
        page = await house.projects.list(OWNER, limit=_LIST_MAX, cursor=cursor)
        for project in page.items:
            if (project.working_directory, project.sandbox_enabled) == (at, sandboxed):
                return project
        if (cursor := page.next_cursor) is None:
            return await house.projects.create(
                OWNER,
                name=directory.name or at,
                working_directory=at,
                sandbox_enabled=sandboxed,
            )


async def _sandbox(house: House, row: ChatRow, held: AsyncExitStack) -> tuple[Sandbox, bool]:
    """What the agent works in, and whether that is a sandbox; in use until `held` is left."""
    assert row.sandbox_id is not None
    name = row.conversation_id
    using = house.sandboxes.using(
        _caller(house), row.sandbox_id, scope="execute", conversation=name
    )
    use = await held.enter_async_context(using)
    talk = use.conversation(name)
    if row.project_id is None:
        return talk, True
    box = await held.enter_async_context(
        house.projects.using(OWNER, row.project_id, name, policy=use.view.profile, uploads=talk)
    )
    if isinstance(box, ProjectBox):
        box.user_decides = True
    return box, box.sandboxed


async def drop(house: House, row: ChatRow) -> None:
    if row.sandbox_id is not None:
        await house.sandboxes.delete_conversation(
            _caller(house), row.sandbox_id, row.conversation_id
        )
    await chats.delete(house.store, row.id)


def _caller(house: House) -> Caller:
    return house.access.of_service()
