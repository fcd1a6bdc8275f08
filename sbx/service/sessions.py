"""The rules of sessions: a session is the sandbox of one user with one agent, found by a fixed id.

    user_id + agent_id → session_id → the live sandbox of that id and owner → its stored pair agrees

Ids come from callers and are hostile; they are keys of the store, and never paths. Two pairs can
read the same once joined (`a-b` + `c`, `a` + `b-c`): the stored pair decides, and the second one is
refused, never served the first one's sandbox.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal
from weakref import WeakValueDictionary

from msgspec import Struct, structs

from sbx.errors import BadRequest, Conflict, Denied, NotFound, SbxError
from sbx.service.caller import Caller
from sbx.service.ids import check_id, session_id
from sbx.service.lifecycle import State
from sbx.service.models import SandboxView, SessionIdentity
from sbx.service.service import Service
from sbx.service.session_rules import FileRules, SessionRules, widened
from sbx.telemetry import spans

_log = logging.getLogger(__name__)


# -- status ---------------------------------------------------------------------------------------


class SessionStatus(StrEnum):
    PENDING = "pending"  # being made ready
    RUNNING = "running"  # accepts work
    STOPPED = "stopped"  # by request, and not used since
    ERROR = "error"


def status_of(view: SandboxView, *, warming: bool = False) -> SessionStatus:
    """`warming`: the zygote of its kernels is not ready yet."""
    match view.state:
        case State.FAILED | State.EXPIRED | State.DELETED:
            return SessionStatus.ERROR
        case State.STARTING:
            return SessionStatus.PENDING
        case State.IDLE if view.stopped:
            return SessionStatus.STOPPED
        case State.IDLE if warming:
            return SessionStatus.PENDING
    return SessionStatus.RUNNING


def reason_of(view: SandboxView) -> str | None:
    """Why a session's status is `error`."""
    match view.state:
        case State.FAILED:
            return f"failed: {(view.failure or {}).get('message', 'its kernel did not start')}"
        case State.EXPIRED:
            return "expired: its time to live is over"
    return None


# -- one sandbox for each session -----------------------------------------------------------------


class SessionAsk(Struct, frozen=True):
    """A checked request for a session. `policy` None: the operator's; `ttl_s` in seconds."""

    user_id: str
    agent_id: str
    business_domain_id: str | None = None
    session_id: str | None = None
    policy: str | None = None
    ttl_s: int | None = None
    env: Mapping[str, str] | None = None
    files: Mapping[str, Any] | None = None


class _Making(Struct, frozen=True):
    """A session that is still to be made."""

    identity: SessionIdentity
    policy: str
    ttl_s: int
    files: FileRules
    env: Mapping[str, str]


Ensured = Literal["created", "resumed", "found"]
_ACTIONS: Mapping[Ensured, str] = {
    "created": "session.create",
    "resumed": "session.resume",
    "found": "session.reuse",
}


class Sessions:
    """The sessions of a service. Safe under any concurrency: one pair has one session."""

    def __init__(self, service: Service, rules: SessionRules) -> None:
        self.rules = rules
        self._service = service
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._warming: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, caller: Caller, ask: SessionAsk) -> tuple[SandboxView, Ensured]:
        """Return the session of a pair, ready for use, and how it was obtained.

        Raise BadRequest, `limit_widened` too; Conflict for a pair whose id belongs to another pair;
        NotFound outside of a token's bounds.
        """
        key = session_id(check_id("user_id", ask.user_id), check_id("agent_id", ask.agent_id))
        if not caller.sees(ask.user_id, ask.agent_id) or not (
            caller.may("execute") or caller.may("files:write")
        ):
            raise unknown(key)
        if ask.session_id is not None and ask.session_id != key:
            raise BadRequest(
                f"the session of this user and agent has the id {key}",
                hint="leave session_id out, or give this one",
                details={"field": "config.session_id", "session_id": key},
            )
        with spans.span(
            "sbx.ensure",
            session_id=key,
            user_id=ask.user_id,
            agent_id=ask.agent_id,
            business_domain_id=ask.business_domain_id,
        ):
            view, action = await self._ensured(caller, ask, key)
            spans.annotate(action=action)
            await self._record(caller, view, action)
            return view, action

    async def _record(self, caller: Caller, view: SandboxView, action: "Ensured") -> None:
        """Write a line to the audit log and to the log, whichever route needs the session."""
        replaced = view.recreated_because if action == "created" else None
        policy = view.policy_name if action == "created" else None
        await self._service.recording.record_session(
            caller, _ACTIONS[action], view, policy=policy, replaced=replaced
        )
        _log.info(
            "%s %s in %s%s",
            _ACTIONS[action],
            view.session_id,
            view.id,
            f" (the last one: {replaced})" if replaced else "",
        )

    async def _ensured(
        self, caller: Caller, ask: SessionAsk, key: str
    ) -> tuple[SandboxView, Ensured]:
        decision = self._decided(caller, ask)
        async with self._turn(caller, key):
            view = await self._living(caller, key)
            if ask.policy is None and (view is None or view.state is State.EXPIRED):
                profile = await self._service.agent_profiles.find(caller.owner, ask.agent_id)
                if profile is not None and profile.profile.policy is not None:
                    decision = structs.replace(decision, policy=profile.profile.policy)
            if view is None:
                return await self._made(caller, decision), "created"
            if (view.user_id, view.agent_id) != (ask.user_id, ask.agent_id):
                raise Conflict(
                    f"the session {key} is that of another user and agent",
                    hint="choose ids that do not read the same once they are joined",
                    details={"session_id": key},
                )
            if view.state is State.EXPIRED:
                # No caller can use it: a caller with access to a session may replace it.
                identity = structs.replace(decision.identity, recreated_because="expired")
                again = structs.replace(decision, identity=identity)
                return await self._made(caller, again), "created"
            if view.stopped or view.state is State.FAILED:
                freely = replace(caller, scopes=None)
                return await self._service.sandboxes.resume(freely, view.id), "resumed"
            return view, "found"

    async def get(self, caller: Caller, key: str) -> SandboxView:
        """Return a session. Raise NotFound, also for a sandbox that is not a session."""
        try:
            view = await self._service.sandboxes.get(caller, key)
        except NotFound:  # it would name a sandbox
            raise unknown(key) from None
        if view.session_id != key:
            raise unknown(key)
        return view

    async def delete(self, caller: Caller, key: str) -> None:
        """End it, with every file. Raises NotFound, also for one that was deleted before."""
        if not key.startswith("sb-session-"):
            raise unknown(key)
        async with self._turn(caller, key):
            try:
                await self._service.sandboxes.delete(caller, key)
            except NotFound:
                raise unknown(key) from None

    async def log_out(self, caller: Caller) -> list[str]:
        """Let the sessions of a token's user expire now, or only that with its agent if it names
        one. Return their ids. Raise BadRequest for another caller, Denied `forbidden` for a token
        of one conversation or without the scope `execute`."""
        if caller.via != "token":
            raise BadRequest(
                "only a token has sessions that a logout could end",
                hint="end a session with DELETE /api/v1/sessions/{id}",
                details={"field": "end_session"},
            )
        if not caller.whole_sandbox or not caller.may("execute"):
            raise Denied("this token may not end a whole session", code="forbidden")
        sandboxes, ended = self._service.sandboxes, []
        for sandbox in list(sandboxes.index.visible(caller)):
            if (key := sandbox.row.session_id) is not None and not sandbox.expired:
                await sandboxes.stop(caller, sandbox.id)
                if await sandbox.expire_now():
                    ended.append(key)
        return ended

    def status(self, view: SandboxView) -> SessionStatus:
        task = self._warming.get(view.policy_name)
        return status_of(view, warming=task is not None and not task.done())

    def files(self, view: SandboxView) -> FileRules:
        """Return the limits for uploads to this session."""
        return FileRules.from_json(view.upload_limits) if view.upload_limits else self.rules.files

    async def _living(self, caller: Caller, key: str) -> SandboxView | None:
        try:
            return await self.get(caller, key)
        except NotFound:
            return None

    def _decided(self, caller: Caller, ask: SessionAsk) -> "_Making":
        """Decide about a new session; also call this, for its checks, if there is a session
        already."""
        policy = ask.policy or self.rules.policy
        if caller.via == "token" and policy != self.rules.policy:
            raise widened("policy", self.rules.policy, self.rules.policy)
        return _Making(
            identity=SessionIdentity(
                session_id=session_id(ask.user_id, ask.agent_id),
                user_id=ask.user_id,
                agent_id=ask.agent_id,
                business_domain_id=ask.business_domain_id,
            ),
            policy=policy,
            ttl_s=self.rules.ttl(ask.ttl_s),
            files=self.rules.files.narrowed(ask.files or {}),
            env=ask.env or {},
        )

    async def _made(self, caller: Caller, making: "_Making") -> SandboxView:
        view = await self._service.sandboxes.create(
            caller,
            policy=making.policy,
            env=dict(making.env) or None,
            ttl_s=float(making.ttl_s),
            session=making.identity,
            upload_limits=making.files.to_json(),
        )
        self._warm(making.policy)
        return view

    def _turn(self, caller: Caller, key: str) -> asyncio.Lock:
        return self._turns.setdefault((caller.owner, key), asyncio.Lock())

    def _warm(self, policy: str) -> None:
        """Start the zygote of the policy, once, in the background."""
        if policy not in self._warming:
            self._warming[policy] = asyncio.create_task(self._warmed(policy), context=Context())

    async def _warmed(self, policy: str) -> None:
        try:
            await self._service.runtime.warm(policy)
        except SbxError as error:
            # Then kernels start without it: later, and as well.
            _log.info("policy %s is not kept warm: %s", policy, error.message)


def unknown(key: str) -> NotFound:
    return NotFound(
        f"session {key[:200]} does not exist",
        hint="POST /api/v1/sessions creates the session of a user and an agent",
        details={"session_id": key},
    )
