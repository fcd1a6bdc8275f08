"""Values that describe sandboxes, workspaces and conversations; the API turns them into replies."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from sbx.policy import Policy
from sbx.service.lifecycle import State


class SessionIdentity(Struct, frozen=True):
    """The owner of a session. Its id is unique among the live sandboxes of an owner."""

    session_id: str
    user_id: str
    agent_id: str
    business_domain_id: str | None = None
    recreated_because: str | None = None


class SandboxView(Struct, frozen=True):
    """A sandbox at one moment. Times are seconds of the epoch. `policy_name` is the requested
    policy, and `policy` the result with the request; `stopped`: by request, and not used since;
    `failure`: the error of the last start, as `SbxError.to_dict`; `ttl_s`, `restored`
    and `labels`: see `SandboxRow`."""

    id: str
    owner: str
    state: State
    policy_name: str
    policy: Policy
    workspace_id: str
    created_at: float
    expires_at: float | None
    idle_expires_at: float | None
    stopped: bool = False
    failure: dict[str, Any] | None = None
    session_id: str | None = None
    user_id: str | None = None
    agent_id: str | None = None
    business_domain_id: str | None = None
    recreated_because: str | None = None
    upload_limits: dict[str, Any] | None = None
    narrower: dict[str, Any] | None = None
    env: dict[str, str] | None = None
    ttl_s: float | None = None
    restored: bool = False
    labels: Mapping[str, Any] | None = None


class ConversationView(Struct, frozen=True):
    """`status` is `idle`, `ready` or `busy`. `files` and `bytes`: what its workspace holds, of what
    could be counted in a moment."""

    name: str
    created_at: float
    status: Literal["idle", "ready", "busy"]
    files: int
    bytes: int


class WorkspaceView(Struct, frozen=True):
    """A workspace with a separate id. `managed_by`: the sandbox with which it is deleted."""

    id: str
    owner: str
    managed_by: str | None
    size_limit_mb: int | None
    created_at: float
    last_accessed_at: float


class TaskReport(Struct, frozen=True):
    """The report of one task of a collection."""

    task_name: str
    cleaned_count: int = 0
    skipped_count: int = 0
    errors: tuple[str, ...] = ()
