"""The erasure of the content of sandboxes and conversations: files, histories, and replies.

One transaction deletes the rows and names the directories to remove, so the next start completes an
interrupted erasure. The runs of the content are forgotten first: their ends are not recorded.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sbx.aio import Clock, in_thread, run_to_completion
from sbx.protocol.runs import RunError
from sbx.runtime.conversation import Conversation
from sbx.runtime.runtime import Runtime
from sbx.service.garbage import GarbageCollector
from sbx.service.leases import SandboxIndex
from sbx.service.sandbox import ServiceSandbox
from sbx.store import Store, conversations, events, sandboxes
from sbx.store.erasure import erase_runs, slots_of
from sbx.store.runs import Begun

_DELETED = RunError("ConversationDeleted", "the conversation was deleted meanwhile", "")


def _no_runs(_sandbox_id: str, _conversation: str | None) -> Sequence[Begun]:
    return ()


class ContentErasure:
    """`forget_runs`: called for a sandbox, or a conversation of it, whose content is erased. The
    store gets no record of the runs that it returns."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Runtime,
        garbage: GarbageCollector,
        index: SandboxIndex,
    ) -> None:
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._garbage = garbage
        self._index = index
        index.drop_unused = self.unused
        self.forget_runs: Callable[[str, str | None], Sequence[Begun]] = _no_runs

    async def ended(self, sandbox_id: str) -> None:
        """Erase the chats and files that the expiry of a deleted sandbox left."""
        await self._store.write(partial(sandboxes.erase, sandbox_id=sandbox_id))
        await self._garbage.remove_ended(sandbox_id)
        await self._store.fold()

    async def unused(self, sandbox: ServiceSandbox, name: str) -> None:
        """Delete a conversation that a refused request created, if nothing else uses it."""
        row = (await sandbox.hooks.conversations()).get(name)
        workspace = sandbox.workspace
        if row is None or workspace.managed_by is None or sandbox.row.deleted_at is not None:
            return
        empty = await in_thread(self._runtime.data.has_no_files, workspace.directory, row.directory)
        if empty and not sandbox.users and not sandbox.starts and name in sandbox.hooks.created:
            await run_to_completion(self.conversation(sandbox, name, announce=False))

    async def conversation(
        self, sandbox: ServiceSandbox, name: str, *, announce: bool = True
    ) -> bool:
        """End the kernels and runs of a conversation, and erase it. Return whether it existed.
        Without `announce`, leave no event of it."""
        at, workspace = self._clock.now(), sandbox.workspace
        every = self._index.every()
        sharing = [other for other in every if other.row.workspace_id == workspace.id]

        def write(db: Any) -> tuple[bool, Sequence[str]]:
            existed, directories = conversations.delete_conversation(
                db, sandbox.id, workspace.id, name, slots
            )
            if existed and announce:
                events.add(db, sandbox.id, at, "conversation_deleted", conversation=name)
            return existed, directories

        def forgotten() -> list[Begun]:
            return [run for other in sharing for run in self.forget_runs(other.id, name)]

        async with sandbox.hooks.naming:
            slots = slots_of(forgotten())
            existed, directories = await self._store.write(write)
            opened = [other.forget_conversation(name) for other in sharing]
            late = forgotten()  # with the runs that began during the transaction
        await asyncio.gather(*(_end(each) for each in opened if each is not None))
        if existed:
            if announce:
                sandbox.announce("conversation_deleted", conversation=name)
            await self._garbage.remove_conversations(workspace, directories)
        if late:
            await self._store.write(partial(erase_runs, runs=late))
        if announce:
            await self._store.fold()
        return existed


async def _end(conversation: Conversation) -> None:
    try:
        await conversation.halt(_DELETED)
    finally:
        await conversation.close()
