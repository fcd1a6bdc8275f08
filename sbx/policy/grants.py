"""The access that a person granted to one conversation, beyond its policy.

    longest_duration   decides whether a policy permits a grant, and for how long; pure
    Grants             the grants of one conversation: added, used by its walls, ended

A grant is a narrow exception: one host and one port, one secret, one directory, the time of a run,
the memory of the sandbox, or one package. It is valid in its conversation only, and it is not
stored: the end of the sandbox ends it too.
"""

import asyncio
import builtins
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal

from msgspec import Struct

from sbx import errors
from sbx.policy import destinations
from sbx.policy.checks import is_within, plain_path
from sbx.policy.model import Policy
from sbx.policy.tables import GrantPolicy, LimitsPolicy
from sbx.policy.units import MIB
from sbx.protocol.grants import (
    ACCESS_KINDS,
    GRANT_DURATIONS,
    Access,
    AccessKind,
    Grant,
    GrantDuration,
)
from sbx.protocol.runs import Cause, Run
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
HOUR_S = 3600.0
GRANTS_MAX = 100
_APPLIED = ("directory", "memory", "package")  # the walls read the other kinds themselves
_MISSING = re.compile(r"No module named '([A-Za-z0-9_]{1,60})'")
_REFUSED_MAX = 3  # questions to a person after one call; code inside chooses the hosts
GrantChange = Literal["granted", "grant_ended"]


def longest_duration(policy: Policy, access: Access) -> GrantDuration | None:
    """Return the longest duration for which a person may grant this access; None if the policy does
    not permit it."""
    permitted = [grant.longest for grant in policy.grant if _permits(grant, access)]
    return max(permitted, key=GRANT_DURATIONS.index, default=None)


def is_allowed(policy: Policy, access: Access) -> bool:
    """Return whether the policy allows this access without a grant."""
    match access.kind:
        case "network":
            return _is_listed(access.target, policy.network.allow)
        case "secret":
            return access.target in policy.secrets and not any(
                access.target in grant.secret for grant in policy.grant
            )
        case "directory" | "package":
            return False
        case "run_time":
            return 0 < _number(access.target) <= policy.limits.wall_time
        case "memory":
            return 0 < _number(access.target) * MIB <= policy.limits.memory_max


def _permits(grant: GrantPolicy, access: Access) -> bool:
    match access.kind:
        case "network":
            return _is_listed(access.target, grant.network)
        case "secret":
            return access.target in grant.secret
        case "directory":
            return _is_plain(access.target) and is_within(access.target, grant.directory)
        case "run_time":
            return 0 < _number(access.target) <= (grant.run_time or 0)
        case "memory":
            return 0 < _number(access.target) * MIB <= (grant.memory or 0)
        case "package":
            return access.target in grant.package


def _is_listed(target: str, entries: Sequence[str]) -> bool:
    """Return whether an entry covers this host and port. A pattern or a host without a port is not
    narrow enough."""
    try:
        requested = destinations.parse(target)
    except ValueError:
        return False
    if requested.port is None or requested.host.startswith("*."):
        return False
    return any(destinations.parse(entry).covers(requested) for entry in entries)


def _is_plain(path: str) -> bool:
    try:
        return plain_path(path) == path
    except ValueError:
        return False


def _number(target: str) -> int:
    return int(target) if target.isascii() and target.isdecimal() and len(target) < 10 else 0


class _Active(Struct):
    """`until` in seconds of the monotonic clock. `run`: a grant for one run is for this one."""

    grant: Grant
    until: float | None
    ends: asyncio.TimerHandle | None = None
    run: object | None = None


class Grants:
    """The grants of one conversation. Call the methods from one event loop.

    `on_change`, and each of `listeners`, is called when a grant begins or ends, so that the proxy
    closes the connections of an ended one. `on_close` is awaited at the end of the conversation.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        hour_s: float = HOUR_S,
        on_change: Callable[[GrantChange, Grant], None] = lambda *_: None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        apply: Callable[[Access], Awaitable[str | None]] | None = None,
        undo: Callable[[Grant], Awaitable[None]] | None = None,
    ) -> None:
        """`apply` is called before a grant of a directory, memory or a package begins, and returns
        the path inside, if it has one; `undo` at its end."""
        self._policy = policy
        self._hour_s = hour_s
        self.listeners = [on_change]
        self._on_close = on_close
        self._apply = apply
        self._undo = undo
        self._undoing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._active: dict[str, _Active] = {}
        self._refused: dict[Access, None] = {}
        self._questioned: set[Access] = set()

    # -- for people -----------------------------------------------------------------------------

    @property
    def permitted(self) -> Sequence[GrantPolicy]:
        """The entries of the policy that permit grants."""
        return self._policy.grant

    @property
    def active(self) -> Sequence[Grant]:
        """The grants that are valid now, the oldest first."""
        now = time.monotonic()
        return tuple(
            each.grant for each in self._active.values() if each.until is None or each.until > now
        )

    def check(self, access: Access) -> GrantDuration:
        """Return the longest duration of a grant of this access. Raise Denied `not_grantable`."""
        longest = longest_duration(self._policy, access)
        if longest is None:
            raise errors.Denied(
                f"the policy {self._policy.name} does not permit a grant of {access}"[:400],
                code="not_grantable",
                hint="the operator permits grants in [[grant]] of the policy",
            )
        return longest

    def has(self, access: Access) -> bool:
        """Return whether the policy or a grant allows this access."""
        return is_allowed(self._policy, access) or any(
            grant.access == access for grant in self.active
        )

    async def list(self) -> "builtins.list[Grant]":
        """Return the grants that are valid now, the oldest first."""
        return builtins.list(self.active)

    async def add(
        self,
        kind: AccessKind,
        target: str,
        duration: GrantDuration = "once",
        *,
        by: str = "local",
    ) -> Grant:
        """Grant access that the policy permits to grant: `target` is `host:port`, the name of a
        secret, an absolute path of the host, the seconds of a run, the MiB of the sandbox,
        or the canonical name of a package. `once` is for the next run.

        Raise BadRequest for another kind or duration, Denied `not_grantable`, also for a duration
        that is too long, Conflict `too_many_grants`, and for a directory the errors of
        `LiveMounts.mount`.
        """
        if kind not in ACCESS_KINDS or duration not in GRANT_DURATIONS:
            kinds, durations = ", ".join(ACCESS_KINDS), ", ".join(GRANT_DURATIONS)
            raise errors.BadRequest(
                f"{kind!r:.80} for {duration!r:.80} cannot be granted",
                hint=f"the kinds are {kinds}, and the durations {durations}",
            )
        return await self.grant(Access(kind, str(target)), duration, by)

    async def revoke(self, grant_id: str) -> None:
        """End a grant now, and close its connections. Raise NotFound `no_such_grant`."""
        self.end(grant_id)
        await self._undone()

    async def grant(self, access: Access, duration: GrantDuration, by: str) -> Grant:
        """Grant this access. Raise Denied `not_grantable`, also for a duration that is too long,
        Conflict `too_many_grants`, Closed, Unavailable `memory_not_limited`, for a directory
        the errors of `LiveMounts.mount`, and for a package those of `install_missing`."""
        longest = self.check(access)
        if GRANT_DURATIONS.index(duration) > GRANT_DURATIONS.index(longest):
            raise errors.Denied(
                f"the policy {self._policy.name} permits {access} for {longest} at most",
                code="not_grantable",
                hint=f"grant it for {longest}",
                details={"longest": longest},
            )
        if len(self.active) >= GRANTS_MAX:
            raise errors.Conflict(
                f"a conversation has at most {GRANTS_MAX} grants", code="too_many_grants"
            )
        inside = None
        if access.kind in _APPLIED:
            if self._apply is None:
                raise errors.Denied(
                    f"this conversation cannot be granted {access}"[:400], code="not_grantable"
                )
            inside = await self._apply(access)
        lasts_s = None if duration == "conversation" else self._hour_s
        now = time.time()
        grant = Grant(
            f"grant-{secrets.token_hex(8)}",
            access.kind,
            access.target,
            duration,
            by,
            granted_at=now,
            expires_at=None if lasts_s is None else now + lasts_s,
            inside=inside,
        )
        if self._closed:
            if access.kind in _APPLIED and self._undo is not None:
                await self._undo(grant)
            raise errors.Closed("the conversation ended before the grant")
        self.begin(grant)
        return grant

    def begin(self, grant: Grant) -> None:
        """Let a grant be valid from now on."""
        active = _Active(grant, None)
        if grant.expires_at is not None:
            lasts_s = grant.expires_at - grant.granted_at
            active.until = time.monotonic() + lasts_s
            loop = asyncio.get_running_loop()
            end = self._end
            active.ends = background_context().run(loop.call_later, lasts_s, end, grant.id)
        self._active[grant.id] = active
        self._refused.pop(grant.access, None)
        self._questioned.discard(grant.access)
        self._changed("granted", grant)

    def keep(self, grant_ids: Collection[str]) -> None:
        """End all grants but these."""
        for grant_id in self._active.keys() - set(grant_ids):
            self._end(grant_id)

    def end(self, grant_id: str) -> None:
        """End a grant now. Raise NotFound `no_such_grant`."""
        if grant_id not in self._active:
            raise errors.NotFound(
                f"the grant {grant_id[:80]!r} does not exist, or has ended", code="no_such_grant"
            )
        self._end(grant_id)

    async def close(self) -> None:
        """End all grants, because their conversation ends."""
        self._closed = True
        for grant_id in list(self._active):
            self._end(grant_id)
        if self._on_close is not None:
            await self._on_close()
        await self._undone()

    async def _undone(self) -> None:
        """Wait until the directories of ended grants are hidden, and their memory is limited."""
        if self._undoing:
            await asyncio.wait(set(self._undoing))

    def take_refused(self) -> Sequence[Access]:
        """Return the access that was refused since the last call and may be granted. Each is
        returned once, until it is granted: code must not repeat a question that got a no."""
        refused, self._refused = tuple(self._refused), {}
        self._questioned.update(refused)
        return refused

    # -- for the walls --------------------------------------------------------------------------

    @property
    def hosts(self) -> Sequence[str]:
        return self._targets("network")

    @property
    def secrets(self) -> Sequence[str]:
        return self._targets("secret")

    @property
    def wall_time(self) -> float:
        """The longest time of a run that begins now, in seconds."""
        times = map(float, self._targets("run_time"))
        return max(times, default=self._policy.limits.wall_time)

    @property
    def limits(self) -> LimitsPolicy:
        """The limits of the policy, with the granted memory."""
        granted = self._targets("memory")
        limits = self._policy.limits
        if not granted:
            return limits
        most = max(limits.memory_max, *(int(target) * MIB for target in granted))
        return limits.model_copy(update={"memory_max": most})

    def note_end(self, run: Run) -> None:
        """Note what a run lacked: memory, of which twice as much may be enough, or a package."""
        if run.cause is Cause.MEMORY:
            self._note_memory()
        elif run.error is not None and run.error.name == "ModuleNotFoundError":
            missing = _MISSING.fullmatch(run.error.value)
            if missing is not None:  # most packages have the name of their module
                self.note_refused(Access("package", missing[1].lower().replace("_", "-")))

    def _note_memory(self) -> None:
        most = max((grant.memory or 0 for grant in self._policy.grant), default=0)
        now = self.limits.memory_max
        if now < most:
            self.note_refused(Access("memory", str(min(2 * now, most) // MIB)))

    def note_refused(self, access: Access) -> None:
        """Note an access that a wall refused."""
        if len(self._refused) >= _REFUSED_MAX or access in self._questioned:
            return
        if longest_duration(self._policy, access) is not None:
            self._refused[access] = None

    def run_began(self, run: object) -> None:
        """Let grants for one run be for this run, unless they are for an earlier one."""
        for active in self._active.values():
            if active.grant.duration == "once" and active.run is None:
                active.run = run

    def run_ended(self, run: object) -> None:
        """End the grants for this run."""
        for grant_id in [id for id, active in self._active.items() if active.run is run]:
            self._end(grant_id)

    def _undo_ended(self, undoing: "asyncio.Task[None]") -> None:
        self._undoing.discard(undoing)
        if not undoing.cancelled() and (error := undoing.exception()) is not None:
            _log.error("an ended grant still has its effect", exc_info=error)

    def _targets(self, kind: str) -> Sequence[str]:
        if not self._active:  # the usual case, for each request and each run
            return ()
        return [grant.access.target for grant in self.active if grant.access.kind == kind]

    def _end(self, grant_id: str) -> None:
        active = self._active.pop(grant_id)
        if active.ends is not None:
            active.ends.cancel()
        if active.grant.kind in _APPLIED and self._undo is not None:
            undoing = asyncio.ensure_future(self._undo(active.grant))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undo_ended)
        self._changed("grant_ended", active.grant)

    def _changed(self, change: GrantChange, grant: Grant) -> None:
        for listener in self.listeners:
            listener(change, grant)
