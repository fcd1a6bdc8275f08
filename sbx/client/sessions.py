"""`ensure_session`: one user with one agent has one session; find it, make it, wait for it."""

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


class SessionCreateFailed(errors.Unavailable):
    """The service would not make or wake the session; the cause says why."""

    code = "session_create_failed"


class SessionNotReady(errors.Unavailable):
    """It was made, and did not come up in time."""

    code = "session_not_ready"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose session it is."""

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
    """See `Client.ensure_session`."""
    found = await _found(wire, identity)
    if found is not None and found.status == "running":
        with _span(identity, "reuse_existing"):
            return found
    with _span(identity, _action(found)):
        made = await _made(wire, identity, config)
    for attempt in range(max_retries + 1):
        if made.status == "running":
            return made
        if made.status == "error":
            raise _not_ready(identity, made)
        if attempt < max_retries:
            await asyncio.sleep(retry_interval)
            made = await _found(wire, identity) or made
    raise _not_ready(identity, made)


async def _found(wire: HttpClient, identity: Identity) -> Session | None:
    with _span(identity, "get"):
        try:
            reply = await wire.call("GET", target("api", "v1", "sessions", identity.session_id))
        except errors.NotFound:
            return None
        return session(reply.json())


async def _made(wire: HttpClient, identity: Identity, config: Mapping[str, Any] | None) -> Session:
    asked: dict[str, Any] = {"user_id": identity.user_id, "agent_id": identity.agent_id}
    if identity.business_domain_id is not None:
        asked["business_domain_id"] = identity.business_domain_id
    if config is not None:
        asked["config"] = dict(config)
    body = json.dumps(asked).encode("ascii")
    try:
        # One session whatever happens: this POST may be repeated.
        return session((await wire.call("POST", "/api/v1/sessions", body=body, again=True)).json())
    except (errors.BadRequest, errors.Denied):
        raise  # the call is wrong, and to ask again would not help
    except errors.SbxError as error:
        raise SessionCreateFailed(
            f"the session {identity.session_id} could not be made: {error.message}",
            hint=error.hint,
            details={"session_id": identity.session_id, "cause": error.code},
        ) from error


def _action(found: Session | None) -> str:
    if found is None:
        return "create_new"
    return "recover_from_error" if found.status == "error" else "recreate"


def _not_ready(identity: Identity, made: Session) -> SessionNotReady:
    return SessionNotReady(
        f"the session {identity.session_id} is {made.status}, not running",
        hint="ask again, or look at the events of its sandbox",
        details={"session_id": identity.session_id, "info": dict(made.info)},
    )


@contextlib.contextmanager
def _span(identity: Identity, action: str) -> Iterator[None]:
    """A span, where the program has OpenTelemetry; importing it would cost those that have not."""
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
