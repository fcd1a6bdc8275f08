"""One sandbox that was not deleted: its row, its files' place, and what lives of it.

Opened lazily, at its first use; closed with its files kept, by a stop, an idle time-out, its
expiry or its end. Everything that changes which box it has happens under its lock; what can run
without one is short and awaits nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sbx import errors
from sbx.aio import Clock, run_to_completion
from sbx.event_log import ChangeSignal
from sbx.kernels.budget import FrameBudgets
from sbx.policy import Policy
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.mounts import Mount
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import RunError
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.open_files import OpenFilesLimit
from sbx.runtime.honeytokens import CODE as HONEYTOKEN
from sbx.runtime.honeytokens import TokenTriggered, refusal
from sbx.runtime.live_mounts import LiveMounts, not_mounted
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.run.context import Context
from sbx.runtime.run.contexts import ContextStore
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service import lifecycle
from sbx.service.egress_log import EgressLog
from sbx.service.kept import KeptSandbox, SandboxHooks, open_kept
from sbx.service.lifecycle import Act, LifecycleInputs, State
from sbx.service.limits import KernelLimit
from sbx.service.models import SandboxView
from sbx.service.uids import own_uid
from sbx.store import Store, contexts, events
from sbx.store import sandboxes as rows
from sbx.store.contexts import ContextRow
from sbx.store.sandboxes import ConversationRow, SandboxRow, WorkspaceRow
from sbx.telemetry import metrics
from sbx.telemetry.audit import Audit
from sbx.telemetry.host_paths import hide_in, without_host_paths
from sbx.workspace import allowed_paths

CONVERSATIONS_MAX = 1000
_TOUCHED_EVERY_S = 60.0
_MIB = 1 << 20
_NO_FAILURE = {
    "stopped",
    "closed",
    "too_many_kernels",
    "sandbox_expired",
    "not_found",
    "honeytoken",
}
_FROZEN = {HONEYTOKEN, "tripwire"}  # stores of version 6 and earlier have the second code
_log = logging.getLogger(__name__)

STOPPED = RunError("SandboxStopped", "the sandbox was stopped while this ran", "")
EXPIRED = RunError("SandboxExpired", "the sandbox's time to live ended while this ran", "")
DELETED = RunError("SandboxDeleted", "the sandbox was deleted while this ran", "")
Lost = frozenset[tuple[str, str]]  # of (conversation, context)
_CAUSES = {EXPIRED.name: "expired", DELETED.name: "deleted"}  # as metrics tell them


@dataclass(frozen=True, slots=True)
class ServiceDependencies:
    """What every sandbox of a service uses. `cargos`: those that were not deleted, by id; `audit`:
    who remembers for good, where there is somebody."""

    store: Store
    clock: Clock
    runtime: Runtime
    settings: Settings
    kernels: KernelLimit
    cargos: dict[str, WorkspaceRow]
    open_limit: OpenFilesLimit
    frame_budgets: FrameBudgets
    audit: Audit | None = None


class ServiceSandbox:
    """See the module. `users` are inside `Sandboxes.using`; `starts` are kernels on their way."""

    def __init__(
        self,
        keep: ServiceDependencies,
        row: SandboxRow,
        lost: Lost = frozenset(),
        *,
        new: bool = False,
    ) -> None:
        """`lost`: the contexts whose kernel ended with an earlier runtime. `new`: it was made just
        now, so there is nothing of it in the store that is not known here."""
        self.row = row
        self.users = 0
        self.starts = 0
        self.box: KeptSandbox | None = None
        self.over = False  # its expiry was seen to
        self.shut_down = False  # the service has closed
        self._keep = keep
        self._cargo = keep.cargos[row.cargo_id]
        self._lost = set(lost)
        self._lock = asyncio.Lock()
        self.naming = asyncio.Lock()  # held while a conversation is made or deleted
        self._policies: tuple[Policy, Policy] | None = None
        self._mounts: LiveMounts | None = None
        self._conversations: dict[str, ConversationRow] | None = {} if new else None
        # Beside `default`, by conversation.
        self._contexts: dict[str, set[str]] | None = {} if new else None
        self._idle_at: float | None = None
        self._touched_at = 0.0
        self.changes = ChangeSignal()  # of its events in the store
        self._decisions = EgressLog(row.id, row.owner, keep.audit, self.tell, keep.clock.now)

    # -- what it is now -------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def cargo(self) -> WorkspaceRow:
        """Its workspace, which other sandboxes may use too. Of one that was deleted, as it was."""
        return self._keep.cargos.get(self.row.cargo_id, self._cargo)

    def _change_cargo(self, **to: Any) -> None:
        self._cargo = replace(self.cargo, **to)
        if self.row.cargo_id in self._keep.cargos:
            self._keep.cargos[self.row.cargo_id] = self._cargo

    @property
    def expired(self) -> bool:
        end = self.row.expires_at
        return end is not None and end <= self._keep.clock.now()

    @property
    def kernels(self) -> int:
        """How many live, and how many start."""
        return self.starts + (len(self.box.live) if self.box is not None else 0)

    @property
    def state(self) -> State:
        return lifecycle.state_of(
            LifecycleInputs(
                deleted=self.row.deleted_at is not None,
                expired=self.expired,
                kernels=len(self.box.live) if self.box is not None else 0,
                starts=self.starts,
                failed=self.row.failure is not None,
            )
        )

    @property
    def idle_at(self) -> float | None:
        """When it is closed if nobody uses it; None while there is nothing to close."""
        return self._idle_at if self.box is not None else None

    def check(self, act: Act) -> None:
        """Raises what the table of states says: Conflict `sandbox_expired`, NotFound."""
        state = self.state
        if lifecycle.after(state, act) is None:
            raise lifecycle.refusal(self.id, state, self.row.expires_at)

    async def policy(self) -> tuple[Policy, Policy]:
        """As it was loaded, and as the request and the cargo's size narrow it. It stays what it was
        for as long as the runtime lives. Raises what `Runtime.decide` does."""
        if self._policies is None:
            asked = self.row.request
            loaded, decided = await self._keep.runtime.decide(
                self.row.profile, narrower=asked.get("narrower"), env=asked.get("env")
            )
            self._policies = loaded, _within_cargo(decided, self.cargo)
        return self._policies

    def know_policy(self, loaded: Policy, decided: Policy) -> None:
        self._policies = loaded, _within_cargo(decided, self.cargo)

    async def view(self) -> SandboxView:
        if self._policies is not None:
            return self._view(self._policies[1], self.state, self.row.failure)
        state = self.state
        try:
            _, policy = await self.policy()
            return self._view(policy, state, self.row.failure)
        except errors.SbxError as error:  # its file was taken away, or does not hold any more
            nothing = Policy.model_validate({"name": self.row.profile})
            state = State.FAILED if state is State.IDLE else state
            return self._view(nothing, state, without_host_paths(error))

    def _view(self, policy: Policy, state: State, failure: dict[str, Any] | None) -> SandboxView:
        row = self.row
        return SandboxView(
            id=row.id,
            owner=row.owner,
            state=state,
            profile=row.profile,
            policy=policy,
            cargo_id=row.cargo_id,
            created_at=row.created_at,
            expires_at=row.expires_at,
            idle_expires_at=None if state is State.EXPIRED else self.idle_at,
            stopped=row.stopped,
            failure=failure,
            session_id=row.session_id,
            user_id=row.user_id,
            agent_id=row.agent_id,
            business_domain_id=row.business_domain_id,
            recreated_because=row.recreated_because,
            upload_limits=row.upload_limits,
            narrower=row.request.get("narrower"),
            env=row.request.get("env"),
        )

    # -- using it -------------------------------------------------------------------------------

    async def opened(self, *, to_start: str | None = None) -> KeptSandbox:
        """Its box, opened at the first call. `to_start`: the conversation that wants a kernel; a
        new sandbox may get one that is ready. Raises as `check` and `Runtime.open`."""
        self.check(Act.USE)
        if self.box is None:
            async with self._lock:
                self.check(Act.USE)
                if self.box is None:
                    await run_to_completion(self._open(to_start))
        assert self.box is not None
        return self.box

    async def _open(self, to_start: str | None) -> None:
        keep = self._keep
        try:
            loaded, decided = await self.policy()
            await self.conversations()
            mounts = await self._live_mounts()
            if self._contexts is None:
                self._contexts = await contexts.of_sandbox(keep.store, self.id)
            async with AsyncExitStack() as undo:
                home = await self._ready_home(loaded, decided, to_start)
                if home is not None:
                    undo.push_async_callback(home.leave_group)
                if self.cargo.uid is None and keep.runtime.capabilities.root:
                    uid = await own_uid(keep.store, self.cargo.id, keep.settings.uid_range)
                    self._change_cargo(uid=uid)
                place = self._place(mounts)
                self.box = await open_kept(keep.runtime, loaded, decided, place, home)
                undo.pop_all()
        except errors.SbxError as error:
            self._failed(error)
            raise
        self.touch()

    def _place(self, mounts: LiveMounts) -> SandboxHooks:
        return SandboxHooks(
            id=self.id,
            directory=self.cargo.directory,
            uid=self.cargo.uid,
            directory_of=self._directory_of,
            starting=self._starting,
            started=self._started,
            lost=lambda conversation, context: (conversation, context) in self._lost,
            contexts=self._memory_of,
            exists=self._exists,
            limit=self._keep.open_limit,
            decided=self._decisions.add,
            sprung=self._sprung,
            mounts=mounts,
            frame_budget=self._keep.frame_budgets.of(self.row.owner),
        )

    async def _ready_home(
        self, loaded: Policy, decided: Policy, conversation: str | None
    ) -> PrewarmedSandbox | None:
        """One that was made ahead, for a sandbox in which nothing was kept or run before; its first
        conversation lies there then."""
        cargo, runtime = self.cargo, self._keep.runtime
        known = await self.conversations()
        new = cargo.managed_by == self.id and cargo.uid is None and not known
        if conversation is None or not new or self.row.request:
            return None
        home = await runtime.ready_home(loaded, decided)
        if home is None:
            return None
        uid = home.host.uid if runtime.capabilities.root else None
        row = ConversationRow(self.id, conversation, home.conversation, self._now, self._now)
        move = partial(
            rows.move_in, cargo_id=cargo.id, directory=home.directory, uid=uid, conversation=row
        )
        try:
            moved = await self._keep.store.write(move)
        except BaseException:
            await home.give_up()
            raise
        if not moved:
            await home.give_up()
            return None
        runtime.known(home)
        self._change_cargo(directory=home.directory, uid=uid)
        known[conversation] = row
        return home

    def touch(self) -> None:
        """It is used: put off its idle time-out."""
        now = self._keep.clock.now()
        self._idle_at = now + self._keep.settings.idle_timeout
        if not 0 <= now - self._touched_at < _TOUCHED_EVERY_S:
            self._touched_at = now
            self._change_cargo(last_accessed_at=now)
            self._keep.store.write_later(
                partial(
                    rows.touch,
                    sandbox_id=self.id,
                    cargo_id=self.cargo.id,
                    at=now,
                    idle=self.idle_at,
                )
            )

    def begin_use(self) -> None:
        """A stop by request counts until the next use."""
        if self.row.stopped:
            self._remember(stopped=False, failure=self.row.failure)

    # -- mounts ----------------------------------------------------------------------------

    @property
    def mounted(self) -> tuple[Mount, ...]:
        """What is mounted to it, also while it is closed."""
        return self._mounts.there if self._mounts is not None else ()

    async def mount(self, source: str, target: str | None, *, read_only: bool) -> Mount:
        """See `LiveMounts.mount`. Nothing starts, nor is it opened, for this: its next kernels
        show it too."""
        self.check(Act.USE)
        mounts = await self._live_mounts()
        made = await mounts.mount(source, target, read_only=read_only)
        self.tell("mounted", target=made.target, read_only=made.read_only)
        return made

    async def unmount(self, target: str) -> None:
        """See `LiveMounts.unmount`."""
        if self._mounts is None:
            raise not_mounted(target)
        await self._mounts.unmount(target)
        self.tell("unmounted", target=target)

    async def _live_mounts(self) -> LiveMounts:
        """Those that there are for as long as this process lives, however often it is closed."""
        _, policy = await self.policy()
        if self._mounts is None:
            runtime = self._keep.runtime
            self._mounts = LiveMounts(
                policy.shared,
                guarded=policy.host_executables != "allow",
                possible=runtime.capabilities.own_namespaces,
                check=partial(allowed_paths.check, own=runtime.own_paths),
                grounds=runtime.grounds,
            )
        return self._mounts

    # -- conversations --------------------------------------------------------------------------

    async def conversations(self) -> dict[str, ConversationRow]:
        """The ones that exist, by name."""
        if self._conversations is None:
            found = await rows.conversations(self._keep.store, self.id)
            if self._conversations is None:
                self._conversations = {row.name: row for row in found}
        return self._conversations

    async def _exists(self, name: str) -> bool:
        """Also where another sandbox of the same cargo made it."""
        if name in await self.conversations():
            return True
        return self.cargo.managed_by is None and await rows.conversation_in_cargo(
            self._keep.store, self.cargo.id, name
        )

    async def _directory_of(self, name: str, wanted: Callable[[], bool]) -> tuple[str, bool]:
        """`wanted`: not any more by who was deleted while it waited."""
        async with self.naming:
            if not wanted():
                raise errors.Closed(
                    f"the conversation {name[:80]!r} was deleted meanwhile",
                    hint="use it anew: its files and state are gone",
                )
            known = await self.conversations()
            if (found := known.get(name)) is not None:
                return found.directory, False
            if len(known) >= CONVERSATIONS_MAX:
                raise errors.Conflict(
                    f"a sandbox has at most {CONVERSATIONS_MAX} conversations",
                    code="too_many_conversations",
                )
            now = self._keep.clock.now()
            row = ConversationRow(self.id, name, self._keep.runtime.data.new_name(), now, now)
            kept = await self._keep.store.write(
                partial(rows.add_conversation, row=row, cargo_id=self.cargo.id)
            )
            known[name] = kept
            return kept.directory, kept.directory == row.directory

    def forget_conversation(self, name: str) -> Conversation | None:
        """For this sandbox there never was one; what of it is open here, to be ended by
        `kept.end_forgotten`."""
        self._lost = {one for one in self._lost if one[0] != name}
        if self._contexts is not None:
            self._contexts.pop(name, None)
        if self._conversations is not None:
            self._conversations.pop(name, None)
        return self.box.forget(name) if self.box is not None else None

    def _memory_of(self, conversation: str) -> ContextStore:
        """Of its contexts beside `default`; until it is deleted, and another one of the same name
        has contexts of its own."""
        assert self._contexts is not None
        known = self._contexts.setdefault(conversation, set())
        return ContextStore(
            tuple(sorted(known)),
            add=partial(self._add_context, conversation, known),
            drop=partial(self._drop_context, conversation, known),
        )

    def _remembers(self, conversation: str, known: set[str]) -> bool:
        return self._contexts is not None and self._contexts.get(conversation) is known

    async def _add_context(self, conversation: str, known: set[str], name: str) -> None:
        row = ContextRow(self.id, conversation, name, self._now)
        there = self._remembers(conversation, known)
        if not there or not await self._keep.store.write(partial(contexts.add, row=row)):
            raise errors.NotFound(f"there is no conversation {conversation[:80]!r} any more")
        known.add(name)

    async def _drop_context(self, conversation: str, known: set[str], name: str) -> None:
        known.discard(name)
        if self._remembers(conversation, known):
            self._lost.discard((conversation, name))
            await self._keep.store.write(
                partial(contexts.drop, sandbox_id=self.id, conversation=conversation, name=name)
            )

    # -- kernels --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _starting(self, conversation: str, context: str) -> AsyncIterator[None]:
        """Around the start of a kernel: its limits before, and what becomes of it."""
        self.check(Act.START)
        if self.frozen:
            assert self.row.failure is not None
            details = self.row.failure.get("details", {})
            token = details.get("token", details.get("wire", ""))
            raise refusal(token, details.get("where", ""))
        self.starts += 1
        try:
            await self._keep.kernels.make_room(self)
            self.check(Act.START)
            yield
        except errors.SbxError as error:
            hide_in(error)
            if error.code not in _NO_FAILURE:
                self._failed(error)
            if error.code in ("start_timeout", "start_failed"):
                raise _not_ready(self.id, error) from error
            raise
        else:
            self._lost.discard((conversation, context))
            if self.row.stopped or self.row.failure is not None:
                self._remember(stopped=False, failure=None)
            self.tell("started", **_told_of(conversation, context))
        finally:
            self.starts -= 1

    def _started(self, conversation: str, context: str, receipt: Receipt) -> None:
        """The walls around a kernel go into the audit log, signed; nobody waits for that."""
        if self._keep.audit is None:
            return
        about = {"owner": self.row.owner, **_told_of(conversation, context)}
        told = partial(_receipt_told, receipt, about)
        self._keep.audit.note_by("sbx", "kernel.start", self.id, told)

    @property
    def frozen(self) -> bool:
        """Whether a honeytoken was sprung: no kernel starts until an operator unfreezes that."""
        return self.row.failure is not None and self.row.failure.get("code") in _FROZEN

    def _sprung(self, sprung: TokenTriggered) -> None:
        """At once: its kernels are still on their way out."""
        told = {"token": sprung.token, "where": sprung.where}
        self._remember(stopped=False, failure=refusal(**told).to_dict())
        self.tell("honeytoken", **told)
        if self._keep.audit is not None:
            self._keep.audit.note("sbx", "honeytoken", self.id, owner=self.row.owner, **told)

    def unfreeze(self) -> bool:
        """Let it start kernels again; False where it was not frozen."""
        if not self.frozen:
            return False
        self.row = replace(self.row, failure=None)
        self._remember(stopped=False, failure=None)
        if self.box is not None and self.box.honeytokens is not None:
            self.box.honeytokens.unfreeze()
        self.tell("unfrozen")
        return True

    def _failed(self, error: errors.SbxError) -> None:
        shown = without_host_paths(error)
        self._remember(stopped=False, failure=shown)
        self.tell("failed", error.code, message=shown["message"])

    def ended_one(self, one: Context, cause: str) -> None:
        """A kernel of it was ended to make room."""
        metrics.kernel_stopped(cause)
        self.tell("stopped", cause, **_told_of(one.conversation, one.name))

    # -- its life -------------------------------------------------------------------------------

    async def stop(self, cause: str = "requested") -> None:
        """End every kernel and run; files stay, and the next use starts anew."""
        await run_to_completion(self._stop(cause))

    async def _stop(self, cause: str) -> None:
        async with self._lock:
            if self.state in (State.EXPIRED, State.DELETED):
                return
            had = self.kernels
            if self.box is not None:
                await self.box.halt(STOPPED)
                if self.users == 0:
                    await self._close()
            self._lost.clear()
            if had or not self.row.stopped:
                self._tell_stopped(cause, had)
            self._remember(stopped=True, failure=None)
            self._idle_at = None if self.box is None else self._idle_at

    async def stop_idle(self) -> bool:
        """Close it if its idle time-out is over; variables are lost, which the next run says."""
        if not self.idle:
            return False
        async with self._lock:
            if not self.idle:
                return False
            assert self.box is not None
            had = self.kernels
            await run_to_completion(self._close())
            if had:
                self._tell_stopped("idle_timeout", had)
            return True

    @property
    def idle(self) -> bool:
        """Whether it is open, nobody uses it, and its idle time-out is over."""
        due = self.idle_at
        return (
            due is not None
            and due <= self._keep.clock.now()
            and self.users == 0
            and self.starts == 0
            and self.box is not None
            and not self.box.busy
        )

    async def extend(self, by_s: float, latest: float) -> None:
        """Let it live longer, before its end only."""
        async with self._lock:
            self.check(Act.EXTEND)
            if (end := self.row.expires_at) is None:
                raise errors.Conflict(
                    f"the sandbox {self.id} never expires",
                    code="sandbox_ttl_infinite",
                    details={"sandbox_id": self.id},
                )
            new = min(max(end, self._keep.clock.now()) + by_s, latest)
            await self._keep.store.write(partial(rows.extend, sandbox_id=self.id, expires_at=new))
            self.row = replace(self.row, expires_at=new)
            self.tell("extended", by=by_s, expires_at=new)

    async def expire(self) -> bool:
        """See to its end if its time is over: runs end, and are told why; files stay for now."""
        if self.over or not self.expired:
            return False
        async with self._lock:
            if self.over or not self.expired or self.row.deleted_at is not None:
                return False  # it was extended, or deleted
            self.over = True
            try:
                await run_to_completion(self._end_box(EXPIRED))
            except Exception as error:  # noqa: BLE001  # the border: expired it is all the same
                _log.error("the expired %s did not end well: %s", self.id, error, exc_info=error)
            self._keep.store.write_later(
                partial(events.add_once, sandbox_id=self.id, at=self._now, kind="expired")
            )
            self.changes.notify()
            return True

    async def delete(self, cause: str) -> bool:
        """Leave a tombstone, and end what lives. Files are the caller's to remove.

        False when somebody else did. Once begun it is done to its end.
        """
        return await run_to_completion(self._delete(cause))

    async def _delete(self, cause: str) -> bool:
        async with self._lock:
            if self.row.deleted_at is not None:
                return False
            now = self._now
            managed = self.cargo.managed_by is not None

            def act(on: Any) -> None:
                rows.delete(on, self.id, now, cause)
                if not managed:
                    rows.files_are_removed(on, self.id)
                events.add(on, self.id, now, "deleted", cause)

            await self._keep.store.write(act)
            self.row = replace(self.row, deleted_at=now, cause=cause, files_removed=not managed)
            try:
                await self._end_box(EXPIRED if cause == "expired" else DELETED)
            except Exception as error:  # noqa: BLE001  # the border: deleted it is all the same
                _log.error("the deleted %s did not end well: %s", self.id, error, exc_info=error)
            self.changes.notify()
            return True

    async def shut(self, told: RunError) -> None:
        """The service ends: so does what lives here, with its files kept."""
        async with self._lock:
            await run_to_completion(self._end_box(told))
        self.shut_down = True
        self.changes.notify()

    async def _end_box(self, told: RunError) -> None:
        if self.box is not None:
            had = self.kernels
            try:
                await self.box.halt(told)
            finally:
                await self._close()
            if had:
                metrics.kernel_stopped(_CAUSES.get(told.name, "shutdown"))

    async def _close(self) -> None:
        box, self.box = self.box, None
        assert box is not None
        self._lost |= box.stateful
        self._idle_at = None
        try:
            await box.close()
        finally:
            self._decisions.report_dropped()

    # -- its story ------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._keep.clock.now()

    def tell(self, kind: str, cause: str | None = None, **details: Any) -> None:
        """Record an event, and wake the followers."""
        at = self._now
        self._keep.store.write_later(lambda on: events.add(on, self.id, at, kind, cause, **details))
        self.changes.notify()

    def _tell_stopped(self, cause: str, kernels: int) -> None:
        metrics.kernel_stopped(cause)
        self.tell("stopped", cause, kernels=kernels)

    def _remember(self, *, stopped: bool, failure: Mapping[str, Any] | None) -> None:
        if self.frozen:
            failure = self.row.failure  # a stop, or another failure, does not unfreeze that
        self.row = replace(
            self.row, stopped=stopped, failure=dict(failure) if failure is not None else None
        )
        self._keep.store.write_later(
            partial(rows.set_stopped, sandbox_id=self.id, stopped=stopped, failure=failure)
        )


def _told_of(conversation: str, context: str) -> dict[str, str]:
    """Which kernel an event is about; `default` needs no name."""
    beside = {} if context == DEFAULT_CONTEXT else {"context": context}
    return {"conversation": conversation, **beside}


def _receipt_told(receipt: Receipt, about: Mapping[str, str]) -> dict[str, Any]:
    told = receipt.to_dict()
    # The reasons of `preload_failed` are the guest's own words, as long as it likes.
    told["preload_failed"] = sorted(module[:80] for module in told["preload_failed"])[:20]
    return {**about, "sha256": receipt.digest, "receipt": told}


def _not_ready(sandbox_id: str, error: errors.SbxError) -> errors.Unavailable:
    return errors.Unavailable(
        error.message,
        code="session_not_ready",
        hint="try again: the next call starts another one",
        details={"sandbox_id": sandbox_id, "retry_after_ms": 1000, "retry_after_s": 1.0},
    )


def _within_cargo(policy: Policy, cargo: WorkspaceRow) -> Policy:
    """A cargo's own size limit narrows what its conversations may keep, each."""
    if cargo.size_limit_mb is None:
        return policy
    most = min(policy.limits.workspace_max, cargo.size_limit_mb * _MIB)
    limits = policy.limits.model_copy(update={"workspace_max": most})
    return policy.model_copy(update={"limits": limits})
