"""Files that are nobody's any more: removed at once where that is quick, else by a later round.

The store is asked which directories are somebody's; whatever else lies in the data directory goes.
A removal first takes the directory out of reach, then empties it, so what fails is merely late.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from sbx.clock import Clock
from sbx.errors import SbxError
from sbx.isolation.patience import in_thread
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.runtime.store import Store, tokens
from sbx.runtime.store import sandboxes as rows
from sbx.runtime.store.sandboxes import CargoRow, Ended, SandboxRow
from sbx.runtime.views import TaskReport

_REMOVE_S = 5.0
_SWEEP_S = 20.0
_BRIEFLY_S = 0.2
_log = logging.getLogger(__name__)


class Leftovers:
    """Removes; it never ends anything that lives."""

    def __init__(self, store: Store, clock: Clock, runtime: Runtime, settings: Settings) -> None:
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._settings = settings
        self._remove_s = _REMOVE_S

    async def remove(self, row: SandboxRow, cargo: CargoRow) -> None:
        """The files of a sandbox that was deleted a moment ago, unless they are kept a while."""
        assert row.deleted_at is not None
        await self._remove_of(
            Ended(
                row.id,
                row.cause,
                row.expires_at,
                row.deleted_at,
                cargo.id,
                cargo.managed_by is not None,
                cargo.directory,
            )
        )

    async def remove_cargo(self, cargo: CargoRow) -> None:
        if await self._removed(cargo.directory):
            self._store.write_later(partial(rows.free_uid, cargo_id=cargo.id))

    async def remove_conversations(self, cargo: CargoRow, directories: Sequence[str]) -> None:
        for directory in directories:
            await self._removed(cargo.directory, directory)

    async def collect(self, *, briefly: bool = False) -> list[TaskReport]:
        """What a collection does here: `orphan_cargo` and `orphan_container` of the contract.

        With `briefly`, before a house takes calls, all of it is out of reach, and what takes long
        to remove is left to the next one.
        """
        self._remove_s = _BRIEFLY_S if briefly else _REMOVE_S
        try:
            return [
                await self._orphan_cargos(),
                await self._orphans(_BRIEFLY_S if briefly else _SWEEP_S),
            ]
        finally:
            self._remove_s = _REMOVE_S

    async def _orphan_cargos(self) -> TaskReport:
        done = skipped = 0
        for ended in await rows.with_files_to_remove(self._store):
            removed = await self._remove_of(ended)
            done, skipped = done + removed, skipped + (not removed)
        return TaskReport("orphan_cargo", done, skipped)

    async def _orphans(self, sweep_s: float) -> TaskReport:
        """Directories that no row knows, what earlier removals left, and what ended long ago."""
        failed: tuple[str, ...] = ()
        found = 0
        try:
            found = await self.remove_unknown()
            swept = await in_thread(self._runtime.data.sweep, sweep_s)
            if not swept:
                failed = ("not everything could be removed yet",)
        except (SbxError, OSError) as error:
            failed = (str(error),)
        before = self._clock.now() - self._settings.tombstones_kept
        await self._store.write(partial(rows.bury, before=before))
        await tokens.forget_ended(self._store, before)
        return TaskReport("orphan_container", found, 0, failed)

    async def remove_unknown(self) -> int:
        """Remove what the store does not know; how many directories that were.

        Safe beside whatever goes on: a directory is known before it is made, and what is there is
        listed before the store is asked. Homes that nobody owns yet are asked for in between, as
        are frozen copies: one that got an owner before is known to the store by now.
        """
        data = self._runtime.data
        there = await in_thread(self._listed)
        homes, copies = self._runtime.homes, self._runtime.copies
        known = await rows.directories(self._store)
        found = 0
        for sandbox, conversations in there.items():
            if sandbox in homes:
                continue
            if sandbox not in known:
                found += 1
                await in_thread(self._remove_unknown, sandbox)
                continue
            for conversation in conversations - known[sandbox] - copies:
                found += 1
                gone = partial(data.remove, sandbox, conversation, deadline_s=self._remove_s)
                await in_thread(gone)
        return found

    def _remove_unknown(self, sandbox: str) -> None:
        data = self._runtime.data
        if data.roll_back(sandbox):  # a killed service may have worked on a directory of the host
            data.remove(sandbox, deadline_s=self._remove_s)

    def _listed(self) -> dict[str, frozenset[str]]:
        data = self._runtime.data
        return {name: frozenset(data.conversations(name)) for name in data.sandboxes()}

    async def _remove_of(self, ended: Ended) -> bool:
        """True when the files are gone now."""
        grace = self._settings.files_grace if ended.cause == "expired" else 0.0
        since = ended.deleted_at if ended.expires_at is None else ended.expires_at
        if self._clock.now() < since + grace and grace > 0:
            return False
        if ended.managed and not await self._removed(ended.directory):
            return False
        await self._store.write(partial(rows.files_are_removed, sandbox_id=ended.id))
        return True

    async def _removed(self, *names: Any) -> bool:
        """Whether it is out of reach; what is left of it then goes with a later round."""
        try:
            await in_thread(partial(self._runtime.data.remove, *names, deadline_s=self._remove_s))
        except (SbxError, OSError) as error:
            _log.warning("files could not be removed, and will be later: %s", error)
            return False
        return True
