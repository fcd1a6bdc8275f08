"""The sandbox of a request on the planes inside: envd, the code interpreter, and user servers.

The SDK names it in the header E2b-Sandbox-Id, and takes exactly the status 502 as the sign that the
sandbox does not run.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from sbx.api.auth import CallerDep, ServiceDep, StackDep
from sbx.api.e2b.paths import HOME
from sbx.api.ports import relay_http
from sbx.api.sdk_target import SdkTarget, labels_of
from sbx.api.signed_urls import SIGNED
from sbx.api.surfaces import E2B_SANDBOX, ENVD_PORT, e2b_id, id_of_e2b
from sbx.errors import NotFound, Unavailable
from sbx.service.caller import Caller
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

SURFACE = "e2b"
DEFAULT_TIMEOUT_S = 300.0
router = APIRouter(prefix="/e2b", include_in_schema=False)


class E2bTarget(SdkTarget):
    """The sandbox of one request."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables of each process, besides those of the sandbox."""
        return {
            "HOME": HOME,
            "USER": "user",
            "LOGNAME": "user",
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": e2b_id(self.sandbox.id),
            **self.labels.get("env", {}),
        }

    async def change(self, **labels: Any) -> None:
        await self.sandbox.set_labels({**self.labels, **labels})


def find(
    service: Service, caller: Caller, sandbox_id: str, *, scope: str | None = None
) -> ServiceSandbox:
    """Return a sandbox of this surface that has not expired, by the id of `e2b_id`. Raise
    NotFound."""
    own, index = id_of_e2b(sandbox_id), service.sandboxes.index
    try:
        whole = scope is not None
        sandbox = index.get_whole(caller, own, scope or "") if whole else index.get(caller, own)
    except NotFound:
        sandbox = None
    if sandbox is None or labels_of(sandbox).get("surface") != SURFACE or sandbox.expired:
        raise NotFound(f"sandbox {sandbox_id[:80]} does not exist", details={"sandbox_id": own})
    return sandbox


def is_paused(sandbox: ServiceSandbox, now: float) -> bool:
    """Return whether it was paused by a call, or by the end of its time."""
    labels = labels_of(sandbox)
    due = labels.get("auto_pause") and labels["end_at"] <= now
    return bool(labels.get("paused") or due)


async def set_end(sandbox: ServiceSandbox, after_s: float, now: float) -> None:
    """Let its time end then. One that pauses at the end has no expiry in the store."""
    labels = {**labels_of(sandbox), "paused": False, "end_at": now + after_s}
    await sandbox.set_labels(labels)
    await sandbox.set_expiry(None if labels.get("auto_pause") else after_s)


async def _target(request: Request, caller: CallerDep, service: ServiceDep) -> E2bTarget:
    """Raise Unavailable `sandbox_not_running` for an unknown, an expired and a paused sandbox."""
    sandbox_id = request.scope.get(SIGNED) or request.headers.get(E2B_SANDBOX, "")
    try:
        sandbox = find(service, caller, sandbox_id)
    except NotFound:
        raise _not_running(id_of_e2b(sandbox_id)) from None
    if is_paused(sandbox, service.clock.now()):
        if not labels_of(sandbox).get("auto_resume"):
            raise _not_running(sandbox.id)
        await set_end(sandbox, DEFAULT_TIMEOUT_S, service.clock.now())
    return E2bTarget(service, caller, sandbox)


def _not_running(sandbox_id: str) -> Unavailable:
    return Unavailable(
        "The sandbox was not found",  # the SDK looks for these words
        code="sandbox_not_running",
        details={"sandbox_id": sandbox_id},
    )


TargetDep = Annotated[E2bTarget, Depends(_target)]


@router.get(f"/{ENVD_PORT}/health", status_code=204)
async def health(target: TargetDep) -> None:
    """Report whether the sandbox runs."""


@router.api_route(
    "/ports/{port}/{path:path}",
    methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"],
)
async def relay(
    port: int, path: str, request: Request, target: TargetDep, stack: StackDep
) -> Response:
    """Send the request to a server that code started inside."""
    conversation = await stack.enter_async_context(target.use(starts=False))
    return await relay_http(request, conversation, port, f"/{path}")
