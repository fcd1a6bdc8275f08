"""The deletions that span several parts of a service: a conversation with its agent, a project, and
all data of a user. `Sandboxes` and `Workspaces` delete the others.

A deletion is final at once. Its first transaction records the intention: after a kill, the next
start completes it (`finish`). What an audit line names stays: the event, and the names.
"""

import logging
import sqlite3
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import partial

from sbx.errors import NotFound, SbxError
from sbx.service.auth import Authenticator
from sbx.service.caller import Caller
from sbx.service.garbage import GarbageCollector
from sbx.service.ids import session_id
from sbx.service.projects.projects import Project, Projects
from sbx.service.sandboxes import Sandboxes
from sbx.store import Store, chats, erasure
from sbx.store import sandboxes as rows
from sbx.store.chats import ChatRow

_log = logging.getLogger(__name__)


class Deletions:
    """See the module. The methods check no rights, except `chat`."""

    def __init__(
        self,
        store: Store,
        sandboxes: Sandboxes,
        projects: Projects,
        garbage: GarbageCollector,
        access: Authenticator,
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._projects = projects
        self._garbage = garbage
        self._access = access

    async def finish(self) -> None:
        """Complete the deletions that the end of an earlier service interrupted."""
        for project in await self._projects.in_deletion():
            await self._logged(project.id, self._delete_project(project))
        for owner, user_id in await erasure.users_in_deletion(self._store):
            await self._logged(f"the user {user_id}", self._erase_user(owner, user_id))

    async def chat(self, caller: Caller, chat: ChatRow) -> None:
        """End the runs of a conversation with an agent, and delete it with its files, its history
        and its messages. The directory of a project stays."""
        if chat.project_id is not None:
            await self._projects.close_conversation(chat.owner, chat.id)
        # Its last sandbox, and the session of its user, which may have been created again.
        for place in (chat.sandbox_id, session_id(chat.user_id, chat.agent_id)):
            with suppress(NotFound):
                if place is not None:
                    await self._sandboxes.delete_conversation(caller, place, chat.conversation_id)
        await chats.delete(self._store, chat.id)
        await self._store.fold()

    async def project(self, owner: str, project_id: str) -> None:
        """End the work of agents in a project, and delete it with its conversations. Its directory
        stays. Raise NotFound."""
        await self._delete_project(await self._projects.hide(owner, project_id))

    async def _delete_project(self, project: Project) -> None:
        caller = Caller(project.owner, "key")
        for chat in await chats.of_project(self._store, project.id):
            await self.chat(caller, chat)
        await self._projects.delete(project)
        await self._store.fold()

    async def user(self, owner: str, user_id: str) -> Mapping[str, int]:
        """Delete all data of a user of an owner: his sessions, conversations, files, histories,
        messages, approvals, rules, tasks and tokens. Return how many of each kind there were."""

        def begin(on: sqlite3.Connection) -> dict[str, int]:
            erasure.begin_user(on, owner, user_id)
            return erasure.count_of_user(on, owner, user_id)

        counts = await self._store.write(begin)
        self._access.forget()  # the tokens are revoked
        await self._erase_user(owner, user_id)
        return counts

    async def _erase_user(self, owner: str, user_id: str) -> None:
        for sandbox in self._sandboxes.every():
            if (sandbox.row.owner, sandbox.row.user_id) == (owner, user_id):
                await self._sandboxes.end(sandbox, "requested")
        for chat in await chats.of_user(self._store, owner, user_id):
            await self.chat(Caller(owner, "key"), chat)
        for sandbox_id in await rows.ended_of_user(self._store, owner, user_id):
            await self._store.write(partial(rows.erase, sandbox_id=sandbox_id))
            await self._garbage.remove_ended(sandbox_id)
        await self._store.write(partial(erasure.erase_user, owner=owner, user_id=user_id))
        await self._store.fold()

    async def _logged(self, name: str, deletion: Awaitable[None]) -> None:
        try:
            await deletion
        except SbxError as error:  # the next start tries again; the service must start
            _log.error("the deletion of %s was not completed: %s", name, error.message)
        else:
            _log.warning("completed the deletion of %s, which an earlier service began", name)
