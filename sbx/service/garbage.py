"""Files that were deleted: removed at once where that is quick, else by a later round.

The store names the directories to remove. A directory that it does not name at all is removed only
if no user has a file in it; else it is moved to `unclaimed`, where it is kept for an operator.
A removal first takes the directory out of reach, then empties it, so what fails is merely late.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from sbx.aio import Clock, in_thread
from sbx.errors import SbxError
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service.models import TaskReport
from sbx.store import Store, tokens
from sbx.store import console as console_table
from sbx.store import sandboxes as rows
from sbx.store import workspaces as workspaces_table
from sbx.store.sandboxes import EndedSandbox, SandboxRow
from sbx.store.workspaces import WorkspaceRow

_REMOVE_S = 5.0
_SWEEP_S = 20.0
_BRIEFLY_S = 0.2
_log = logging.getLogger(__name__)


class GarbageCollector:
    """Removes; it never ends anything that lives."""

    def __init__(self, store: Store, clock: Clock, runtime: Runtime, settings: Settings) -> None:
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._settings = settings
        self._remove_s = _REMOVE_S

    async def remove(self, row: SandboxRow, workspace: WorkspaceRow) -> None:
        """Remove the files of a sandbox that was just deleted, unless they are kept for a while."""
        assert row.deleted_at is not None
        await self._remove_of(
            EndedSandbox(
                row.id,
                row.cause,
                row.expires_at,
                row.deleted_at,
                workspace.id,
                workspace.managed_by is not None,
                workspace.directory,
            )
        )

    async def remove_ended(self, sandbox_id: str) -> None:
        """Remove the files of a deleted sandbox, unless they are kept for a while."""
        for ended in await rows.with_files_to_remove(self._store, only=sandbox_id):
            await self._remove_of(ended)

    async def remove_files(self, workspace: WorkspaceRow) -> None:
        await self._removed(workspace.directory)

    async def remove_workspace(self, workspace: WorkspaceRow) -> None:
        if await self._removed(workspace.directory):
            self._store.write_later(
                partial(workspaces_table.is_removed, directory=workspace.directory)
            )
            self._store.write_later(partial(workspaces_table.free_uid, workspace_id=workspace.id))

    async def remove_conversations(
        self, workspace: WorkspaceRow, directories: Sequence[str]
    ) -> None:
        for directory in directories:
            if await self._removed(workspace.directory, directory):
                done = partial(
                    workspaces_table.is_removed,
                    directory=workspace.directory,
                    conversation=directory,
                )
                self._store.write_later(done)

    async def collect(self, *, briefly: bool = False) -> list[TaskReport]:
        """Collect `orphan_workspace` and `orphan_container` of the contract.

        With `briefly`, before a service accepts requests, only move all of it out of reach; the
        next collection removes the parts that take long.
        """
        self._remove_s = _BRIEFLY_S if briefly else _REMOVE_S
        try:
            return [
                await self._orphan_workspaces(),
                await self._orphans(_BRIEFLY_S if briefly else _SWEEP_S),
            ]
        finally:
            self._remove_s = _REMOVE_S

    async def _orphan_workspaces(self) -> TaskReport:
        done = skipped = 0
        for ended in await rows.with_files_to_remove(self._store):
            removed = await self._remove_of(ended)
            done, skipped = done + removed, skipped + (not removed)
        return TaskReport("orphan_workspace", done, skipped)

    async def _orphans(self, sweep_s: float) -> TaskReport:
        """Directories that no row knows, what earlier removals left, and what ended long ago."""
        failed: tuple[str, ...] = ()
        removed = 0
        try:
            removed = await self._removed_later() + await self.clear_unknown()
            swept = await in_thread(self._runtime.data.sweep, sweep_s)
            if not swept:
                failed = ("not everything could be removed yet",)
        except (SbxError, OSError) as error:
            failed = (str(error),)
        await self._store.fold()  # what a reader prevented at the deletion
        before = self._clock.now() - self._settings.tombstones_kept
        await self._store.write(partial(rows.bury, before=before))
        await tokens.forget_ended(self._store, before)
        await console_table.forget_ended(self._store, before)
        return TaskReport("orphan_container", removed, 0, failed)

    async def _removed_later(self) -> int:
        """Finish the removals that failed, or that a kill cut off; how many those were."""
        done = 0
        for directory, conversation in await workspaces_table.removals(self._store):
            names = (directory, conversation) if conversation else (directory,)
            if (conversation or await self._rolled_back(directory)) and await self._removed(*names):
                gone = partial(
                    workspaces_table.is_removed, directory=directory, conversation=conversation
                )
                await self._store.write(gone)
                done += 1
        return done

    async def clear_unknown(self) -> int:
        """Remove or set apart each directory that the store does not name, and return their number.

        This is safe next to other work: the store names a directory before it is made, and the
        directories are listed before the store is read. Prewarmed sandboxes without an owner, and
        frozen copies, are read in between: the store already names one that got an owner earlier.
        """
        there = await in_thread(self._listed)
        unowned, copies = self._runtime.unowned_directories, self._runtime.copies
        directories = await workspaces_table.directories(self._store)
        removing = set(await workspaces_table.removals(self._store))
        removed = 0
        for sandbox, conversations in there.items():
            if sandbox in unowned or (sandbox, "") in removing:
                continue
            if sandbox not in directories:
                removed += await self._cleared(sandbox)
                continue
            for conversation in conversations - directories[sandbox] - copies:
                if (sandbox, conversation) not in removing:
                    removed += await self._cleared(sandbox, conversation)
        return removed

    async def _cleared(self, *names: str) -> bool:
        data = self._runtime.data
        if len(names) == 1 and not await self._rolled_back(*names):
            return False
        if await in_thread(data.has_no_files, *names):
            return await self._removed(*names)
        try:
            moved = await in_thread(partial(data.set_apart, *names, at=self._clock.now()))
        except SbxError as error:
            _log.warning("a directory that the store does not know stays: %s", error)
            return False
        _log.warning(
            "the store does not know the directory %s: it is kept as %s; see sbx store unclaimed",
            "/".join(names),
            moved,
        )
        return True

    async def _rolled_back(self, sandbox: str) -> bool:
        """Revert the unfinished commits of a killed service to directories of the host."""
        return await in_thread(self._runtime.data.recover, sandbox)

    def _listed(self) -> dict[str, frozenset[str]]:
        data = self._runtime.data
        return {name: frozenset(data.conversations(name)) for name in data.sandboxes()}

    async def _remove_of(self, ended: EndedSandbox) -> bool:
        grace = self._settings.files_grace if ended.cause == "expired" else 0.0
        since = ended.deleted_at if ended.expires_at is None else ended.expires_at
        if self._clock.now() < since + grace and grace > 0:
            return False
        if ended.managed and not await self._removed(ended.directory):
            return False
        await self._store.write(partial(rows.files_are_removed, sandbox_id=ended.id))
        return True

    async def _removed(self, *names: Any) -> bool:
        """Return whether it is out of reach; a later round removes the rest."""
        try:
            await in_thread(partial(self._runtime.data.remove, *names, deadline_s=self._remove_s))
        except (SbxError, OSError) as error:
            _log.warning("files could not be removed, and will be later: %s", error)
            return False
        return True
