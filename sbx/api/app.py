"""The application: one `Service`, the routers over it, and the middleware around them."""

from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from sbx import __version__
from sbx.agent.settings import AgentSettings
from sbx.api import agent_v1, e2b, errors, opensandbox, sessions_v1, v1
from sbx.api.auth import OperatorDep, ServiceDep, sender
from sbx.api.console import (
    conversations,
    login,
    me,
    observe,
    pages,
    quarantine,
    stream,
    templates,
)
from sbx.api.console.listener import ConsoleListener, ConsoleMiddleware
from sbx.api.middleware import RequestLimitsMiddleware
from sbx.api.server.settings import ServiceSettings
from sbx.api.v1 import bay
from sbx.errors import Denied, SbxError
from sbx.service.limits import OwnerBytes
from sbx.service.service import Service
from sbx.telemetry.metrics import exposition

_CORS_HEADERS = (
    "authorization", "conversation_id", "subdir", "x-conversation-id", "idempotency-key",
    "last-event-id", "content-type",
)  # fmt: skip
_CORS_EXPOSED = ("content-disposition", "content-range", "etag", "retry-after", "x-request-id")
_CORS_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class Health(BaseModel):
    """`problems` are codes: `store_corrupt`, `no_space` and `not_recording`. With a problem, new
    work is refused. Without one, the field is absent."""

    status: str
    version: str
    problems: list[str] = []


class _Cors(CORSMiddleware):
    """Starlette's middleware, with an error body like all others."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code < 400 else _NotAllowed()


class _NotAllowed(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = Denied("this origin, method or header is not allowed", code="forbidden")
        await errors.error_response(error, scope["state"]["request_id"])(scope, receive, send)


# One span for each request, if the process has a provider (sbx/telemetry/spans.py). Metrics are
# those of sbx/telemetry/metrics.py, and records of errors would contain what users sent.
_TELEMETRY: TelemetryConfig = {
    "tracing": True,
    "operation_spans": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
    "exclude": lambda scope: scope["path"] in ("/health", "/metrics"),  # asked every few seconds
}


_PEEK = {
    "name": "peek",
    "in": "query",
    "description": "The request only observes: it does not count as a use of the sandbox.",
    "schema": {"type": "boolean", "default": False},
}


class _App(FastAPI):
    """FastAPI, with the security schemes in its document but without a dependency per call."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(errors.schemas())
            schemes = components.setdefault("securitySchemes", {})
            schemes["bearer"] = {
                "type": "http",
                "scheme": "bearer",
                "description": "A key or a token; not needed on the Unix socket",
            }
            document["security"] = [{"bearer": []}, {}]
            for path, operations in document["paths"].items():
                if path.startswith("/v1/sandboxes/{sandbox_id}") and "get" in operations:
                    operations["get"].setdefault("parameters", []).append(_PEEK)
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(
    service: Service,
    settings: ServiceSettings,
    agent_settings: AgentSettings | SbxError | None = None,
    console: ConsoleListener | None = None,
) -> FastAPI:
    """Return the app over `service`, which its caller starts and closes. `console`: the listeners
    for browsers.

    Without `agent_settings`, or with their error in place of them, everything except chats works.
    """
    origins = settings.cors_origins
    app = _App(
        title="sbx",
        version=__version__,
        description="Sandboxes for code that agents write.",
        docs_url=None,  # FastAPI's own pages load scripts of other hosts: see _mount_docs
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_TELEMETRY,
    )
    app.state.service = service
    app.state.settings = settings
    app.state.agent_settings = agent_settings
    app.state.cors_origins = frozenset(origins)
    app.state.console = console
    errors.install(app)
    mount(app)
    _mount_docs(app)
    if origins:
        app.add_middleware(
            _Cors,
            allow_origins=origins,
            allow_methods=_CORS_METHODS,
            allow_headers=_CORS_HEADERS,
            expose_headers=_CORS_EXPOSED,
            allow_credentials=True,
        )
    if console is not None:
        app.add_middleware(ConsoleMiddleware, listener=console)
    app.state.bodies = OwnerBytes(settings.bodies_per_owner)
    app.add_middleware(RequestLimitsMiddleware, authenticate=sender, bodies=app.state.bodies)
    return app


def mount(app: FastAPI) -> None:
    """Add all routes, those of runs and new sandboxes first: each route before the right one takes
    1 µs of a call. `include_router` is not used: FastAPI 0.165 takes 0.4 ms to find a route in
    nested routers."""
    frequent = (
        v1.runs.router,
        bay.runs.router,
        bay.sandboxes.router,
        sessions_v1.runs.router,
        e2b.code.router,
        opensandbox.code.router,
    )
    surfaces = (v1, bay, sessions_v1, agent_v1, opensandbox, e2b)
    console = (login, me, conversations, templates, quarantine, stream, pages)
    routers = [observe.router]  # its /projects/directories must precede /projects/{project_id}
    routers += [router for surface in surfaces for router in surface.routers]
    routers += [part.router for part in console]
    for router in sorted(routers, key=lambda router: router not in frequent):
        app.router.routes.extend(router.routes)

    @app.get(
        "/health",
        tags=["service"],
        responses=errors.documented(),
        response_model_exclude_defaults=True,
    )
    async def health(service: ServiceDep) -> Health:
        """Report whether the service answers and its processes are alive. No key is needed. A 503
        names the process that failed; the service ends then, so that systemd restarts it."""
        if (failure := service.failure) is not None:
            raise failure
        return Health(status="ok", version=app.version, problems=list(service.recording.problems))

    @app.get(
        "/metrics",
        tags=["service"],
        response_class=PlainTextResponse,
        responses=errors.documented(),
    )
    async def metrics(caller: OperatorDep) -> Response:
        """Return metrics for Prometheus, only to the operator."""
        content, media_type = exposition()
        return Response(content, media_type=media_type)


def _mount_docs(app: FastAPI) -> None:
    """Serve Swagger UI at /docs, with files of a package, so that it needs no network. All URLs are
    relative, as a reverse proxy may add a prefix. The page keeps no key after it is closed."""
    files = StaticFiles(packages=[("fastapi_swagger", "resources")])
    app.mount("/docs/files", files)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} {app.version}",
            swagger_js_url="docs/files/swagger-ui-bundle.js",
            swagger_css_url="docs/files/swagger-ui.css",
            swagger_favicon_url="docs/files/favicon-32x32.png",
        )
