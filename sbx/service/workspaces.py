"""Workspaces: each sandbox has one. A managed workspace is deleted with its sandbox. Others are
created on their own, and several sandboxes may use one."""

import secrets
from collections import Counter
from functools import partial
from typing import Any

from msgspec.structs import replace

from sbx import errors
from sbx.aio import Clock, run_to_completion
from sbx.protocol.pages import Page
from sbx.runtime.runtime import Runtime
from sbx.service.caller import Caller
from sbx.service.garbage import GarbageCollector
from sbx.service.models import WorkspaceView
from sbx.service.recording import Recording
from sbx.store import Store
from sbx.store import workspaces as workspaces_table
from sbx.store.workspaces import WorkspaceRow

_UID_ATTEMPTS = 1000
_SIZE_MAX_MB = 65536
_LIST_MAX = 500
_RETRY_AFTER_S = 30.0


class Workspaces:
    """The workspaces that were not deleted, in memory as the sandboxes are."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Runtime,
        garbage: GarbageCollector,
        per_owner: int,
        recording: Recording | None = None,
    ) -> None:
        """`per_owner` limits those that no sandbox manages. With `recording`, none is created that
        cannot be recorded."""
        self._garbage = garbage
        self._recording = recording
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._per_owner = per_owner
        self._making: Counter[str] = Counter()  # how many of an owner are just being made
        self.by_id: dict[str, WorkspaceRow] = {}

    async def load(self) -> None:
        self.by_id.update({row.id: row for row in await workspaces_table.workspaces(self._store)})

    def demand(self, workspace_id: str) -> None:
        """Check the workspace of a live sandbox. Raise Broken if the store has lost it."""
        if workspace_id not in self.by_id:
            raise errors.Broken(f"the store has a sandbox whose workspace {workspace_id} is gone")

    def for_sandbox(
        self, caller: Caller, workspace_id: str | None, sandbox_id: str
    ) -> WorkspaceRow:
        """Return the named workspace, or a new one that the sandbox will manage. Raise NotFound,
        and Conflict for one that belongs to another sandbox."""
        if workspace_id is None:
            return self._new(caller.owner, sandbox_id, None)
        row = self._mine(caller, workspace_id)
        if row.managed_by is not None:
            raise _managed(row)
        return row

    def remember(self, row: WorkspaceRow) -> None:
        self.by_id.setdefault(row.id, row)

    def forget(self, workspace_id: str) -> None:
        self.by_id.pop(workspace_id, None)

    async def create(self, caller: Caller, size_limit_mb: int | None = 1024) -> WorkspaceView:
        """Create one that no sandbox manages. Raises BadRequest, NotFound for a token, Unavailable
        `too_many_workspaces`."""
        if self._recording is not None:
            self._recording.check(runs=False)
        if size_limit_mb is not None and not 1 <= size_limit_mb <= _SIZE_MAX_MB:
            raise errors.BadRequest(
                f"size_limit_mb is a number from 1 to {_SIZE_MAX_MB}",
                details={"field": "size_limit_mb", "limit": _SIZE_MAX_MB},
            )
        if caller.via == "token":
            raise errors.NotFound("a token makes no workspaces")
        self._check_room(caller.owner)
        row = self._new(caller.owner, None, size_limit_mb)
        self._making[caller.owner] += 1
        try:
            await run_to_completion(self._add(row))
        finally:
            self._making[caller.owner] -= 1
            self._making += Counter()  # without those that are nought
        return _view(row)

    async def _add(self, row: WorkspaceRow) -> None:
        await self._store.write(partial(workspaces_table.add_workspace, row=row))
        self.by_id[row.id] = row

    def _check_room(self, owner: str) -> None:
        mine = sum(row.owner == owner and row.managed_by is None for row in self.by_id.values())
        if mine + self._making[owner] >= self._per_owner:
            raise errors.Unavailable(
                f"there are {self._per_owner} workspaces of this owner, and there may be no more",
                code="too_many_workspaces",
                hint="delete some that are no longer needed",
                details={"limit": self._per_owner, "retry_after_s": _RETRY_AFTER_S},
            )

    def get(self, caller: Caller, workspace_id: str) -> WorkspaceView:
        """Return a workspace. Raise NotFound."""
        return _view(self._mine(caller, workspace_id))

    def list(
        self,
        caller: Caller,
        *,
        limit: int = 50,
        cursor: str | None = None,
        managed: bool | None = None,
    ) -> Page[WorkspaceView]:
        """Return a page by id; with `managed` those that sandboxes manage, else the others."""
        limit = max(1, min(limit, _LIST_MAX))
        matches = [
            row
            for workspace_id, row in sorted(self.by_id.items())
            if row.owner == caller.owner
            and caller.via != "token"
            and (row.managed_by is not None) == bool(managed)
            and (cursor is None or workspace_id > cursor)
        ]
        views = [_view(row) for row in matches[:limit]]
        return Page(views, views[-1].id if len(matches) > limit else None)

    async def delete(self, caller: Caller, workspace_id: str) -> None:
        """Delete it with its files. Raises NotFound, Conflict while a sandbox uses it."""
        row = self._mine(caller, workspace_id)
        if row.managed_by is not None:
            raise _managed(row)
        at = self._clock.now()

        def act(on: Any) -> "list[str]":
            users = workspaces_table.users_of_workspace(on, workspace_id)
            if not users:
                workspaces_table.delete_workspace(on, workspace_id, at)
            return users

        if users := await self._store.write(act):
            raise errors.Conflict(
                f"the workspace {workspace_id} is in use",
                hint="delete the sandboxes that use it",
                details={"active_sandbox_ids": users},
            )
        self.forget(workspace_id)
        await self._garbage.remove_workspace(replace(row, deleted_at=at))

    def _mine(self, caller: Caller, workspace_id: str) -> WorkspaceRow:
        row = self.by_id.get(workspace_id)
        if row is None or row.owner != caller.owner or caller.via == "token":
            raise errors.NotFound(f"workspace {workspace_id} does not exist")
        return row

    def _new(self, owner: str, managed_by: str | None, size_limit_mb: int | None) -> WorkspaceRow:
        now = self._clock.now()
        return WorkspaceRow(
            id=f"ws-{secrets.token_hex(6)}",
            owner=owner,
            managed_by=managed_by,
            directory=self._runtime.data.new_name(),
            uid=None,
            size_limit_mb=size_limit_mb,
            created_at=now,
            last_accessed_at=now,
        )


async def own_uid(store: Store, workspace_id: str, uids: tuple[int, int]) -> int:
    """Return the host uid of a workspace's files, or give it one that no other workspace has.

    The uid is random, because other runtimes choose from the same range.
    """
    first, count = uids
    for _ in range(_UID_ATTEMPTS):
        candidate = first + secrets.randbelow(count)
        uid = await store.write(
            partial(workspaces_table.take_uid, workspace_id=workspace_id, uid=candidate)
        )
        if uid is not None:
            return uid
    raise errors.Unavailable(
        "nearly every host uid of the range for sandboxes is in use",
        hint="widen the setting uid_range, or delete sandboxes",
    )


def _managed(row: WorkspaceRow) -> errors.Conflict:
    return errors.Conflict(
        f"the workspace {row.id} lives and dies with its sandbox",
        hint="delete that sandbox",
        details={"managed_by_sandbox_id": row.managed_by},
    )


def _view(row: WorkspaceRow) -> WorkspaceView:
    return WorkspaceView(
        id=row.id,
        owner=row.owner,
        managed_by=row.managed_by,
        size_limit_mb=row.size_limit_mb,
        created_at=row.created_at,
        last_accessed_at=row.last_accessed_at,
    )
