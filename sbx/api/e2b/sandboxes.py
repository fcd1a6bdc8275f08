"""The control plane: create, connect, list, info, pause, time-out, metrics and kill.

The labels of such a sandbox:

    {"surface": "e2b", "template", "metadata": {name: text}, "network": {…}, "internet": bool,
     "auto_pause": bool, "auto_resume": bool, "paused": bool, "end_at": seconds of the epoch,
     "holders": [bounds of the callers that have a token], "env": the variables of commands only,
     "contexts": {id: {"language", "cwd"}}}
"""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import ForeignBody, body_of
from sbx.api.e2b.target import DEFAULT_TIMEOUT_S, SURFACE, E2bTarget, find, is_paused, set_end
from sbx.api.errors import iso
from sbx.api.sdk_target import labels_of
from sbx.api.signed_urls import HOLDERS_MAX, holder_of, token_of
from sbx.api.surfaces import e2b_id
from sbx.api.templates import deny_not_enforced, split_environment
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.policy.templates import policy_of
from sbx.service.caller import Caller
from sbx.service.sandbox import ServiceSandbox
from sbx.service.service import Service

router = APIRouter(prefix="/e2b", include_in_schema=False)

ENVD_VERSION = "0.6.13"  # of the protocol: the SDK offers each call from some version on
_PAGE_MAX = 100
_MIB = 1 << 20
_EVERYWHERE = "0.0.0.0/0"


class NetworkBody(ForeignBody):
    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    allowPublicTraffic: bool | None = None


class AutoResume(ForeignBody):
    enabled: bool = False


class NewE2bSandbox(ForeignBody):
    """Unknown fields are ignored, and named in the header `Sbx-Ignored`."""

    templateID: str = "base"
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    timeout: Annotated[float, Field(gt=0)] = DEFAULT_TIMEOUT_S
    autoPause: bool | None = None
    autoResume: AutoResume | None = None
    allow_internet_access: bool | None = None
    network: NetworkBody | None = None
    volumeMounts: list[Any] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    secure: bool | None = None


class Connection(ForeignBody):
    timeout: Annotated[float, Field(gt=0)] | None = None
    memory: bool | None = None


class NewTimeout(ForeignBody):
    timeout: float


@router.post("/v2/sandboxes", status_code=201)
@router.post("/sandboxes", status_code=201)
async def create(request: Request, caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    """Create a sandbox. Its kernel starts at the first use."""
    if not await request.body():
        raise BadRequest("the body is empty", hint='send {"templateID": "base"}')
    new = await body_of(request, NewE2bSandbox)
    if new.volumeMounts:
        raise _not_available("a volume; the operator mounts directories of the host")
    if new.mcp or new.iam:
        raise _not_available("a gateway for MCP, or identities of a cloud")
    policy = policy_of(request.app.state.settings.templates, new.templateID)
    network = new.network or NetworkBody()
    auto_pause = bool(new.autoPause)
    env, command_env = split_environment(new.envVars)
    labels = {
        "surface": SURFACE,
        "env": command_env,
        "template": new.templateID,
        "metadata": new.metadata or {},
        "network": network.model_dump(exclude_none=True),
        "internet": new.allow_internet_access is not False,
        "auto_pause": auto_pause,
        "auto_resume": bool(new.autoResume and new.autoResume.enabled),
        "paused": False,
        "end_at": service.clock.now() + new.timeout,
        "holders": [holder_of(caller)],
    }
    view = await service.sandboxes.create(
        caller,
        policy=policy,
        narrower=await _network(service, policy, new, network),
        env=env or None,
        ttl_s=None if auto_pause else new.timeout,
        labels=labels,
    )
    await service.recording.record(caller, "sandbox.create", view.id, surface=SURFACE)
    return await _opened(request, service, caller, find(service, caller, e2b_id(view.id)))


async def _network(
    service: Service, policy: str, new: NewE2bSandbox, network: NetworkBody
) -> dict[str, Any]:
    """Return the `narrower` for the requested network. It can only take hosts away.

    Raise BadRequest for a denied host that the policy would still reach.
    """
    loaded, _ = await service.runtime.decide(policy)
    closed = new.allow_internet_access is False or _EVERYWHERE in (network.denyOut or ())
    if loaded.network.mode == "none" or not closed:
        if loaded.network.mode != "none" and network.denyOut:
            raise deny_not_enforced(network.denyOut)
        return {}
    allowed = network.allowOut or []
    return {"network": {"allow": allowed} if allowed else {"mode": "none"}}


async def _body(request: Request, model: Any) -> Any:
    """Return the body, which may be missing."""
    return await body_of(request, model) if await request.body() else model()


async def _opened(
    request: Request, service: Service, caller: Caller, sandbox: ServiceSandbox
) -> dict[str, Any]:
    """Return a sandbox with the token for this caller, which opens the planes inside."""
    labels, holder = labels_of(sandbox), holder_of(caller)
    if holder not in labels["holders"]:
        holders = [*labels["holders"], holder][-HOLDERS_MAX:]
        await sandbox.set_labels({**labels, "holders": holders})
    token = await token_of(service, sandbox.row.owner, holder, sandbox.id)
    _, colon, port = request.headers.get("host", "").rpartition(":")
    return {
        "templateID": labels["template"],
        "sandboxID": e2b_id(sandbox.id),
        "clientID": "sbx",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": token,
        "trafficAccessToken": token,
        "domain": f"localhost:{port}" if colon and port.isdecimal() else "localhost",
        "alias": None,
    }


@router.post("/v2/sandboxes/{sandbox_id}/connect")
@router.post("/sandboxes/{sandbox_id}/connect")
@router.post("/sandboxes/{sandbox_id}/resume")
async def connect(
    sandbox_id: str, request: Request, response: Response, caller: CallerDep, service: ServiceDep
) -> dict[str, Any]:
    """Return a sandbox, and let it live on for a time. Resume a paused one."""
    new = await _body(request, Connection)
    if new.memory is False:
        raise BadRequest("a sandbox is always resumed with its memory", code="validation_error")
    sandbox, now = find(service, caller, sandbox_id, scope="execute"), service.clock.now()
    after_s = new.timeout or DEFAULT_TIMEOUT_S
    if is_paused(sandbox, now):
        response.status_code = 201
        await set_end(sandbox, after_s, now)
        await service.recording.record(caller, "sandbox.resume", sandbox.id)
    elif new.timeout is not None and now + after_s > labels_of(sandbox)["end_at"]:
        await set_end(sandbox, after_s, now)
    return await _opened(request, service, caller, sandbox)


@router.get("/v2/sandboxes")
@router.get("/sandboxes")
async def list_(
    response: Response,
    caller: CallerDep,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1)] = _PAGE_MAX,
    nextToken: str | None = None,
    state: str = "running,paused",
    order: str = "desc",
    metadata: str | None = None,
    template: str | None = None,
    startedAfter: datetime | None = None,
) -> list[dict[str, Any]]:
    """List the caller's sandboxes of this surface, the newest first."""
    states, pairs = set(state.split(",")), dict(_metadata(metadata or ""))
    if startedAfter is not None and startedAfter.tzinfo is None:
        startedAfter = startedAfter.replace(tzinfo=UTC)
    since = None if startedAfter is None else startedAfter.timestamp()
    newest_first = order != "asc"
    shown = []
    for sandbox in sorted(
        service.sandboxes.index.visible(caller), key=_place, reverse=newest_first
    ):
        labels = labels_of(sandbox)
        if labels.get("surface") != SURFACE or sandbox.expired:
            continue
        body = await _shown(service, sandbox)
        if (
            body["state"] in states
            and pairs.items() <= labels["metadata"].items()
            and (template is None or template == labels["template"])
            and (since is None or sandbox.row.created_at >= since)
        ):
            shown.append((sandbox, body))
    if nextToken is not None:
        after = _parse_token(nextToken)
        shown = [
            each
            for each in shown
            if (_place(each[0]) < after if newest_first else _place(each[0]) > after)
        ]
    page = shown[: min(limit, _PAGE_MAX)]
    if len(shown) > len(page):
        created_at, last = _place(page[-1][0])
        response.headers["x-next-token"] = f"{created_at!r}_{last}"
    return [body for _, body in page]


def _place(sandbox: ServiceSandbox) -> tuple[float, str]:
    return sandbox.row.created_at, sandbox.id


def _parse_token(text: str) -> tuple[float, str]:
    created_at, _, sandbox_id = text.partition("_")
    try:
        return float(created_at), sandbox_id
    except ValueError:
        raise BadRequest("nextToken is not one of this service") from None


def _metadata(text: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a query `metadata`, which the SDK escapes once more than needed."""
    for name, value in parse_qsl(text, keep_blank_values=True):
        yield unquote(name), unquote(value)


@router.get("/sandboxes/{sandbox_id}")
async def info(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    sandbox = find(service, caller, sandbox_id)
    labels = labels_of(sandbox)
    body = await _shown(service, sandbox)
    body["lifecycle"] = {
        "autoResume": labels["auto_resume"],
        "onTimeout": "pause" if labels["auto_pause"] else "kill",
    }
    body["allowInternetAccess"] = labels["internet"]
    if labels["network"]:
        body["network"] = labels["network"]
    return body


async def _shown(service: Service, sandbox: ServiceSandbox) -> dict[str, Any]:
    """Return a sandbox without the optional keys that it does not have: null breaks the SDK."""
    labels, view = labels_of(sandbox), await sandbox.view()
    limits = view.policy.limits
    end = labels["end_at"] if view.expires_at is None else view.expires_at
    return {
        "templateID": labels["template"],
        "sandboxID": e2b_id(view.id),
        "clientID": "sbx",
        "startedAt": iso(view.created_at),
        "endAt": iso(end),
        "envdVersion": ENVD_VERSION,
        "cpuCount": max(1, math.ceil(limits.cpu_quota)),
        "memoryMB": int(limits.memory_max // _MIB),
        "diskSizeMB": int(limits.workspace_max // _MIB),
        "state": "paused" if is_paused(sandbox, service.clock.now()) else "running",
        "metadata": labels["metadata"],
    }


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def kill(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Delete a sandbox and its files."""
    sandbox = find(service, caller, sandbox_id)
    await service.sandboxes.delete(caller, sandbox.id)
    await service.recording.record(caller, "sandbox.delete", sandbox.id)


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
async def set_timeout(
    sandbox_id: str, request: Request, caller: CallerDep, service: ServiceDep
) -> None:
    """Set the time until the end, also to a shorter one."""
    after_s = (await _body(request, NewTimeout)).timeout
    sandbox = find(service, caller, sandbox_id, scope="admin")
    if is_paused(sandbox, service.clock.now()):
        raise NotFound("the sandbox is paused", details={"sandbox_id": sandbox.id})
    await set_end(sandbox, max(0.0, after_s), service.clock.now())
    await service.recording.record(caller, "sandbox.extend", sandbox.id, by_s=after_s)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
async def pause(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Refuse calls until `connect`. Files, variables and processes stay; processes continue."""
    sandbox = find(service, caller, sandbox_id, scope="execute")
    if is_paused(sandbox, service.clock.now()):
        raise Conflict("the sandbox is paused already", code="sandbox_paused")
    await sandbox.set_labels({**labels_of(sandbox), "paused": True})
    await sandbox.set_expiry(None)
    await service.recording.record(caller, "sandbox.pause", sandbox.id)


@router.get("/sandboxes/{sandbox_id}/metrics")
async def metrics(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> list[dict[str, Any]]:
    """Return the present usage, as the only sample."""
    sandbox = find(service, caller, sandbox_id, scope="execute")
    if is_paused(sandbox, service.clock.now()):
        return []
    usage, cpus, used_pct = await E2bTarget(service, caller, sandbox).measure()
    return [
        {
            "timestamp": iso(usage.at),
            "timestampUnix": int(usage.at),
            "cpuCount": max(1, math.ceil(cpus)),
            "cpuUsedPct": used_pct,
            "memUsed": usage.memory or 0,
            "memTotal": usage.memory_max,
            "memCache": 0,
            "diskUsed": usage.disk or 0,
            "diskTotal": usage.disk_max,
        }
    ]


@router.put("/sandboxes/{sandbox_id}/network")
async def change_network(sandbox_id: str, _caller: CallerDep) -> None:
    raise _not_available("a change of the network of a sandbox; create one with another policy")


@router.post("/sandboxes/{sandbox_id}/{action}")
async def other_action(sandbox_id: str, action: str, _caller: CallerDep) -> None:
    raise _not_available(f"the call {action[:40]} of a sandbox")


@router.api_route("/{kind}{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
async def others(kind: str, rest: str, _caller: CallerDep) -> None:
    raise _not_available(f"the call {kind[:40]}{rest[:80]} of E2B")


def _not_available(what: str) -> Unavailable:
    return Unavailable(f"sbx does not offer {what}", code="api_not_supported")
