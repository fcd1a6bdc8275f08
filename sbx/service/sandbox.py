"""One sandbox of a service: its record, and the open sandbox while it has one.

It is opened at its first use. A stop, an idle time-out, its expiry or its deletion closes it; the
files stay. Every change of `active` happens under the lock; code that needs no lock does not await.
"""

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from msgspec.structs import replace

from sbx import errors
from sbx.aio import run_to_completion
from sbx.policy import Policy
from sbx.protocol.runs import RunError
from sbx.runtime.conversation import Conversation
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.run.context import Context
from sbx.service.expiry import ExpiringSandbox
from sbx.service.hooks import LostContexts, PersistentSandbox, SandboxHooks, kernel_name
from sbx.service.ids import check_id
from sbx.service.lifecycle import Act, State
from sbx.service.models import SandboxView
from sbx.service.record import ServiceDependencies
from sbx.service.workspaces import own_uid
from sbx.store import events
from sbx.store import sandboxes as rows
from sbx.store import workspaces as workspaces_table
from sbx.store.conversations import ConversationRow
from sbx.store.idempotency import Slot
from sbx.store.sandboxes import SandboxRow
from sbx.telemetry import metrics

_TOUCHED_EVERY_S = 60.0
_log = logging.getLogger(__name__)

EXPIRED = RunError("SandboxExpired", "the sandbox's time to live ended while this ran", "")
STOPPED = RunError("SandboxStopped", "the sandbox was stopped while this ran", "")
DELETED = RunError("SandboxDeleted", "the sandbox was deleted while this ran", "")
_METRIC_CAUSES = {EXPIRED.name: "expired", DELETED.name: "deleted"}


class ServiceSandbox(ExpiringSandbox):
    """`users` counts the leases, `observers` those of them that do not count as a use; `active` is
    the open sandbox."""

    def __init__(
        self,
        dependencies: ServiceDependencies,
        row: SandboxRow,
        lost: LostContexts = frozenset(),
        *,
        new: bool = False,
    ) -> None:
        """`lost` and `new`: see SandboxHooks."""
        super().__init__(dependencies, row)
        self.users = 0
        self.observers = 0
        self.active: PersistentSandbox | None = None
        self.shut_down = False  # the service has closed
        self.hooks = SandboxHooks(self, lost, new=new)
        self._idle_at: float | None = None
        self._touched_at = 0.0

    @property
    def kernels(self) -> int:
        return self.starts + self._live

    @property
    def _live(self) -> int:
        return len(self.active.live) if self.active is not None else 0

    @property
    def state(self) -> State:
        return self.state_with(self._live)

    @property
    def idle_at(self) -> float | None:
        """Return when it is closed unless it is used; None while it is not open."""
        return self._idle_at if self.active is not None else None

    @property
    def idle(self) -> bool:
        """Return whether it is open, has no user, and its idle time-out is over."""
        due = self.idle_at
        return due is not None and due <= self.now and not self._busy

    @property
    def _busy(self) -> bool:
        running = self.active is not None and self.active.busy
        return self.users > self.observers or self.starts > 0 or running

    async def view(self) -> SandboxView:
        return await self.view_with(self.state, self.idle_at)

    def touch(self) -> None:
        now = self.dependencies.clock.now()
        self._idle_at = now + self.dependencies.settings.idle_timeout
        self.slide()
        if not 0 <= now - self._touched_at < _TOUCHED_EVERY_S:
            self._touched_at = now
            self.change_workspace(last_accessed_at=now)
            self._write_use(now)

    def _write_use(self, at: float) -> None:
        write = partial(rows.touch, row=self.row, at=at, idle=self.idle_at)
        self.dependencies.store.write_later(write)

    async def opened(
        self, *, to_start: str | None = None, touch: bool = True, act: Act = Act.USE
    ) -> PersistentSandbox:
        """Open it at the first call. The caller has called `check` for this act. Raises as `check`
        and `Runtime.open`.

        `to_start`: the conversation that needs a kernel; a new sandbox may get a prewarmed one.
        Without `touch`, one that this opens is idle at once.
        """
        if self.active is None:
            if to_start is not None:
                check_id("conversation_id", to_start)
            async with self._lock:
                self.check(act)
                if self.active is None:
                    await run_to_completion(self._open(to_start))
                    if touch:
                        self.touch()
                    else:
                        self._idle_at = self.now
        assert self.active is not None
        return self.active

    async def _open(self, to_start: str | None) -> None:
        runtime, settings = self.dependencies.runtime, self.dependencies.settings
        try:
            loaded, decided = await self.policy()
            await self.hooks.load()
            mounts = await self.live_mounts()
            async with AsyncExitStack() as undo:
                prewarmed = await self._prewarmed(loaded, decided, to_start)
                if prewarmed is not None:
                    undo.push_async_callback(prewarmed.leave_group)
                if self.workspace.uid is None and runtime.capabilities.root:
                    store = self.dependencies.store
                    self.change_workspace(
                        uid=await own_uid(store, self.workspace.id, settings.uid_range)
                    )
                make = partial(
                    PersistentSandbox, hooks=self.hooks, mounts=mounts, prewarmed=prewarmed
                )
                self.active = await runtime.open(loaded, decided, make)
                undo.pop_all()
        except errors.SbxError as error:
            self.set_failed(error)
            raise

    async def _prewarmed(
        self, loaded: Policy, decided: Policy, conversation: str | None
    ) -> PrewarmedSandbox | None:
        """Take a prewarmed sandbox, if nothing was kept or run in this one before. Its directory
        becomes that of the workspace and of the first conversation."""
        workspace, runtime = self.workspace, self.dependencies.runtime
        conversations = await self.hooks.conversations()
        new = workspace.managed_by == self.id and workspace.uid is None and not conversations
        if conversation is None or not new or self.row.request:
            return None
        prewarmed = await runtime.find_prewarmed(loaded, decided)
        if prewarmed is None:
            return None
        uid = prewarmed.host.uid if runtime.capabilities.root else None
        row = ConversationRow(self.id, conversation, prewarmed.conversation, self.now, self.now)
        move = partial(
            workspaces_table.move_in,
            workspace_id=workspace.id,
            directory=prewarmed.directory,
            uid=uid,
            conversation=row,
        )
        try:
            moved = await self.dependencies.store.write(move)
        except BaseException:
            await prewarmed.give_up()
            raise
        if not moved:
            await prewarmed.give_up()
            return None
        runtime.release_directory(prewarmed)
        self.change_workspace(directory=prewarmed.directory, uid=uid)
        conversations[conversation] = row
        self.hooks.created.add(conversation)
        return prewarmed

    def forget_conversation(self, name: str) -> Conversation | None:
        """Forget a deleted conversation. Return it if it is open, for the caller to end."""
        self.hooks.forget(name)
        return self.active.forget(name) if self.active is not None else None

    def unfreeze(self) -> bool:
        """For operators. Let it start kernels again; False if it was not frozen."""
        if self.frozen and self.active is not None and self.active.honeytokens is not None:
            self.active.honeytokens.unfreeze()
        return self.end_freeze()

    def evicted(self, context: Context, cause: str) -> None:
        metrics.kernel_stopped(cause)
        self.emit("stopped", cause, **kernel_name(context.conversation, context.name))

    async def stop(self, cause: str = "requested") -> None:
        """End every kernel and run; files stay, and the next use starts another kernel."""
        await run_to_completion(self._stop(cause))

    async def _stop(self, cause: str) -> None:
        async with self._lock:
            if self.state in (State.EXPIRED, State.DELETED):
                return
            kernels = self.kernels
            if self.active is not None:
                await self.active.halt(STOPPED)
                if self.users == 0:
                    await self._close()
            self.hooks.lost.clear()
            if kernels or not self.row.stopped:
                self._emit_stopped(cause, kernels)
            self.set_stopped(stopped=True, failure=None)
            self._idle_at = None if self.active is None else self._idle_at

    async def stop_idle(self) -> bool:
        """Close it if it is idle; the next run reports that the variables are lost."""
        if not self.idle:
            return False
        async with self._lock:
            if not self.idle:
                return False
            kernels = self.kernels
            await run_to_completion(self._close())
            if kernels:
                self._emit_stopped("idle_timeout", kernels)
            return True

    def _emit_stopped(self, cause: str, kernels: int) -> None:
        metrics.kernel_stopped(cause)
        self.emit("stopped", cause, kernels=kernels)

    async def delete(self, cause: str, slots: Sequence[Slot] = ()) -> bool:
        """Leave a tombstone, and end all kernels; the caller removes the files. Return False if it
        was deleted before. A cancelled call still completes. `slots`: see `erase_content`."""
        return await run_to_completion(self._delete(cause, slots))

    async def _delete(self, cause: str, slots: Sequence[Slot]) -> bool:
        async with self._lock:
            if self.row.deleted_at is not None:
                return False
            now = self.now
            managed = self.workspace.managed_by is not None

            def write(db: Any) -> None:
                rows.delete(db, self.id, now, cause, slots)
                if not managed:
                    rows.files_are_removed(db, self.id)
                events.add(db, self.id, now, "deleted", cause)

            await self.dependencies.store.write(write)
            self.row = replace(self.row, deleted_at=now, cause=cause, files_removed=not managed)
            await self._end_logged(EXPIRED if cause == "expired" else DELETED)
            self.announce("deleted", cause)
            return True

    async def shut(self, reason: RunError) -> None:
        """End all kernels because the service ends; the files stay."""
        async with self._lock:
            await run_to_completion(self._end_box(reason))
        if self.row.ttl_s is not None and not self.over:
            self._write_use(self.now)  # the store may be a minute behind
        self.shut_down = True
        self.changes.notify()

    async def _end_for_expiry(self) -> None:
        lost = self.active.stateful if self.active is not None else set()
        await self._end_logged(EXPIRED)
        self.hooks.lost |= lost

    async def _end_logged(self, reason: RunError) -> None:
        try:
            await run_to_completion(self._end_box(reason))
        except Exception as error:  # noqa: BLE001  # the border: it has expired or is deleted anyway
            _log.error("the sandbox %s did not end cleanly: %s", self.id, error, exc_info=error)

    async def _end_box(self, reason: RunError) -> None:
        if self.active is not None:
            kernels = self.kernels
            try:
                await self.active.halt(reason)
            finally:
                await self._close()
            if kernels:
                metrics.kernel_stopped(_METRIC_CAUSES.get(reason.name, "shutdown"))

    async def _close(self) -> None:
        active, self.active = self.active, None
        assert active is not None
        self.hooks.lost |= active.stateful
        self._idle_at = None
        try:
            await active.close()
        finally:
            self.egress_log.report_dropped()
