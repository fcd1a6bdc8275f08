"""The session and the conversation that a request names, and the rights of its caller."""

from typing import Annotated, Any

from fastapi import Depends, Request

from sbx.api.auth import CallerDep, ServiceDep
from sbx.errors import BadRequest, NotFound
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.ids import check_id
from sbx.service.models import SandboxView
from sbx.service.service import Service
from sbx.service.session_rules import FileRules, SessionRules
from sbx.service.sessions import Sessions, unknown

SUBDIR = "temparea"
_UNITS = (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10))
_HEADERS = ("conversation_id", "x-conversation-id")
_PARAMETERS: list[dict[str, Any]] = [
    {"name": "conversation_id", "in": "query", "schema": {"type": "string", "maxLength": 128}},
    {"name": "subdir", "in": "query", "schema": {"type": "string", "enum": [SUBDIR]}},
    {"name": "X-Conversation-Id", "in": "header", "schema": {"type": "string"}},
]
# For the OpenAPI document of routes that take them; see `conversation_of`.
NAMES_CONVERSATION: dict[str, Any] = {"parameters": _PARAMETERS}


def sessions(request: Request, service: ServiceDep) -> Sessions:
    """Return the sessions of the app, created at the first call."""
    state = request.app.state
    if not hasattr(state, "sessions"):
        state.sessions = Sessions(service, _rules(state.settings))
    sessions: Sessions = state.sessions
    return sessions


SessionsDep = Annotated[Sessions, Depends(sessions)]


async def session(session_id: str, caller: CallerDep, sessions: SessionsDep) -> SandboxView:
    """Return the session in the URL. Raise NotFound."""
    return await sessions.get(caller, session_id)


SessionDep = Annotated[SandboxView, Depends(session)]


def demand(caller: Caller, view: SandboxView, scope: str, conversation: str | None = None) -> None:
    """Raise NotFound beyond the bounds of a token. Without a `conversation`: for all of them."""
    within = (
        caller.whole_sandbox
        if conversation is None
        else caller.sees(view.user_id, view.agent_id, conversation)
    )
    if not within or not caller.may(scope):
        if conversation is None:
            raise unknown(view.session_id or view.id)
        raise no_conversation(conversation)


async def demand_existing(
    service: Service, caller: Caller, view: SandboxView, scope: str, conversation: str
) -> None:
    """Raise NotFound as `demand` does, and for a conversation that does not exist."""
    demand(caller, view, scope, conversation)
    if conversation not in await service.sandboxes.conversation_names(caller, view.id):
        raise no_conversation(conversation)


def conversation_of(request: Request) -> str | None:
    """Return the conversation in a header or the query, or None.

    Raise BadRequest for a bad id, for two that differ, and for another `subdir`.
    """
    subdirs = [*request.query_params.getlist("subdir"), *_header(request, "subdir")]
    for subdir in subdirs:
        check_subdir(subdir)
    named = [
        *request.query_params.getlist("conversation_id"),
        *(value for name in _HEADERS for value in _header(request, name)),
    ]
    return single_conversation(named)


def single_conversation(names: list[str]) -> str | None:
    """Return the only id among these, or None. Raise BadRequest for two."""
    if len(set(names)) > 1:
        raise BadRequest(
            "the request names two conversations", details={"field": "conversation_id"}
        )
    return check_id("conversation_id", names[0]) if names else None


def demanded_conversation(request: Request) -> str:
    """Return the conversation of `conversation_of`. Raise BadRequest `conversation_required`."""
    name = conversation_of(request)
    if name is None:
        raise conversation_required()
    return name


def check_subdir(subdir: str) -> None:
    """Raise BadRequest for all but SUBDIR."""
    if subdir != SUBDIR:
        raise BadRequest(
            f"subdir must be {SUBDIR}",
            hint="leave it out: uploads have one place",
            details={"field": "subdir", "available": [SUBDIR]},
        )


def conversation_required(*among: str) -> BadRequest:
    return BadRequest(
        "the conversation must be named",
        code="conversation_required",
        hint="send conversation_id as a query parameter or a header",
        details={"field": "conversation_id", **({"available": list(among)} if among else {})},
    )


def no_conversation(name: str) -> NotFound:
    return NotFound(f"conversation {name} does not exist", details={"conversation_id": name})


def _header(request: Request, name: str) -> list[str]:
    """Return the values of a header as UTF-8. Raise BadRequest."""
    try:
        return [value.encode("latin-1").decode("utf-8") for value in request.headers.getlist(name)]
    except UnicodeDecodeError:
        raise BadRequest(f"the header {name} is not UTF-8", details={"field": name}) from None


def _rules(settings: Settings) -> SessionRules:
    """Return the rules of the settings; a Settings without a service has none."""
    plain = SessionRules()
    size = getattr(settings, "sessions_upload_size", plain.files.max_bytes)
    unit, factor = next((unit for unit in _UNITS if size % unit[1] == 0), ("KB", 1 << 10))
    types = getattr(settings, "sessions_upload_types", plain.files.types)
    return SessionRules(
        policy=getattr(settings, "sessions_policy", plain.policy),
        ttl_s=getattr(settings, "sessions_ttl", plain.ttl_s),
        files=FileRules(
            size=max(1, size // factor),
            unit=unit,
            count=getattr(settings, "sessions_upload_count", plain.files.count),
            types=tuple(kind.lower().removeprefix(".") for kind in types),
        ),
    )
