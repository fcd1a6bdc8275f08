"""`ensure_session`: find, create and await the one session of a user with an agent."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbx import errors
from sbx.client.http import HttpClient, target
from sbx.client.records import Session, session
from sbx.client.requests import without_none


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
    max_retries: int,
    retry_interval: float,
) -> Session:
    """Return the session; see `Client.ensure_session`."""
    existing = await _get(wire, identity)
    if existing is not None and existing.status == "running":
        with _span(identity, "reuse_existing"):
            return existing
    with _span(identity, _action(existing)):
        current = await _create(wire, identity, config)
    for attempt in range(max_retries + 1):
        if current.status == "running":
            return current
        if current.status == "error":
            raise _not_ready(identity, current)
        if attempt < max_retries:
            await asyncio.sleep(retry_interval)
            current = await _get(wire, identity) or current
    raise _not_ready(identity, current)


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
        raise SessionCreateFailed(
            f"the session {identity.session_id} could not be created: {error.message}",
            hint=error.hint,
            details={"session_id": identity.session_id, "cause": error.code},
        ) from error


def _action(existing: Session | None) -> str:
    if existing is None:
        return "create_new"
    return "recover_from_error" if existing.status == "error" else "recreate"


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
