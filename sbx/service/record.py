"""The record of one sandbox that was not deleted: its row, its policy, its state and its events."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sbx import errors
from sbx.aio import Clock
from sbx.event_log import ChangeSignal
from sbx.kernels.channel import FrameBudgets
from sbx.policy import Policy
from sbx.policy.grants import GrantChange
from sbx.protocol.grants import Grant
from sbx.protocol.mounts import Mount
from sbx.runtime.files.open_files import OpenFilesLimit
from sbx.runtime.honeytokens import CODE as HONEYTOKEN
from sbx.runtime.honeytokens import TokenTriggered, refusal
from sbx.runtime.live_mounts import LiveMounts, not_mounted
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service import lifecycle
from sbx.service.egress_log import EgressLog
from sbx.service.ids import LABELS_MAX, check_text
from sbx.service.lifecycle import Act, State
from sbx.service.models import SandboxView
from sbx.service.notices import Notice, Notices
from sbx.store import Store, events
from sbx.store import sandboxes as rows
from sbx.store.sandboxes import SandboxRow
from sbx.store.workspaces import WorkspaceRow
from sbx.telemetry.audit import Audit
from sbx.telemetry.host_paths import without_host_paths
from sbx.workspace import allowed_paths

LATEST = 253_402_300_799.0  # the last second of the year 9999
_MIB = 1 << 20
_OF_PAUSE = ("paused", "end_at", "holders")


class ServiceDependencies(Struct, frozen=True):
    """The parts of a service that every sandbox uses.

    `make_room` ends idle kernels until a kernel of this owner may start. `workspaces`, by id, are
    those that were not deleted.
    """

    store: Store
    clock: Clock
    runtime: Runtime
    settings: Settings
    make_room: Callable[[str], Awaitable[None]]
    workspaces: dict[str, WorkspaceRow]
    open_limit: OpenFilesLimit
    frame_budgets: FrameBudgets
    notices: Notices
    audit: Audit | None = None


class SandboxRecord:
    """Changes of the row are written to the store; the copy in memory is the current one."""

    def __init__(self, dependencies: ServiceDependencies, row: SandboxRow) -> None:
        self.id = row.id
        self.row = row
        self.dependencies = dependencies
        self.starts = 0  # kernels that are being started
        self.egress_log = EgressLog(
            row.id, row.owner, dependencies.audit, self.emit, dependencies.clock.now
        )
        self._workspace = dependencies.workspaces[row.workspace_id]
        self._policies: tuple[Policy, Policy] | None = None
        self._mounts: LiveMounts | None = None
        self.changes = ChangeSignal()  # of its events in the store

    @property
    def now(self) -> float:
        return self.dependencies.clock.now()

    @property
    def workspace(self) -> WorkspaceRow:
        """Return the workspace, which other sandboxes may share; a deleted one as it was."""
        return self.dependencies.workspaces.get(self.row.workspace_id, self._workspace)

    def change_workspace(self, **changes: Any) -> None:
        self._workspace = replace(self.workspace, **changes)
        if self.row.workspace_id in self.dependencies.workspaces:
            self.dependencies.workspaces[self.row.workspace_id] = self._workspace

    # -- state ----------------------------------------------------------------------------------

    @property
    def expired(self) -> bool:
        end = self.row.expires_at
        return end is not None and end <= self.now

    def state_with(self, kernels: int) -> State:
        return lifecycle.state_of(
            deleted=self.row.deleted_at is not None,
            expired=self.expired,
            kernels=kernels,
            starts=self.starts,
            failed=self.row.failure is not None,
        )

    def check(self, act: Act) -> None:
        """Raise Conflict `sandbox_expired` or NotFound if the state refuses this act.

        Only the states `expired` and `deleted` refuse one. They do not depend on live kernels.
        """
        if self.row.deleted_at is None and not self.expired:
            return
        state = self.state_with(kernels=0)
        if lifecycle.after(state, act) is None:
            raise lifecycle.refusal(self.id, state, self.row.expires_at)

    def set_stopped(self, *, stopped: bool, failure: Mapping[str, Any] | None) -> None:
        if self.frozen:
            failure = self.row.failure  # only `end_freeze` ends that
        self._set_stopped(stopped, failure)

    def _set_stopped(self, stopped: bool, failure: Mapping[str, Any] | None) -> None:
        self.row = replace(
            self.row, stopped=stopped, failure=dict(failure) if failure is not None else None
        )
        self.dependencies.store.write_later(
            partial(rows.set_stopped, sandbox_id=self.id, stopped=stopped, failure=failure)
        )

    def begin_use(self) -> None:
        """End a stop on request, which counts until the next use."""
        if self.row.stopped:
            self.set_stopped(stopped=False, failure=self.row.failure)

    def set_failed(self, error: errors.SbxError) -> None:
        shown = without_host_paths(error)
        self.set_stopped(stopped=False, failure=shown)
        self.emit("failed", error.code, message=shown["message"])

    @property
    def frozen(self) -> bool:
        """Whether a honeytoken was used: no kernel starts until an operator unfreezes it."""
        return self.row.failure is not None and self.row.failure.get("code") == HONEYTOKEN

    def check_frozen(self) -> None:
        """Raise Conflict if a honeytoken was used."""
        if self.frozen:
            assert self.row.failure is not None
            details = self.row.failure.get("details", {})
            raise refusal(details.get("token", ""), details.get("where", ""))

    def freeze(self, sprung: TokenTriggered) -> None:
        """Record the use of a honeytoken at once, while the kernels are being killed."""
        details = {"token": sprung.token, "where": sprung.where}
        self.set_stopped(stopped=False, failure=refusal(**details).to_dict())
        self.emit("honeytoken", **details)
        if self.dependencies.audit is not None:
            owner = self.row.owner
            self.dependencies.audit.note("sbx", "honeytoken", self.id, owner=owner, **details)

    def note_grant(self, conversation: str, change: GrantChange, grant: Grant) -> None:
        """Record the begin or the end of a grant in the events and the audit log."""
        self.emit(change, conversation=conversation, grant=grant.to_json())
        if (audit := self.dependencies.audit) is not None:
            who = {"owner": self.row.owner, "conversation": conversation}
            audit_grant(audit, self.id, who, change, grant)

    def end_freeze(self) -> bool:
        """Let kernels start again; False if it was not frozen."""
        if not self.frozen:
            return False
        self._set_stopped(stopped=False, failure=None)
        self.emit("unfrozen")
        return True

    async def set_labels(self, labels: Mapping[str, Any]) -> None:
        """Replace the labels, in memory at once. The caller has checked that it is not deleted.
        Raise TooLarge `metadata_too_large` if they grow beyond the limit."""
        check_text("labels", _of_caller(labels), LABELS_MAX, before=_of_caller(self.row.labels))
        self.row = replace(self.row, labels=labels)
        await self.dependencies.store.write(
            partial(rows.set_labels, sandbox_id=self.id, labels=labels)
        )

    # -- policy and view ------------------------------------------------------------------------

    async def policy(self) -> tuple[Policy, Policy]:
        """Return the loaded policy, and the policy as the request and the size limit of the
        workspace narrow it. Neither changes later. Raises as `Runtime.decide`."""
        if self._policies is None:
            request = self.row.request
            loaded, decided = await self.dependencies.runtime.decide(
                self.row.policy_name, narrower=request.get("narrower"), env=request.get("env")
            )
            self.set_policy(loaded, decided)
        assert self._policies is not None
        return self._policies

    @property
    def policy_name(self) -> str:
        """Return the name of the policy; before it is loaded, the name of the request for it."""
        return self._policies[0].name if self._policies is not None else self.row.policy_name

    def set_policy(self, loaded: Policy, decided: Policy) -> None:
        self._policies = loaded, _within_workspace(decided, self.workspace)

    async def view_with(self, state: State, idle_expires_at: float | None) -> SandboxView:
        """Return the view; a policy that cannot be loaded any longer is shown as a failure."""
        failure = self.row.failure
        try:
            _, policy = await self.policy()
        except errors.SbxError as error:
            policy = Policy.model_validate({"name": self.row.policy_name})
            state = State.FAILED if state is State.IDLE else state
            failure = without_host_paths(error)
        row = self.row
        return SandboxView(
            id=row.id,
            owner=row.owner,
            state=state,
            policy_name=row.policy_name,
            policy=policy,
            workspace_id=row.workspace_id,
            created_at=row.created_at,
            expires_at=row.expires_at,
            idle_expires_at=None if state is State.EXPIRED else idle_expires_at,
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
            ttl_s=row.ttl_s,
            restored=row.restored,
            labels=row.labels,
        )

    # -- mounts and events ----------------------------------------------------------------------

    @property
    def mounted(self) -> tuple[Mount, ...]:
        return self._mounts.there if self._mounts is not None else ()

    async def mount(
        self, source: str, target: str | None = None, *, read_only: bool = True
    ) -> Mount:
        """Mount a directory of the host below the setting `mount_dirs`, for operators, until
        `unmount` or the end of this process. Start nothing; later kernels get the mount too.

        Raise Conflict `sandbox_expired`, Denied `not_granted`, and as `LiveMounts.mount`.
        """
        self.check(Act.USE)
        mounts = await self.live_mounts()
        mount = await mounts.mount(source, target, read_only=read_only)
        self.emit("mounted", target=mount.target, read_only=mount.read_only)
        return mount

    async def unmount(self, target: str) -> None:
        """Unmount a directory, for operators. Raise NotFound `not_mounted`."""
        if self._mounts is None:
            raise not_mounted(target)
        await self._mounts.unmount(target)
        self.emit("unmounted", target=target)

    async def live_mounts(self) -> LiveMounts:
        """Return the mounts. They stay when the sandbox is closed, until this process ends."""
        _, policy = await self.policy()
        if self._mounts is None:
            runtime = self.dependencies.runtime
            own = runtime.own_paths
            self._mounts = LiveMounts(
                policy.shared,
                guarded=policy.host_executables != "allow",
                possible=runtime.capabilities.own_namespaces,
                check=lambda directory, read_only: allowed_paths.check(
                    directory, own, read_only=read_only, guarded=False
                ),
                sources=runtime.mount_sources,
            )
        return self._mounts

    def emit(self, kind: str, cause: str | None = None, **details: Any) -> None:
        """Record an event, and wake its followers."""
        at = self.now
        self.dependencies.store.write_later(
            lambda db: events.add(db, self.id, at, kind, cause, **details)
        )
        self.announce(kind, cause, **details)

    def announce(self, kind: str, cause: str | None = None, **details: Any) -> None:
        """Wake the followers of a recorded event."""
        self.changes.notify()
        row = self.row
        body = {
            "type": "sandbox",
            "sandbox_id": self.id,
            "at": self.now,
            "kind": kind,
            "cause": cause,
            "details": details,
        }
        bounds = row.user_id, row.agent_id, details.get("conversation")
        notice = Notice(row.owner, body, (), *bounds)
        self.dependencies.notices.publish(notice)


def _within_workspace(policy: Policy, workspace: WorkspaceRow) -> Policy:
    """Narrow the policy by the size limit of a workspace, which applies to each of its
    conversations."""
    if workspace.size_limit_mb is None:
        return policy
    limit = min(policy.limits.workspace_max, workspace.size_limit_mb * _MIB)
    limits = policy.limits.model_copy(update={"workspace_max": limit})
    return policy.model_copy(update={"limits": limits})


def _of_caller(labels: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the labels without those of a pause, which is possible also with too many."""
    return {name: value for name, value in (labels or {}).items() if name not in _OF_PAUSE}


def audit_grant(
    audit: Audit, object: str, details: Mapping[str, str], change: GrantChange, grant: Grant
) -> None:
    """Note the begin or the end of a grant in the audit log."""
    event = "grant.added" if change == "granted" else "grant.ended"
    audit.note(grant.by, event, object, **details, grant=grant.to_json())
