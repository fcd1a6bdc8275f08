"""`ensure_session`: find, create and await the one session of a user with an agent."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbx import errors
from sbx.client.http import HttpClient, target
from sbx.client.records import Session, session
from sbx.client.requests import without_none

_log = logging.getLogger(__name__)
_MAX_RETRIES, _RETRY_INTERVAL_S = 30, 0.5
_TRANSIENT = (errors.Unavailable, errors.Broken)  # a lost connection, and answers of 500 and above


class SessionCreateFailed(errors.Unavailable):
    """The service did not create or resume the session; the cause has the reason."""

    code = "session_create_failed"


class SessionNotReady(errors.Unavailable):
    """The session exists, but did not start in time."""

    code = "session_not_ready"


@dataclass(frozen=True, slots=True)
class Identity:
    """The user and the agent of a session."""

    user_id: str
    agent_id: str
    business_domain_id: str | None = None

    @property
    def session_id(self) -> str:
        return f"sb-session-{self.user_id}-{self.agent_id}"


async def ensure(
    wire: HttpClient,
    identity: Identity,
    *,
    config: Mapping[str, Any] | None,
    max_retries: int | None,
    retry_interval: float | None,
) -> Session:
    """Return the session; see `Client.ensure_session`."""
    name = identity.session_id
    tries = _number("SBX_SESSION_MAX_RETRIES", max_retries, _MAX_RETRIES)
    interval_s = _number("SBX_SESSION_RETRY_INTERVAL", retry_interval, _RETRY_INTERVAL_S)
    try:
        existing = await _get(wire, identity)
        action = _action(existing)
    except _TRANSIENT as error:
        _log.warning("session %s: could not be read, so it is created: %s", name, error.message)
        existing, action = None, "recover_from_error"
    if existing is not None and action == "reuse_existing":
        with _span(identity, action):
            _log.info("session %s: reused", name)
            return existing
    with _span(identity, action):
        _log.info("session %s: %s", name, action)
        current = await _create(wire, identity, config)
    for attempt in range(int(tries) + 1):
        if current.status == "running":
            _log.info("session %s: ready", name)
            return current
        if current.status == "error" or attempt == tries:
            break
        await asyncio.sleep(interval_s)
        _log.info("session %s: %s, attempt %d of %d", name, current.status, attempt + 1, tries)
        try:
            current = await _get(wire, identity) or current
        except _TRANSIENT as error:
            _log.warning("session %s: a poll failed, and is repeated: %s", name, error.message)
    _log.error("session %s: failed, its status is %s", name, current.status)
    raise _not_ready(identity, current)


def _number(setting: str, argument: float | None, default: float) -> float:
    """Return the argument, else the setting of the environment, else the default. Raise
    BadRequest unless it is 0 or more."""
    value = os.environ.get(setting, default) if argument is None else argument
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(value)) < float("inf"):
            return number
    raise errors.BadRequest(
        f"{setting} must be a number of 0 or more, not {str(value)[:80]!r}", code="invalid_setting"
    )


async def _get(wire: HttpClient, identity: Identity) -> Session | None:
    with _span(identity, "get"):
        try:
            reply = await wire.call("GET", target("api", "v1", "sessions", identity.session_id))
        except errors.NotFound:
            return None
        return session(reply.json())


async def _create(
    wire: HttpClient, identity: Identity, config: Mapping[str, Any] | None
) -> Session:
    fields = without_none(
        user_id=identity.user_id,
        agent_id=identity.agent_id,
        business_domain_id=identity.business_domain_id,
        config=None if config is None else dict(config),
    )
    body = json.dumps(fields).encode("ascii")
    try:
        # The service creates at most one session, so that this POST may be repeated.
        return session((await wire.call("POST", "/api/v1/sessions", body=body, again=True)).json())
    except (errors.BadRequest, errors.Denied):
        raise  # the call is wrong: a retry does not help
    except errors.SbxError as error:
        _log.error("session %s: could not be created: %s", identity.session_id, error.message)
        raise SessionCreateFailed(
            f"the session {identity.session_id} could not be created: {error.message}",
            hint=error.hint,
            details={"session_id": identity.session_id, "cause": error.code},
        ) from error


def _action(existing: Session | None) -> str:
    if existing is None:
        return "create_new"
    actions = {"running": "reuse_existing", "error": "recover_from_error"}
    return actions.get(existing.status, "recreate")


def _not_ready(identity: Identity, current: Session) -> SessionNotReady:
    return SessionNotReady(
        f"the session {identity.session_id} is {current.status}, not running",
        hint="try again, or look at the events of its sandbox",
        details={"session_id": identity.session_id, "info": dict(current.info)},
    )


@contextlib.contextmanager
def _span(identity: Identity, action: str) -> Iterator[None]:
    """Record a span if the program uses OpenTelemetry. Other programs need not import it."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield
        return
    attributes = {
        "session_id": identity.session_id,
        "user_id": identity.user_id,
        "agent_id": identity.agent_id,
        "action": action,
    }
    if identity.business_domain_id is not None:
        attributes["business_domain_id"] = identity.business_domain_id
    with trace.get_tracer("sbx.client").start_as_current_span(
        "sbx.ensure_session", attributes=attributes
    ):
        yield
