"""The execd plane: what OpenSandbox serves inside each sandbox, at the endpoint of port 44772."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Depends, Request, Response

from sbx.api.auth import CallerDep, ServiceDep, StackDep
from sbx.api.ports import relay_http
from sbx.errors import Conflict, NotFound, Unavailable
from sbx.runtime.conversation import Conversation
from sbx.runtime.processes.commands import BackgroundCommand
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.service.caller import Caller
from sbx.service.run import RunHandle, RunRequest
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

SURFACE = "opensandbox"
EXECD_PORT = 44772
PREFIX = f"/opensandbox/v1/sandboxes/{{sandbox_id}}/proxy/{EXECD_PORT}"
router = APIRouter(prefix=PREFIX, include_in_schema=False)
ports_router = APIRouter(
    prefix="/opensandbox/v1/sandboxes/{sandbox_id}/proxy", include_in_schema=False
)
egress_router = APIRouter(
    prefix="/opensandbox/v1/sandboxes/{sandbox_id}/proxy/18080", include_in_schema=False
)

_MIB = 1 << 20
_CPU_SAMPLE_S = 0.1
# The entrypoint of their image opens this port, and the SDK of the interpreter waits for it.
_INTERPRETER = "code-interpreter"
_INTERPRETER_PORT = (
    "exec python3 -I -S -c '"
    "import socket\n"
    'with socket.create_server(("127.0.0.1", 44771)) as port:\n'
    "    while True:\n"
    "        port.accept()[0].close()'"
)
_ports: WeakKeyDictionary[Conversation, BackgroundCommand] = WeakKeyDictionary()


class ExecdTarget:
    """The sandbox of one request."""

    def __init__(self, service: Service, caller: Caller, sandbox: ServiceSandbox) -> None:
        self.service = service
        self.caller = caller
        self.sandbox = sandbox

    @property
    def labels(self) -> dict[str, Any]:
        return labels_of(self.sandbox)

    async def start(self, request: RunRequest) -> RunHandle:
        """Start a run. Without a time-out it has the longest that the policy allows."""
        if request.timeout_s is None:
            wall_time = (await self.sandbox.view()).policy.limits.wall_time
            request = replace(request, timeout_s=wall_time)
        return await self.service.runs.start(
            self.caller, self.sandbox.id, DEFAULT_CONVERSATION, request
        )

    @asynccontextmanager
    async def use(self, *, starts: bool = True) -> AsyncIterator[Conversation]:
        async with self.service.sandboxes.using(
            self.caller,
            self.sandbox.id,
            scope="execute",
            starts=starts,
            conversation=DEFAULT_CONVERSATION,
        ) as use:
            yield use.conversation()

    async def record(self, action: str, **details: Any) -> None:
        await self.service.recording.record(
            self.caller, action, self.sandbox.id, conversation=DEFAULT_CONVERSATION, **details
        )

    async def open_interpreter_port(self) -> None:
        """Do what the entrypoint of the interpreter's image does, unless it runs already."""
        if not any(_INTERPRETER in word for word in self.labels.get("entrypoint", ())):
            return
        async with self.use() as conversation:
            command = _ports.get(conversation)
            if command is None or not (await command.status()).running:
                _ports[conversation] = await conversation.commands.start(_INTERPRETER_PORT)


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


def labels_of(sandbox: ServiceSandbox) -> dict[str, Any]:
    return dict(sandbox.row.labels or {})


async def _target(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> ExecdTarget:
    """Raise as `find` and `check_running`."""
    sandbox = find(service, caller, sandbox_id)
    check_running(sandbox)
    return ExecdTarget(service, caller, sandbox)


TargetDep = Annotated[ExecdTarget, Depends(_target)]


@router.get("/ping")
async def ping(target: TargetDep) -> Response:
    await target.open_interpreter_port()
    return Response()


@router.get("/metrics")
async def metrics(target: TargetDep) -> dict[str, Any]:
    """Return the CPU and the memory that the sandbox uses, of what its policy allows."""
    async with target.use(starts=False) as conversation:
        before, began = await conversation.usage(), time.monotonic()
        await asyncio.sleep(_CPU_SAMPLE_S)
        usage, seconds = await conversation.usage(), time.monotonic() - began
    cpus = usage.cpu_quota or 1.0
    worked = max(0.0, (usage.cpu_s or 0.0) - (before.cpu_s or 0.0))
    return {
        "cpu_count": cpus,
        "cpu_used_pct": min(100.0, 100 * worked / seconds / cpus),
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
