"""Cargos: workspaces. Each sandbox has one; a managed cargo lives and dies with its sandbox, any
other was made by itself and may be given to several."""

import secrets
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from sbx import errors
from sbx.aio import Clock, run_to_completion
from sbx.protocol.pages import Page
from sbx.runtime.runtime import Runtime
from sbx.service.auth import Caller
from sbx.service.models import WorkspaceView
from sbx.store import Store
from sbx.store import sandboxes as rows
from sbx.store.sandboxes import WorkspaceRow

_SIZE_MAX_MB = 65536
_LIST_MAX = 500
_RETRY_AFTER_S = 30.0


class Workspaces:
    """Those that were not deleted, held in memory as the sandboxes are."""

    def __init__(self, store: Store, clock: Clock, runtime: Runtime, per_owner: int) -> None:
        """`per_owner`: how many there may be beside those that sandboxes made."""
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._per_owner = per_owner
        self._making: Counter[str] = Counter()  # how many of an owner are just being made
        self.by_id: dict[str, WorkspaceRow] = {}

    async def load(self) -> None:
        self.by_id.update({row.id: row for row in await rows.cargos(self._store)})

    def demand(self, cargo_id: str) -> None:
        """It is that of a sandbox that lives. Raises Broken where the store has lost it."""
        if cargo_id not in self.by_id:
            raise errors.Broken(f"the store has a sandbox whose cargo {cargo_id} is gone")

    def for_sandbox(self, caller: Caller, cargo_id: str | None, sandbox_id: str) -> WorkspaceRow:
        """The one that is named, or a new one that the sandbox will manage. Raises NotFound, and
        Conflict for one that is another sandbox's own."""
        if cargo_id is None:
            return self._new(caller.owner, sandbox_id, None)
        row = self._mine(caller, cargo_id)
        if row.managed_by is not None:
            raise _managed(row)
        return row

    def remember(self, row: WorkspaceRow) -> None:
        self.by_id.setdefault(row.id, row)

    def forget(self, cargo_id: str) -> None:
        self.by_id.pop(cargo_id, None)

    async def create(self, caller: Caller, size_limit_mb: int | None) -> WorkspaceView:
        """Raises BadRequest, NotFound for a token, Unavailable `too_many_workspaces`."""
        if size_limit_mb is not None and not 1 <= size_limit_mb <= _SIZE_MAX_MB:
            raise errors.BadRequest(
                f"size_limit_mb is a number from 1 to {_SIZE_MAX_MB}",
                details={"field": "size_limit_mb", "limit": _SIZE_MAX_MB},
            )
        if caller.via == "token":
            raise errors.NotFound("a token makes no cargos")
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
        await self._store.write(partial(rows.add_cargo, row=row))
        self.by_id[row.id] = row

    def _check_room(self, owner: str) -> None:
        mine = sum(row.owner == owner and row.managed_by is None for row in self.by_id.values())
        if mine + self._making[owner] >= self._per_owner:
            raise errors.Unavailable(
                f"there are {self._per_owner} cargos of this owner, and there may be no more",
                code="too_many_workspaces",
                hint="delete some that are not needed any more",
                details={"limit": self._per_owner, "retry_after_s": _RETRY_AFTER_S},
            )

    def get(self, caller: Caller, cargo_id: str) -> WorkspaceView:
        return _view(self._mine(caller, cargo_id))

    def list(
        self, caller: Caller, limit: int, cursor: str | None, *, managed: bool
    ) -> Page[WorkspaceView]:
        limit = max(1, min(limit, _LIST_MAX))
        found = [
            row
            for cargo_id, row in sorted(self.by_id.items())
            if row.owner == caller.owner
            and caller.via != "token"
            and (row.managed_by is not None) == managed
            and (cursor is None or cargo_id > cursor)
        ]
        views = [_view(row) for row in found[:limit]]
        return Page(views, views[-1].id if len(found) > limit else None)

    async def delete(self, caller: Caller, cargo_id: str) -> WorkspaceRow:
        """Its row; the files are the caller's to remove."""
        row = self._mine(caller, cargo_id)
        if row.managed_by is not None:
            raise _managed(row)
        at = self._clock.now()

        def act(on: Any) -> "list[str]":
            users = rows.users_of_cargo(on, cargo_id)
            if not users:
                rows.delete_cargo(on, cargo_id, at)
            return users

        if users := await self._store.write(act):
            raise errors.Conflict(
                f"the cargo {cargo_id} is in use",
                hint="delete the sandboxes that use it",
                details={"active_sandbox_ids": users},
            )
        self.forget(cargo_id)
        return replace(row, deleted_at=at)

    def _mine(self, caller: Caller, cargo_id: str) -> WorkspaceRow:
        row = self.by_id.get(cargo_id)
        if row is None or row.owner != caller.owner or caller.via == "token":
            raise errors.NotFound(f"there is no cargo {cargo_id}")
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


def _managed(row: WorkspaceRow) -> errors.Conflict:
    return errors.Conflict(
        f"the cargo {row.id} lives and dies with its sandbox",
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
