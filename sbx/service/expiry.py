"""The expiry of a sandbox: changed by request, and of some sandboxes moved by each use.

    use ──► expires_at = now + ttl ──► `expiring` ──► `expired` ──► (grace) restore, or deleted

Only sandboxes with a `ttl_s` in their row slide, are announced and are restored: sessions.
"""

import asyncio
from abc import abstractmethod
from functools import partial

from msgspec.structs import replace

from sbx import errors
from sbx.aio import run_to_completion
from sbx.policy import Policy
from sbx.service.lifecycle import Act
from sbx.service.record import LATEST, SandboxRecord, ServiceDependencies
from sbx.store import events
from sbx.store import sandboxes as rows
from sbx.store.sandboxes import SandboxRow

_SLIDES_BY_S = 1.0  # more often, a copy of the row for each cell would be wasted
_ANNOUNCED_S = 600.0


class ExpiringSandbox(SandboxRecord):
    """See the module."""

    def __init__(self, dependencies: ServiceDependencies, row: SandboxRow) -> None:
        super().__init__(dependencies, row)
        self.followers = 0  # streams of its events
        self.over = False  # its expiry was handled
        self._lock = asyncio.Lock()
        self._announced: float | None = None  # the expiry that an event announced

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """Whether it has a lease, a run, or a kernel that starts."""

    @abstractmethod
    async def _end_for_expiry(self) -> None:
        """End all kernels. Remember their contexts: after a restoration, runs report the loss."""

    @property
    def expired(self) -> bool:
        """Return whether its time to live is over. A session in use never expires."""
        return super().expired and not self._slides_now

    @property
    def _slides_now(self) -> bool:
        in_use = self._busy or self.followers > 0
        return in_use and self.row.ttl_s is not None and not self.over

    @property
    def in_grace(self) -> bool:
        """Return whether the next request for this session finds the files, if it has expired."""
        end, grace_s = self.row.expires_at, self.dependencies.settings.files_grace
        return self.row.ttl_s is not None and end is not None and self.now < end + grace_s

    def check(self, act: Act) -> None:
        """Raise as `SandboxRecord.check`; KEEP is refused after the grace period."""
        super().check(Act.USE if act is Act.KEEP and not self.in_grace else act)

    def slide(self) -> None:
        """Let a session expire its time to live after now, unless it expires later anyway."""
        ttl_s, end = self.row.ttl_s, self.row.expires_at
        if ttl_s is None or end is None or self.over:
            return
        new = min(self.now + ttl_s, LATEST)
        if new - end >= min(_SLIDES_BY_S, ttl_s / 10):
            self.row = replace(self.row, expires_at=new)

    def announce_expiry(self) -> None:
        """Slide the expiry of a session in use. Else record an event, once for each expiry, ten
        minutes before it, or at half of a shorter life."""
        ttl_s, end = self.row.ttl_s, self.row.expires_at
        if ttl_s is None or end is None or self.over:
            return
        if self._slides_now:
            self.slide()
        elif end != self._announced and self.now >= end - min(_ANNOUNCED_S, ttl_s / 2):
            self._announced = end
            self.emit("expiring", expires_at=end)

    async def extend(self, by_s: float) -> None:
        """Move the expiry. Raise Conflict `sandbox_ttl_infinite`, and as `check`."""
        async with self._lock:
            self.check(Act.EXTEND)
            if (end := self.row.expires_at) is None:
                raise errors.Conflict(
                    f"the sandbox {self.id} never expires",
                    code="sandbox_ttl_infinite",
                    details={"sandbox_id": self.id},
                )
            new = min(max(end, self.now) + by_s, LATEST)
            await self._write_expiry(new, self.row.ttl_s)
            self.emit("extended", by=by_s, expires_at=new)

    async def set_expiry(self, after_s: float | None) -> None:
        """Let it expire this many seconds after now, also earlier than before; None: never. If its
        expiry slides, each use moves it by as much. Raise as `check`."""
        async with self._lock:
            self.check(Act.EXTEND)
            end = None if after_s is None else min(self.now + after_s, LATEST)
            await self._write_expiry(end, self.row.ttl_s and after_s)
            self.emit("extended", expires_at=end)

    async def _write_expiry(self, expires_at: float | None, ttl_s: float | None) -> None:
        write = partial(rows.extend, sandbox_id=self.id, expires_at=expires_at, ttl_s=ttl_s)
        await self.dependencies.store.write(write)
        self.row = replace(self.row, expires_at=expires_at, ttl_s=ttl_s)

    async def restore(self, row: SandboxRow, loaded: Policy, decided: Policy) -> bool:
        """Replace the row of an expired session, except its id and its workspace, and so keep its
        files. Return False, and do nothing, if it was deleted, was restored or left its grace
        period meanwhile."""
        async with self._lock:
            if self.row.deleted_at is not None or not self.expired or not self.in_grace:
                return False
            if not self.over:
                await self._end_expired()
            else:
                await self._end_for_expiry()  # a reader of its files may have opened it
            kept, failure = self.row.workspace_id, self.row.failure if self.frozen else None
            row = replace(row, id=self.id, workspace_id=kept, failure=failure, restored=True)
            await self.dependencies.store.write(partial(rows.restore, row=row))
            self.row = row
            self.set_policy(loaded, decided)
            self.over = False
            self.emit("restored", expires_at=row.expires_at)
            return True

    async def expire(self) -> bool:
        """End it if its time to live is over; files stay for now. False if there was nothing to
        do."""
        if self.over or not self.expired:
            return False
        async with self._lock:
            if self.over or not self.expired or self.row.deleted_at is not None:
                return False  # it was extended or deleted meanwhile
            await self._end_expired()
            return True

    async def expire_now(self) -> bool:
        """End its time to live. Return False if it had ended, or if it has none."""
        async with self._lock:
            if self.over or self.row.deleted_at is not None or self.row.expires_at is None:
                return False
            await self._write_expiry(self.now, self.row.ttl_s)
            await run_to_completion(self._end_expired())
            return True

    async def _end_expired(self) -> None:
        self.over = True
        await self._end_for_expiry()
        self.dependencies.store.write_later(
            partial(events.add_expiry, sandbox_id=self.id, at=self.now)
        )
        self.announce("expired")
