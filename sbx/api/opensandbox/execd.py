"""The execd plane: what OpenSandbox serves inside each sandbox, at the endpoint of port 44772."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from sbx.aio import kept_with
from sbx.api.auth import CallerDep, ServiceDep, StackDep
from sbx.api.ports import relay_http
from sbx.api.sdk_target import SdkTarget, labels_of
from sbx.api.surfaces import EGRESS_PORT, EXECD_PORT
from sbx.errors import Conflict, NotFound, Unavailable
from sbx.runtime.processes.commands import BackgroundCommand
from sbx.service.caller import Caller
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

SURFACE = "opensandbox"
PREFIX = f"/opensandbox/v1/sandboxes/{{sandbox_id}}/proxy/{EXECD_PORT}"
router = APIRouter(prefix=PREFIX, include_in_schema=False)
ports_router = APIRouter(
    prefix="/opensandbox/v1/sandboxes/{sandbox_id}/proxy", include_in_schema=False
)
egress_router = APIRouter(
    prefix=f"/opensandbox/v1/sandboxes/{{sandbox_id}}/proxy/{EGRESS_PORT}",
    include_in_schema=False,
)

_MIB = 1 << 20
# The SDK of the interpreter waits with this command until the server in its image listens.
INTERPRETER_PROBE = "/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}"
_INTERPRETER_PORT = (
    "exec python3 -I -S -c '"
    "import socket\n"
    'with socket.create_server(("127.0.0.1", 44771)) as port:\n'
    "    while True:\n"
    "        port.accept()[0].close()'"
)


class _InterpreterPort:
    command: BackgroundCommand | None = None


class ExecdTarget(SdkTarget):
    """The sandbox of one request."""

    async def open_interpreter_port(self) -> None:
        """Listen where the server of the interpreter's image listens. Nothing else of it is needed,
        whatever the image and its entrypoint are."""
        async with self.use() as conversation:
            port = kept_with(conversation, _InterpreterPort)
            if port.command is None or not (await port.command.status()).running:
                port.command = await conversation.commands.start(_INTERPRETER_PORT)


def find(
    service: Service, caller: Caller, sandbox_id: str, *, scope: str | None = None
) -> ServiceSandbox:
    """Return a sandbox of this surface that has not expired. Raise NotFound."""
    index = service.sandboxes.index
    if scope is None:
        sandbox = index.get(caller, sandbox_id)
    else:
        sandbox = index.get_whole(caller, sandbox_id, scope)
    if labels_of(sandbox).get("surface") != SURFACE or sandbox.expired:
        raise NotFound(
            f"sandbox {sandbox_id[:80]} does not exist", details={"sandbox_id": sandbox_id}
        )
    return sandbox


def check_running(sandbox: ServiceSandbox) -> None:
    """Raise Conflict for a paused sandbox."""
    if labels_of(sandbox).get("paused"):
        raise Conflict("the sandbox is paused", code="DOCKER::SANDBOX_NOT_RUNNING")


async def _target(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> ExecdTarget:
    """Raise as `find` and `check_running`."""
    sandbox = find(service, caller, sandbox_id)
    check_running(sandbox)
    return ExecdTarget(service, caller, sandbox)


TargetDep = Annotated[ExecdTarget, Depends(_target)]


@router.get("/ping")
async def ping(_target: TargetDep) -> Response:
    return Response()


@router.get("/metrics")
async def metrics(target: TargetDep) -> dict[str, Any]:
    """Return the CPU and the memory that the sandbox uses, of what its policy allows."""
    usage, cpus, used_pct = await target.measure()
    return {
        "cpu_count": cpus,
        "cpu_used_pct": used_pct,
        "mem_total_mib": usage.memory_max / _MIB,
        "mem_used_mib": (usage.memory or 0) / _MIB,
        "timestamp": int(usage.at * 1000),
    }


@egress_router.get("/policy")
async def egress_policy(target: TargetDep) -> dict[str, Any]:
    """Return the hosts that the policy of the sandbox allows."""
    network = (await target.sandbox.view()).policy.network
    hosts = network.allow if network.mode == "proxy" else ()
    rules = [{"action": "allow", "target": host} for host in hosts]
    return {
        "status": "ok",
        "mode": network.mode,
        "enforcementMode": "proxy",
        "policy": {"defaultAction": "deny", "egress": rules},
    }


@egress_router.api_route("/policy", methods=["PATCH", "DELETE"])
async def change_egress_policy(target: TargetDep) -> None:
    """Refuse: the walls of a sandbox never widen while it lives."""
    raise Unavailable(
        "the network policy of a sandbox does not change; create one with another policy",
        code="api_not_supported",
    )


@router.get("/v1/isolated/capabilities")
async def isolated_capabilities(target: TargetDep) -> dict[str, Any]:
    """Report that there are no isolated sessions: each sandbox is isolated already."""
    return {
        "available": False,
        "message": "each sandbox and each conversation of sbx has its own walls",
        "setpriv_available": False,
        "userns_available": False,
        "commit_supported": False,
        "diff_supported": False,
    }


@router.api_route("/v1/isolated/{rest:path}", methods=["GET", "POST", "DELETE"])
async def isolated(rest: str, target: TargetDep) -> None:
    raise Unavailable(
        "sbx does not offer isolated sessions; create a sandbox instead", code="api_not_supported"
    )


@ports_router.api_route(
    "/{port}/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
)
async def relay(
    port: int, path: str, request: Request, target: TargetDep, stack: StackDep
) -> Response:
    """Send the request to a server that code started inside."""
    conversation = await stack.enter_async_context(target.use(starts=False))
    return await relay_http(request, conversation, port, f"/{path}")
