"""The sandboxes of a service: created, found for a caller, leased, kept and ended.

    Sandboxes ── SandboxIndex, by id and session ──► ServiceSandbox ── active ──► PersistentSandbox

Rows of sandboxes that were not deleted are also held in memory: one process uses a store. A sandbox
that the caller may not see is NotFound, whatever the reason.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

from msgspec.structs import asdict, replace

from sbx import errors
from sbx.aio import Clock, run_to_completion
from sbx.isolation.plan import decide_walls
from sbx.kernels.channel import FrameBudgets
from sbx.policy import Policy
from sbx.protocol.pages import Page
from sbx.protocol.runs import RunError
from sbx.runtime.files.open_files import OpenFilesLimit
from sbx.runtime.run.context import Context
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.content_erasure import ContentErasure
from sbx.service.garbage import GarbageCollector
from sbx.service.hooks import PersistentSandbox
from sbx.service.ids import check_sizes
from sbx.service.leases import SandboxIndex, SandboxLease, row_of, unknown
from sbx.service.lifecycle import Act, State
from sbx.service.limits import KernelLimit
from sbx.service.models import ConversationView, SandboxView, SessionIdentity
from sbx.service.notices import Notices
from sbx.service.record import LATEST, ServiceDependencies
from sbx.service.recording import Recording
from sbx.service.sandbox import ServiceSandbox
from sbx.service.workspaces import Workspaces
from sbx.store import Store, events
from sbx.store import sandboxes as rows
from sbx.store import workspaces as workspaces_table
from sbx.store.conversations import ConversationRow
from sbx.store.erasure import slots_of
from sbx.store.runs import SERVICE_ENDED
from sbx.store.sandboxes import SandboxRow
from sbx.store.workspaces import WorkspaceRow
from sbx.telemetry.audit import Audit

_LIST_MAX = 500
OnEnd = Callable[[str, str | None], Awaitable[None]]  # a sandbox's id, a conversation's name


class Sandboxes:
    """The sandboxes of a service. Call the methods from one event loop; calls may be concurrent."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Runtime,
        settings: Settings,
        garbage: GarbageCollector,
        workspaces: Workspaces,
        audit: Audit | None = None,
        recording: Recording | None = None,
        notices: Notices | None = None,
    ) -> None:
        """With `recording`, new work that cannot be recorded is refused."""
        self._recording = recording
        self.index = SandboxIndex(settings)
        self.kernels = KernelLimit(settings.kernels_max, settings.kernels_per_owner, self.every)
        self.index.on_left = self.kernels.queue.freed
        self.open_limit = open_limit = OpenFilesLimit()
        make_room, budgets = self.kernels.make_room, FrameBudgets()
        parts = store, clock, runtime, settings, make_room, workspaces.by_id, open_limit, budgets
        self._dependencies = ServiceDependencies(*parts, notices or Notices(), audit)
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._workspaces = workspaces
        self._garbage = garbage
        self._on_delete: list[OnEnd] = []
        self._on_stop: list[OnEnd] = []
        self.erasure = ContentErasure(store, clock, runtime, garbage, self.index)

    def on_delete(self, on_delete: OnEnd) -> None:
        """Await this before a sandbox is deleted, or with its name a conversation of it."""
        self._on_delete.append(on_delete)

    def on_stop(self, on_stop: OnEnd) -> None:
        """Await this before a sandbox is stopped."""
        self._on_stop.append(on_stop)

    async def load(self) -> None:
        """Load the rows of the store, before anything else is called."""
        lost = await rows.kernels_left(self._store)
        await self._workspaces.load()
        for row in await rows.living(self._store):
            self._workspaces.demand(row.workspace_id)
            self.index.add(ServiceSandbox(self._dependencies, row, lost.get(row.id, frozenset())))

    def every(self) -> list[ServiceSandbox]:
        return self.index.every()

    def live(self, sandbox_id: str) -> Sequence[Context]:
        """Return the contexts with a live kernel, of a sandbox that the caller is known to see."""
        sandbox = self.index.by_id(sandbox_id)
        return sandbox.active.live if sandbox is not None and sandbox.active is not None else []

    async def close(self, error: RunError = SERVICE_ENDED) -> None:
        """End every kernel and keep all files. Runs that this ends get `error`."""
        ends = (sandbox.shut(error) for sandbox in self.every())
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if end is not None:
                raise end

    async def create(
        self,
        caller: Caller,
        *,
        policy: str = "default",
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        workspace_id: str | None = None,
        ttl_s: float | None = None,
        session: SessionIdentity | None = None,
        upload_limits: Mapping[str, Any] | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> SandboxView:
        """Create a sandbox; nothing starts yet. With a `ttl_s` of None, 0 or less it never expires.
        A `session` whose last sandbox has expired gets its files, within the grace period; else
        that one is deleted. Each use of a session moves its expiry.

        Raise as `check_sizes` and `Runtime.decide`, BadRequest `validation_error` for no policy,
        NotFound for the workspace, CannotEnforce, Unavailable, Conflict `session_exists`.
        """
        _check_may_create(caller, session)
        if self._recording is not None:
            self._recording.check(runs=False)
        parts = {"narrower": narrower, "env": env}
        check_sizes(labels, [*parts.values(), upload_limits])
        now = self._clock.now()
        row = SandboxRow(
            id=f"sandbox-{secrets.token_hex(6)}",
            owner=caller.owner,
            policy_name=policy,
            request={name: dict(part) for name, part in parts.items() if part},
            workspace_id=workspace_id or "",
            created_at=now,
            expires_at=min(now + ttl_s, LATEST) if ttl_s is not None and ttl_s > 0 else None,
            upload_limits=dict(upload_limits) if upload_limits is not None else None,
            ttl_s=ttl_s if session else None,
            labels=labels,
            **(asdict(session) if session else {}),
        )
        expired = self.index.find(caller, row.session_id) if row.session_id else None
        with self.index.creating(row):
            return await run_to_completion(self._create(caller, row, expired))

    async def _create(
        self, caller: Caller, row: SandboxRow, expired: ServiceSandbox | None
    ) -> SandboxView:
        loaded, decided = await _decided(self._runtime, row)
        if expired is not None:
            if await expired.restore(row, loaded, decided):
                return await expired.view()
            if expired.expired:
                await self.end(expired, "expired")
        workspace = self._workspaces.for_sandbox(caller, row.workspace_id or None, row.id)
        is_new = not row.workspace_id
        row = replace(row, workspace_id=workspace.id)
        added = await self._store.write(partial(_add, row=row, workspace=workspace, is_new=is_new))
        if added is None:
            raise errors.NotFound(f"workspace {workspace.id} does not exist")
        if not added:
            raise _session_exists(row)
        self._workspaces.remember(workspace)
        sandbox = ServiceSandbox(self._dependencies, row, new=True)
        sandbox.set_policy(loaded, decided)
        self.index.add(sandbox)
        sandbox.announce("created", policy=row.policy_name)
        return await sandbox.view()

    async def get(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """Raise NotFound also for a sandbox that the caller may not see."""
        return await self.index.get(caller, sandbox_id).view()

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
        """Return a page by id. `all_owners` has an effect for operators only."""
        limit = max(1, min(limit, _LIST_MAX))
        matching = (
            sandbox
            for sandbox in self.index.visible(caller, cursor, all_owners=all_owners)
            if not (sessions_only and sandbox.row.session_id is None)
            and state in (None, sandbox.state)
        )
        matches = [*islice(matching, limit + 1)]
        views = [await sandbox.view() for sandbox in matches[:limit]]
        return Page(views, views[-1].id if len(matches) > limit else None)

    def using(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        scope: str,
        starts: bool = True,
        frees: bool = False,
        kept: bool = False,
        conversation: str | None = None,
    ) -> SandboxLease:
        """Return the lease for an `async with` around any use of the files or kernels. It puts off
        the idle time-out. `starts`: the use ends a stop on request. `frees`: the use only deletes,
        which is allowed on a full disk. `kept`: the use only reads. Both are allowed for an
        expired session within its grace period. Without a `conversation`, the caller of this
        method respects the bounds of a token.

        Raise NotFound, Conflict `sandbox_expired`, Unavailable `no_space` and `not_recording`, and
        the errors of opening. If the sandbox ends meanwhile, raise the same instead of Closed.
        """
        check = None
        new_work = scope == "files:write" or (scope == "execute" and starts)
        if self._recording is not None and new_work and not frees:
            check = partial(self._recording.check, runs=scope == "execute")
        return SandboxLease(
            self.index, caller, sandbox_id, scope, starts, conversation, check, kept or frees
        )

    async def keepalive(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """Put off the idle time-out, and start nothing. Raises Conflict `sandbox_expired`."""
        sandbox = self.index.get(caller, sandbox_id)
        sandbox.check(Act.USE)
        sandbox.touch()
        return await sandbox.view()

    async def resume(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """Start a kernel of `default`, or of the conversation that a session used last. Raise as
        `using`, and the errors of a start."""
        async with self.using(caller, sandbox_id, scope="execute") as use:
            sandbox = self.index.get(caller, use.id)
            name = caller.conversation_id or await _first_conversation(sandbox)
            if name is not None:
                await use.active.conversation(name).start()
            return await sandbox.view()

    async def extend(self, caller: Caller, sandbox_id: str, by_s: float) -> SandboxView:
        """Raise BadRequest, Conflict `sandbox_expired` and `sandbox_ttl_infinite`."""
        sandbox = self.index.get_whole(caller, sandbox_id, "admin")
        if not by_s > 0:
            raise _invalid_extension(by_s)
        await sandbox.extend(by_s)
        return await sandbox.view()

    async def stop(self, caller: Caller, sandbox_id: str) -> None:
        """End the kernels and runs, and keep the files; a second time does nothing."""
        sandbox = self.index.get_whole(caller, sandbox_id, "execute")
        for on_stop in self._on_stop:
            await on_stop(sandbox.id, None)
        await sandbox.stop()

    async def delete(self, caller: Caller, sandbox_id: str, *, cause: str = "requested") -> None:
        """End a sandbox, and delete its files and its content. Raise NotFound, also for one that
        was deleted before by a request."""
        scope = "execute" if cause == "expired" else "admin"
        if not caller.whole_sandbox or not caller.may(scope):
            raise unknown(sandbox_id)
        sandbox = self.index.find(caller, sandbox_id)
        if sandbox is not None:
            if not await run_to_completion(self.end(sandbox, cause)):
                raise unknown(sandbox_id)
        else:
            row = await row_of(self.index, self._store, caller, sandbox_id)
            if row.cause != "expired" or cause == "expired":
                raise unknown(sandbox_id)
            # Its expiry kept the chats and the history, and maybe the files.
            await run_to_completion(self.erasure.ended(row.id))

    async def end(self, sandbox: ServiceSandbox, cause: str) -> bool:
        """Delete a sandbox without a caller. Return False if it was deleted before."""
        workspace = sandbox.workspace
        for on_delete in self._on_delete:
            await on_delete(sandbox.id, None)
        slots = slots_of(self.erasure.forget_runs(sandbox.id, None))
        try:
            try:
                deleted = await sandbox.delete(cause, slots)
            except errors.Unavailable as error:
                if error.code != "no_space" or workspace.managed_by is None:
                    raise
                await sandbox.stop()  # its files make the room for the record of its end
                await self._garbage.remove_files(workspace)
                deleted = await sandbox.delete(cause, slots)
        finally:
            if sandbox.row.deleted_at is not None:  # even if the rest of its end failed
                self.index.remove(sandbox)
                if workspace.managed_by is not None:
                    self._workspaces.forget(workspace.id)
        if deleted and workspace.managed_by is not None:
            await self._garbage.remove(sandbox.row, workspace)
        if deleted:
            await self._store.fold()
        return deleted

    async def conversations(self, caller: Caller, sandbox_id: str) -> Sequence[ConversationView]:
        """Return the conversations within the caller's bounds, by name. Raise as `using`."""
        async with self.using(
            caller, sandbox_id, scope="files:read", starts=False, kept=True
        ) as use:
            sandbox = self.index.get(caller, use.id)
            return [
                await _conversation_view(use.active, row)
                for name, row in sorted((await sandbox.hooks.conversations()).items())
                if caller.sees(sandbox.row.user_id, sandbox.row.agent_id, name)
            ]

    async def conversation_names(self, caller: Caller, sandbox_id: str) -> Sequence[str]:
        """Return the conversations within the caller's bounds, the oldest first. Raise NotFound."""
        sandbox = self.index.get(caller, sandbox_id)
        entries = (await sandbox.hooks.conversations()).values()
        return [
            row.name
            for row in sorted(entries, key=lambda row: (row.created_at, row.name))
            if caller.sees(sandbox.row.user_id, sandbox.row.agent_id, row.name)
        ]

    async def delete_conversation(self, caller: Caller, sandbox_id: str, name: str) -> None:
        """Abort the runs in it, kill its kernels, and delete its files, history and chat, also in
        an expired session. Raise NotFound for a conversation that has neither files nor a chat, and
        for the sandbox, also without the scope `files:write` or `execute`."""
        sandbox = self.index.get(caller, sandbox_id, "files:write", conversation=name)
        if not caller.may("execute"):  # this ends runs
            raise unknown(sandbox_id)
        for on_delete in self._on_delete:
            await on_delete(sandbox.id, name)
        if not await run_to_completion(self.erasure.conversation(sandbox, name)):
            raise errors.NotFound(
                f"conversation {name[:80]!r} does not exist",
                details={"conversation_id": name[:400]},
            )


async def _decided(runtime: Runtime, row: SandboxRow) -> tuple[Policy, Policy]:
    narrower, env = row.request.get("narrower"), row.request.get("env")
    try:
        loaded, decided = await runtime.decide(row.policy_name, narrower=narrower, env=env)
    except errors.NotFound as error:
        raise errors.BadRequest(
            error.message, hint=error.hint, details={"field": "policy"}
        ) from error
    decide_walls(decided, runtime.capabilities)
    return loaded, decided


def _add(db: Any, row: SandboxRow, workspace: WorkspaceRow, *, is_new: bool) -> bool | None:
    """Add the rows of a new sandbox; None if its workspace was deleted, False if its session
    exists."""
    if is_new:
        workspaces_table.add_workspace(db, workspace)
    elif not workspaces_table.workspace_is_there(db, workspace.id):
        return None
    if not rows.add(db, row):
        workspaces_table.drop_workspace(db, workspace.id, row.id)
        return False
    events.add(db, row.id, row.created_at, "created", policy=row.policy_name)
    return True


async def _first_conversation(sandbox: ServiceSandbox) -> str | None:
    conversations = await sandbox.hooks.conversations()
    if sandbox.row.session_id is None or DEFAULT_CONVERSATION in conversations:
        return DEFAULT_CONVERSATION
    if not conversations:
        return None
    return max(conversations.values(), key=lambda row: row.created_at).name


async def _conversation_view(active: PersistentSandbox, row: ConversationRow) -> ConversationView:
    conversation = active.existing(row.name)
    status: Literal["idle", "ready", "busy"] = "idle"
    if conversation is not None and (conversation.busy or conversation.alive):
        status = "busy" if conversation.busy else "ready"
    files, size = await active.measured(row.directory)
    return ConversationView(row.name, row.created_at, status, files, size)


def _session_exists(row: SandboxRow) -> errors.Conflict:
    return errors.Conflict(f"the session {row.session_id} exists already", code="session_exists")


def _invalid_extension(by_s: float) -> errors.BadRequest:
    message = f"extend_by is a number of seconds above 0, not {by_s!r}"
    return errors.BadRequest(message, details={"field": "extend_by"})


def _check_may_create(caller: Caller, session: SessionIdentity | None) -> None:
    """Raise NotFound for a token, except for the session of its user and agent."""
    user, agent = (session.user_id, session.agent_id) if session else (None, None)
    if not caller.sees(user, agent) or not (caller.may("execute") or caller.may("files:write")):
        raise errors.NotFound("this token may not create a sandbox here")
