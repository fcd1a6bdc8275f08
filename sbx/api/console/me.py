"""The caller of a request: its rights, its defaults, and the service that it talks to."""

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from sbx.agent.settings import AgentSettings
from sbx.api.agent_v1 import agents_of
from sbx.api.auth import CallerDep, ServiceDep, browser_login
from sbx.api.errors import documented, error_body
from sbx.api.server.settings import ServiceSettings
from sbx.api.sessions_v1.dependencies import sessions
from sbx.console import build
from sbx.errors import Denied, SbxError
from sbx.service.caller import Caller
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/me", tags=["console"])
AGENT = "console"


class ServiceInfo(BaseModel):
    """`build` is that of the console's page; `started_at` in seconds of the epoch."""

    version: str
    build: str
    instance_id: str
    started_at: float


class Refusal(BaseModel):
    """Why the caller cannot do something here."""

    code: str
    message: str
    hint: str | None = None


class Can(BaseModel):
    """True, or the reason why not."""

    chat: Literal[True] | Refusal
    projects: Literal[True] | Refusal
    host_mode: Literal[True] | Refusal
    sandboxes: Literal[True] | Refusal
    admin: Literal[True] | Refusal


class Defaults(BaseModel):
    """The values for a new conversation. `model` is null without one."""

    user_id: str
    agent_id: str
    policy: str
    model: str | None
    max_steps: int


class Uploads(BaseModel):
    max_file_size: int
    max_file_size_unit: str
    max_file_count: int
    allowed_file_types: list[str]


class Me(BaseModel):
    """`expires_at` is the end of the login, in seconds of the epoch; null for a key or a peer."""

    owner: str
    via: Literal["peer", "key", "token", "console"]
    operator: bool
    user_id: str | None
    agent_id: str | None
    conversation_id: str | None
    scopes: list[str] | None
    expires_at: float | None
    service: ServiceInfo
    can: Can
    defaults: Defaults
    project_dirs: list[str]
    uploads: Uploads
    limits: dict[str, int]


@router.get("", responses=documented())
async def me(request: Request, caller: CallerDep, service: ServiceDep) -> Me:
    """Return the caller, its rights here, and the reasons against the others."""
    login = await browser_login(request)
    expires_at = login.row.expires_at if login is not None else None
    return await described(request, service, caller, expires_at)


async def described(
    request: Request, service: Service, caller: Caller, expires_at: float | None
) -> Me:
    settings: ServiceSettings = request.app.state.settings
    model = _model(request)
    chosen = model if isinstance(model, AgentSettings) else AgentSettings()
    rules = sessions(request, service).rules
    return Me(
        owner=caller.owner,
        via=caller.via,
        operator=caller.operator,
        user_id=caller.user_id,
        agent_id=caller.agent_id,
        conversation_id=caller.conversation_id,
        scopes=sorted(caller.scopes) if caller.scopes is not None else None,
        expires_at=expires_at,
        service=ServiceInfo(
            version=request.app.version,
            build=build(),
            instance_id=service.instance_id,
            started_at=service.started_at,
        ),
        can=Can(
            chat=_reason(model if isinstance(model, SbxError) else _no_scope(caller)),
            projects=_reason(_no_projects(service, caller, settings, sandboxed=True)),
            host_mode=_reason(_no_projects(service, caller, settings, sandboxed=False)),
            sandboxes=_reason(_bounded(caller)),
            admin=_reason(None if caller.operator else _not_operator()),
        ),
        defaults=Defaults(
            user_id=caller.user_id or caller.owner.replace("/", "-")[:64],
            agent_id=caller.agent_id or AGENT,
            policy=settings.sessions_policy,
            model=chosen.model_name,
            max_steps=chosen.max_steps,
        ),
        project_dirs=[] if caller.via == "token" else [str(each) for each in settings.project_dirs],
        uploads=Uploads(**rules.files.to_json()),
        limits={
            "sandboxes": settings.sandboxes_per_owner,
            "kernels": settings.kernels_per_owner,
            "uploads": settings.uploads_per_owner,
            "downloads": settings.downloads_per_owner,
            "followers": settings.followers_per_owner,
        },
    )


def _model(request: Request) -> AgentSettings | SbxError:
    try:
        return agents_of(request.app).models.settings
    except SbxError as error:
        return error


def _reason(error: SbxError | None) -> Literal[True] | Refusal:
    if error is None:
        return True
    body: dict[str, Any] = error_body(error, None)["error"]
    return Refusal(code=body["code"], message=body["message"], hint=body.get("hint"))


def _no_scope(caller: Caller) -> SbxError | None:
    return None if caller.may("execute") else Denied("this token runs no code", code="forbidden")


def _bounded(caller: Caller) -> SbxError | None:
    if caller.via != "token":
        return None
    return Denied("a token has only the session of its user and agent", code="forbidden")


def _no_projects(
    service: Service, caller: Caller, settings: ServiceSettings, *, sandboxed: bool
) -> SbxError | None:
    if caller.via == "token":
        return Denied("a token has no projects", code="forbidden")
    if not settings.project_dirs:
        return Denied(
            "this service has no directories for projects",
            code="no_project_dirs",
            hint="the operator names them with --project-dir",
        )
    return service.projects.refusal(sandboxed)


def _not_operator() -> SbxError:
    return Denied("this is for the operator of the service", code="forbidden")
