"""The sandboxes of a service: made, found for whoever calls, used, kept, ended.

    Sandboxes ── by id, by session ──► Living ── box ──► KeptSandbox ──► conversations, kernels
        │                                 └── row, events ──► Store
        └── cargos, leftovers (cargos.py, leftovers.py)

Rows of what was not deleted are held in memory: one process uses a store. What a caller may not see
is NotFound, whatever the reason.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from sbx import errors
from sbx.aio import Clock, run_to_completion
from sbx.isolation.plan import decide_walls
from sbx.kernels.budget import FrameBudgets
from sbx.protocol.mounts import Mount
from sbx.protocol.pages import Page
from sbx.protocol.runs import RunError
from sbx.runtime.files.open_files import OpenFilesLimit
from sbx.runtime.run.context import Context
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.runtime.settings import Settings
from sbx.service.auth import Caller
from sbx.service.garbage import GarbageCollector
from sbx.service.kept import KeptSandbox, end_forgotten
from sbx.service.leases import SandboxIndex, unknown
from sbx.service.lifecycle import Act, State
from sbx.service.limits import KernelLimit
from sbx.service.models import (
    ConversationView,
    SandboxView,
    SessionIdentity,
    TaskReport,
    WorkspaceView,
)
from sbx.service.recording import Recording
from sbx.service.sandbox import ServiceDependencies, ServiceSandbox
from sbx.service.using import InUse, SandboxLease
from sbx.service.workspaces import Workspaces
from sbx.store import Store, chats, events
from sbx.store import sandboxes as rows
from sbx.store.events import EventRow
from sbx.store.runs import SERVICE_ENDED
from sbx.store.sandboxes import ConversationRow, SandboxRow
from sbx.telemetry.audit import Audit

__all__ = [
    "ConversationView",
    "InUse",
    "Page",
    "SandboxView",
    "Sandboxes",
    "SessionIdentity",
    "TaskReport",
    "WorkspaceView",
]

LATEST = 253_402_300_799.0  # the last second that a date of four digits can tell
_LIST_MAX = 500
Leaving = Callable[[str, str | None], Awaitable[None]]  # a sandbox's id, a conversation's name
_FORGOTTEN = RunError("ConversationDeleted", "the conversation was deleted meanwhile", "")


class Sandboxes:
    """See the module. Its methods may be called concurrently from one event loop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Runtime,
        settings: Settings,
        audit: Audit | None = None,
        recording: Recording | None = None,
    ) -> None:
        """With `recording`, new work that cannot be recorded is refused."""
        self._recording = recording
        self._registry = SandboxIndex(settings)
        self.kernels = KernelLimit(settings.kernels_max, settings.kernels_per_owner, self.every)
        self._cargos = Workspaces(store, clock, runtime, settings.workspaces_per_owner)
        self.open_limit = OpenFilesLimit()
        self._keep = ServiceDependencies(
            store,
            clock,
            runtime,
            settings,
            self.kernels,
            self._cargos.by_id,
            self.open_limit,
            FrameBudgets(),
            audit,
        )
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._settings = settings
        self.leftovers = GarbageCollector(store, clock, runtime, settings)
        self._collecting = False
        self._leaving: list[Leaving] = []
        self._stopping: list[Leaving] = []

    def on_delete(self, leaving: Leaving) -> None:
        """Await this before a sandbox ends, or with its name a conversation of it."""
        self._leaving.append(leaving)

    def on_stop(self, stopping: Leaving) -> None:
        """Await this before a sandbox is stopped."""
        self._stopping.append(stopping)

    async def load(self) -> None:
        """Take over what the store knows, before anything else is called."""
        lost = await rows.kernels_left(self._store)
        await self._cargos.load()
        for row in await rows.living(self._store):
            self._cargos.demand(row.cargo_id)
            self._registry.remember(ServiceSandbox(self._keep, row, lost.get(row.id, frozenset())))

    def every(self) -> list[ServiceSandbox]:
        """All that were not deleted."""
        return self._registry.every()

    def live(self, sandbox_id: str) -> Sequence[Context]:
        """The contexts with a live kernel, of a sandbox that the caller is known to see."""
        one = self._registry.of_id(sandbox_id)
        return one.box.live if one is not None and one.box is not None else []

    async def close(self, error: RunError = SERVICE_ENDED) -> None:
        """End every kernel and keep all files. Runs that this ends get `error`."""
        ends = (one.shut(error) for one in self.every())
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if end is not None:
                raise end

    # -- made -----------------------------------------------------------------------------------

    async def create(
        self,
        caller: Caller,
        *,
        profile: str = "default",
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        cargo_id: str | None = None,
        ttl_s: float | None = None,
        session: SessionIdentity | None = None,
        upload_limits: Mapping[str, Any] | None = None,
    ) -> SandboxView:
        """A new sandbox; nothing starts yet. `ttl_s` None, 0 or less: it never expires.

        Raises BadRequest `validation_error` for a policy that is not there and what
        `Runtime.decide` says of the request, CannotEnforce, NotFound for the cargo, Unavailable
        `too_many_sandboxes`, Conflict `session_exists`.
        """
        _demand_creation(caller, session)
        self._check_recording(runs=False)
        with self._registry.creating(caller.owner):
            return await run_to_completion(
                self._create(
                    caller, profile, narrower, env, cargo_id, ttl_s, session, upload_limits
                )
            )

    async def _create(
        self,
        caller: Caller,
        profile: str,
        narrower: Mapping[str, Any] | None,
        env: Mapping[str, str] | None,
        cargo_id: str | None,
        ttl_s: float | None,
        session: SessionIdentity | None,
        upload_limits: Mapping[str, Any] | None,
    ) -> SandboxView:
        try:
            loaded, decided = await self._runtime.decide(profile, narrower=narrower, env=env)
        except errors.NotFound as error:
            raise errors.BadRequest(
                error.message, hint=error.hint, details={"field": "profile"}
            ) from error
        decide_walls(decided, self._runtime.capabilities)
        sandbox_id, now = f"sandbox-{secrets.token_hex(6)}", self._clock.now()
        cargo = self._cargos.for_sandbox(caller, cargo_id, sandbox_id)
        who = session or SessionIdentity("", "", "")
        row = SandboxRow(
            id=sandbox_id,
            owner=caller.owner,
            profile=profile,
            request={
                name: dict(part) for name, part in (("narrower", narrower), ("env", env)) if part
            },
            cargo_id=cargo.id,
            created_at=now,
            expires_at=min(now + ttl_s, LATEST) if ttl_s is not None and ttl_s > 0 else None,
            session_id=who.session_id or None,
            user_id=who.user_id or None,
            agent_id=who.agent_id or None,
            business_domain_id=who.business_domain_id,
            upload_limits=dict(upload_limits) if upload_limits is not None else None,
            recreated_because=who.recreated_because,
        )

        def act(on: Any) -> bool | None:
            if cargo_id is None:
                rows.add_cargo(on, cargo)
            elif not rows.cargo_is_there(on, cargo.id):
                return None
            if not rows.add(on, row):
                rows.drop_cargo(on, cargo.id, sandbox_id)
                return False
            events.add(on, sandbox_id, now, "created", profile=profile)
            return True

        added = await self._store.write(act)
        if added is None:
            raise errors.NotFound(f"there is no cargo {cargo_id}")
        if not added:
            raise errors.Conflict(
                f"the session {who.session_id} exists already", code="session_exists"
            )
        self._cargos.remember(cargo)
        one = ServiceSandbox(self._keep, row, new=True)
        one.know_policy(loaded, decided)
        self._registry.remember(one)
        return await one.view()

    # -- found ----------------------------------------------------------------------------------

    async def get(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """Raises NotFound, for what the caller may not see too."""
        return await self._registry.found(caller, sandbox_id).view()

    async def list(
        self,
        caller: Caller,
        *,
        limit: int = 50,
        cursor: str | None = None,
        state: State | None = None,
        sessions_only: bool = False,
        all_owners: bool = False,
    ) -> Page[SandboxView]:
        """By id. `all_owners` is for operators only, and nothing to others."""
        limit = max(1, min(limit, _LIST_MAX))
        found: list[ServiceSandbox] = []
        for one in self._registry.sorted(cursor):
            row = one.row
            if row.owner != caller.owner and not (all_owners and caller.operator):
                continue
            if not caller.sees(row.user_id, row.agent_id):
                continue
            if (sessions_only and row.session_id is None) or state not in (None, one.state):
                continue
            found.append(one)
            if len(found) > limit:
                break
        views = [await one.view() for one in found[:limit]]
        return Page(views, views[-1].id if len(found) > limit else None)

    # -- used -----------------------------------------------------------------------------------

    def using(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        scope: str,
        starts: bool = True,
        frees: bool = False,
        conversation: str | None = None,
    ) -> SandboxLease:
        """An `async with` around any use of its files or kernels; gives InUse.

        It keeps the idle time-out away. With `starts` a stop by request is over. `frees`: it only
        deletes, which a full disk does not hinder. `conversation`: the one that is used, where
        whoever calls does not mind a token's bounds itself.

        Raises NotFound, Conflict `sandbox_expired`, Unavailable `no_space` and `not_recording`, and
        what opening it raises. What ends while it is used raises the same instead of Closed.
        """
        check = None
        if scope == "execute" and starts and not frees:
            check = self._check_run
        elif scope == "files:write" and not frees:
            check = self._check_change
        return SandboxLease(self._registry, caller, sandbox_id, scope, starts, conversation, check)

    def _check_run(self) -> None:
        self._check_recording(runs=True)

    def _check_change(self) -> None:
        self._check_recording(runs=False)

    def _check_recording(self, *, runs: bool) -> None:
        if self._recording is not None:
            self._recording.check(runs=runs)

    async def keepalive(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """Put off its idle time-out, and start nothing. Raises Conflict `sandbox_expired`."""
        one = self._registry.found(caller, sandbox_id)
        one.check(Act.USE)
        one.touch()
        return await one.view()

    async def resume(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """Start a kernel of it: of `default`, or of the conversation that a session used last.

        Raises as `using`, and what a start raises.
        """
        async with self.using(caller, sandbox_id, scope="execute") as use:
            one = self._registry.found(caller, use.view.id)
            name = caller.conversation_id or await _first_conversation(one)
            if name is not None:
                await use.box.conversation(name).start()
            return await one.view()

    # -- its life -------------------------------------------------------------------------------

    async def extend(self, caller: Caller, sandbox_id: str, by_s: float) -> SandboxView:
        """Raises BadRequest, Conflict `sandbox_expired` and `sandbox_ttl_infinite`."""
        one = self._registry.whole(caller, sandbox_id, "admin")
        if not by_s > 0:
            raise errors.BadRequest(
                f"extend_by is a number of seconds above 0, not {by_s!r}",
                details={"field": "extend_by"},
            )
        await one.extend(by_s, LATEST)
        return await one.view()

    async def stop(self, caller: Caller, sandbox_id: str) -> None:
        """End its kernels and runs, and keep its files; again does nothing."""
        one = self._registry.whole(caller, sandbox_id, "execute")
        for stop in self._stopping:
            await stop(one.id, None)
        await one.stop()

    async def unfreeze(self, caller: Caller, sandbox_id: str) -> bool:
        """Let a sandbox start kernels again whose honeytoken was sprung, whoever owns it; False
        where none was. An operator's only. Raises NotFound."""
        return self._registry.get_as_operator(caller, sandbox_id).unfreeze()

    async def mount(
        self,
        caller: Caller,
        sandbox_id: str,
        source: str,
        target: str | None = None,
        *,
        read_only: bool = True,
    ) -> Mount:
        """Show a directory of the host inside, whoever owns the sandbox, until it is unmounted or
        this process ends. An operator's only, below the setting `mount_dirs`.

        Raises NotFound, Conflict `sandbox_expired`, Denied `not_granted`, and as
        `LiveMounts.mount`.
        """
        one = self._registry.get_as_operator(caller, sandbox_id)
        return await one.mount(source, target, read_only=read_only)

    async def unmount(self, caller: Caller, sandbox_id: str, target: str) -> None:
        """Show it no more. An operator's only. Raises NotFound, also `not_mounted`."""
        await self._registry.get_as_operator(caller, sandbox_id).unmount(target)

    def mounted(self, caller: Caller, sandbox_id: str) -> Sequence[Mount]:
        """What is mounted, of a sandbox that the caller sees or operates. Raises NotFound."""
        if caller.operator:
            return self._registry.get_as_operator(caller, sandbox_id).mounted
        return self._registry.found(caller, sandbox_id).mounted

    async def delete(self, caller: Caller, sandbox_id: str, *, cause: str = "requested") -> None:
        """End it, with the files that are its own; a second time does nothing. Raises NotFound
        only where there never was one for this caller."""
        scope = "execute" if cause == "expired" else "admin"
        if not caller.whole_sandbox or not caller.may(scope):
            raise unknown(sandbox_id)
        one = self._registry.known(caller, sandbox_id)
        if one is not None:
            await run_to_completion(self.end(one, cause))
        else:
            row = await self._row_of(caller, sandbox_id)
            if cause != "expired":  # which the first end of it may have been, and kept its chats
                await self._store.write(partial(chats.drop_of_sandbox, sandbox_id=row.id))

    async def end(self, one: ServiceSandbox, cause: str) -> bool:
        """`delete`, on nobody's behalf; False where somebody else did."""
        cargo, mine = one.cargo, False
        for leave in self._leaving:
            await leave(one.id, None)
        try:
            try:
                mine = await one.delete(cause)
            except errors.Unavailable as error:
                if error.code != "no_space" or cargo.managed_by is None:
                    raise
                await one.stop()  # its files make the room for the record of its end
                await self.leftovers.remove_files(cargo)
                mine = await one.delete(cause)
        finally:
            if one.row.deleted_at is not None:  # whatever became of the rest of its end
                self._registry.forget(one)
                if cargo.managed_by is not None:
                    self._cargos.forget(cargo.id)
        if mine and cargo.managed_by is not None:
            await self.leftovers.remove(one.row, cargo)
        return mine

    # -- conversations --------------------------------------------------------------------------

    async def conversations(self, caller: Caller, sandbox_id: str) -> Sequence[ConversationView]:
        """Those within the caller's bounds, by name. Raises as `using`."""
        async with self.using(caller, sandbox_id, scope="files:read", starts=False) as use:
            one = self._registry.found(caller, use.view.id)
            return [
                await _conversation_view(use.box, row)
                for name, row in sorted((await one.conversations()).items())
                if caller.sees(one.row.user_id, one.row.agent_id, name)
            ]

    async def conversation_names(self, caller: Caller, sandbox_id: str) -> Sequence[str]:
        """Return the conversations within the caller's bounds, the oldest first. Raise NotFound."""
        one = self._registry.found(caller, sandbox_id)
        conversations = (await one.conversations()).values()
        return [
            row.name
            for row in sorted(conversations, key=lambda row: (row.created_at, row.name))
            if caller.sees(one.row.user_id, one.row.agent_id, row.name)
        ]

    async def delete_conversation(self, caller: Caller, sandbox_id: str, name: str) -> None:
        """Kill its kernel, and remove its files, which are out of reach at once; one that is not
        there is nothing. Raises NotFound for the sandbox, also without the scope `files:write` or
        `execute`; Conflict `sandbox_expired`."""
        one = self._registry.found(caller, sandbox_id, "files:write")
        within = caller.sees(one.row.user_id, one.row.agent_id, name)
        if not within or not caller.may("execute"):  # it ends runs
            raise unknown(sandbox_id)
        one.check(Act.USE)
        for leave in self._leaving:
            await leave(one.id, name)
        if name in await one.conversations():
            await run_to_completion(self._delete_conversation(one, name))
        else:  # nothing was run or put there, and yet somebody may have talked
            await self._store.write(
                partial(chats.drop_of_conversation, sandbox_id=one.id, name=name)
            )

    async def _delete_conversation(self, one: ServiceSandbox, name: str) -> None:
        at, cargo = self._clock.now(), one.cargo

        def act(on: Any) -> Sequence[str]:
            directories = rows.delete_conversation(on, one.id, cargo.id, name)
            events.add(on, one.id, at, "conversation_deleted", conversation=name)
            return directories

        async with one.naming:
            gone = await self._store.write(act)
            sharing = (other for other in self.every() if other.row.cargo_id == cargo.id)
            open_ones = [other.forget_conversation(name) for other in sharing]
        ends = (end_forgotten(talk, _FORGOTTEN) for talk in open_ones if talk is not None)
        await asyncio.gather(*ends)
        await self.leftovers.remove_conversations(cargo, gone)

    # -- its story ------------------------------------------------------------------------------

    async def events(
        self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100
    ) -> Page[EventRow]:
        """What happened to it, the oldest first, also when it was deleted; nothing of conversations
        beyond the caller's bounds. Raises NotFound."""
        row = await self._row_of(caller, sandbox_id)
        limit = max(1, min(limit, _LIST_MAX))
        await self._store.settled()
        found = await events.of_sandbox(
            self._store,
            row.id,
            after=after,
            limit=limit + 1,
            conversation=caller.conversation_id,
        )
        more = len(found) > limit
        return Page(found[:limit], str(found[limit - 1].seq) if more else None)

    async def follow(
        self, caller: Caller, sandbox_id: str, *, after: int = 0
    ) -> AsyncIterator[EventRow]:
        """As `events`: those after this number, as they come; ends with its tombstone."""
        row = await self._row_of(caller, sandbox_id)
        within = caller.conversation_id
        one = self._registry.of_id(row.id)
        if one is None:
            for event in await events.of_sandbox(
                self._store, row.id, after=after, conversation=within
            ):
                yield event
            return
        while True:
            change = one.changes.next
            await self._store.settled()
            page = await events.of_sandbox(self._store, row.id, after=after, conversation=within)
            for event in page:
                after = event.seq
                yield event
            if page:
                continue  # there may be more than one page
            if not change.is_set() and (one.row.deleted_at is not None or one.shut_down):
                return
            await change.wait()

    async def _row_of(self, caller: Caller, sandbox_id: str) -> SandboxRow:
        if (one := self._registry.known(caller, sandbox_id)) is not None:
            return one.row
        row = await rows.of_id(self._store, caller.owner, sandbox_id)
        if row is None or not caller.sees(row.user_id, row.agent_id):
            raise unknown(sandbox_id)
        return row

    # -- cargos ---------------------------------------------------------------------------------

    async def create_cargo(self, caller: Caller, size_limit_mb: int | None = 1024) -> WorkspaceView:
        """A workspace that no sandbox takes along. Raises as `Workspaces.create`."""
        self._check_recording(runs=False)
        return await self._cargos.create(caller, size_limit_mb)

    async def cargos(
        self,
        caller: Caller,
        *,
        limit: int = 50,
        cursor: str | None = None,
        managed: bool | None = None,
    ) -> Page[WorkspaceView]:
        """By id: those with an own life, or with `managed` those that sandboxes made."""
        return self._cargos.list(caller, limit, cursor, managed=bool(managed))

    async def cargo(self, caller: Caller, cargo_id: str) -> WorkspaceView:
        """Raises NotFound."""
        return self._cargos.get(caller, cargo_id)

    async def delete_cargo(self, caller: Caller, cargo_id: str) -> None:
        """Remove it with its files. Raises NotFound, Conflict while a sandbox uses it."""
        cargo = await self._cargos.delete(caller, cargo_id)
        await self.leftovers.remove_cargo(cargo)

    # -- collection -----------------------------------------------------------------------------

    @property
    def collecting(self) -> bool:
        return self._collecting

    async def collect(self, tasks: Iterable[str] | None = None) -> Sequence[TaskReport]:
        """Collect now what is idle, expired or left over; `tasks` filters what is reported.

        Raises Conflict `gc_running`.
        """
        if self._collecting:
            raise errors.Conflict(
                "a collection is going on",
                code="gc_running",
                details={"retry_after_s": 1.0},
            )
        self._collecting = True
        try:
            reports = [
                await self._collected("idle_session", (one.stop_idle for one in self.every())),
                await self._collected(
                    "expired_sandbox", (partial(self._bury, one) for one in self.every())
                ),
                *await self.leftovers.collect(),
            ]
        finally:
            self._collecting = False
        wanted = None if tasks is None else set(tasks)
        return [one for one in reports if wanted is None or one.task_name in wanted]

    async def _bury(self, one: ServiceSandbox) -> bool:
        if not one.expired:
            return False
        await one.expire()
        return await self.end(one, "expired")

    async def _collected(self, name: str, acts: Iterable[Any]) -> TaskReport:
        cleaned, failed = 0, []
        for act in acts:
            try:
                cleaned += await act()
            except errors.SbxError as error:
                failed.append(error.message)
        return TaskReport(name, cleaned, 0, tuple(failed))


async def _first_conversation(one: ServiceSandbox) -> str | None:
    known = await one.conversations()
    if one.row.session_id is None or DEFAULT_CONVERSATION in known:
        return DEFAULT_CONVERSATION
    return max(known.values(), key=lambda row: row.created_at).name if known else None


async def _conversation_view(box: KeptSandbox, row: ConversationRow) -> ConversationView:
    talk = box.known(row.name)
    status: Literal["idle", "ready", "busy"] = "idle"
    if talk is not None and (talk.busy or talk.alive):
        status = "busy" if talk.busy else "ready"
    files, size = await box.measured(row.directory)
    return ConversationView(row.name, row.created_at, status, files, size)


def _demand_creation(caller: Caller, session: SessionIdentity | None) -> None:
    """A token makes only the session that is its own."""
    user, agent = (session.user_id, session.agent_id) if session else (None, None)
    if not caller.sees(user, agent) or not (caller.may("execute") or caller.may("files:write")):
        raise errors.NotFound("there is nothing that this token may make here")
