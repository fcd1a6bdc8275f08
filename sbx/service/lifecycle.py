"""The states of a sandbox, and every transition between them, in one table.

    idle ──start──► starting ──ready──► ready            expire: from all of them to `expired`
     ▲  ◄──stop─────────┤ ◄─────stop──────┘              delete: from every state to `deleted`
     └──────stop──── failed ◄──fail── starting

The live kernels decide about idle, starting and ready; no stored value does: see `state_of`. The
table alone decides which acts are allowed, and to which state they lead.
"""

from collections.abc import Mapping
from enum import StrEnum

from sbx.errors import Conflict, NotFound, SbxError


class State(StrEnum):
    IDLE = "idle"  # no kernel
    STARTING = "starting"  # the first one is on its way
    READY = "ready"
    FAILED = "failed"  # the last start failed
    EXPIRED = "expired"
    DELETED = "deleted"

    @classmethod
    def named(cls, name: str | None) -> "State | None":
        """Return the state of this name; None without one."""
        return cls(name) if name in set(cls) else None


class Act(StrEnum):
    USE = "use"  # of files: needs no kernel, and starts none
    KEEP = "keep"  # reads or deletes files, also those that an expired session keeps
    START = "start"  # a first run, or a resume; with a kernel there, one of another conversation
    READY = "ready"  # the kernel has started
    FAIL = "fail"  # it could not be started
    STOP = "stop"  # by request, by an idle time-out, for memory; or the last kernel died
    EXTEND = "extend"
    EXPIRE = "expire"
    DELETE = "delete"
    RESTART = "restart"  # another runtime opened the sandboxes of a killed one


_ALIVE: Mapping[Act, State] = {
    Act.STOP: State.IDLE,
    Act.EXPIRE: State.EXPIRED,
    Act.DELETE: State.DELETED,
    Act.RESTART: State.IDLE,
}

TABLE: Mapping[State, Mapping[Act, State]] = {
    State.IDLE: {
        **_ALIVE,
        Act.USE: State.IDLE,
        Act.KEEP: State.IDLE,
        Act.START: State.STARTING,
        Act.EXTEND: State.IDLE,
    },
    State.STARTING: {
        **_ALIVE,
        Act.USE: State.STARTING,
        Act.KEEP: State.STARTING,
        Act.START: State.STARTING,  # a second call waits for the first one's kernel
        Act.READY: State.READY,
        Act.FAIL: State.FAILED,
        Act.EXTEND: State.STARTING,
    },
    State.READY: {
        **_ALIVE,
        Act.USE: State.READY,
        Act.KEEP: State.READY,
        Act.START: State.READY,
        Act.READY: State.READY,
        Act.FAIL: State.READY,  # of another conversation's kernel
        Act.EXTEND: State.READY,
    },
    State.FAILED: {
        **_ALIVE,
        Act.USE: State.FAILED,
        Act.KEEP: State.FAILED,
        Act.START: State.STARTING,
        Act.EXTEND: State.FAILED,
    },
    State.EXPIRED: {
        Act.KEEP: State.EXPIRED,  # within the grace period: see ExpiringSandbox.check
        Act.STOP: State.EXPIRED,  # nothing is left to be stopped
        Act.EXPIRE: State.EXPIRED,
        Act.DELETE: State.DELETED,
        Act.RESTART: State.EXPIRED,
    },
    State.DELETED: {
        Act.STOP: State.DELETED,
        Act.EXPIRE: State.DELETED,
        Act.DELETE: State.DELETED,  # again: nothing
        Act.RESTART: State.DELETED,
    },
}


def state_of(
    *,
    deleted: bool = False,
    expired: bool = False,
    kernels: int = 0,
    starts: int = 0,
    failed: bool = False,
) -> State:
    """Return the state for these facts; the first that is true counts. `kernels` live, `starts` are
    in progress, `failed` is the last start."""
    if deleted:
        return State.DELETED
    if expired:
        return State.EXPIRED
    if kernels:
        return State.READY
    if starts:
        return State.STARTING
    return State.FAILED if failed else State.IDLE


def after(state: State, act: Act) -> State | None:
    """Where the act leads; None where it is refused."""
    return TABLE[state].get(act)


def refusal(sandbox_id: str, state: State, expires_at: float | None = None) -> SbxError:
    if state is State.EXPIRED:
        return Conflict(
            f"the sandbox {sandbox_id} has expired",
            code="sandbox_expired",
            hint="make a new one; extend_ttl before the end keeps one alive",
            details={"sandbox_id": sandbox_id, "expires_at": expires_at},
        )
    return NotFound(f"sandbox {sandbox_id} does not exist")
