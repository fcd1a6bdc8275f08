"""The lifecycle plane: create, list, renew, pause, resume and delete sandboxes; their endpoints.

The labels of such a sandbox:

    {"surface": "opensandbox", "image", "entrypoint", "metadata": {name: text}, "paused": bool,
     "env": the variables of commands only, "contexts": {id: language}}
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import ForeignBody, body_of
from sbx.api.errors import iso
from sbx.api.opensandbox.execd import SURFACE, check_running, find
from sbx.api.sdk_target import labels_of
from sbx.api.surfaces import LINK_HEADER, PLANE_PORTS
from sbx.api.templates import deny_not_enforced, limits_within, split_environment
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.policy.templates import policy_of
from sbx.service.lifecycle import State
from sbx.service.models import SandboxView
from sbx.service.service import Service

router = APIRouter(prefix=f"/{SURFACE}/v1", include_in_schema=False)

_PAGE_MAX = 200
_Texts = dict[str, str]


class ImageBody(ForeignBody):
    uri: str
    auth: dict[str, Any] | None = None


class NewOpenSandbox(ForeignBody):
    """Fields that a local sandbox does not have (platform, extensions, …) are ignored, and named in
    the header `Sbx-Ignored`."""

    image: ImageBody | None = None
    snapshotId: str | None = None
    templateId: str | None = None
    entrypoint: list[str] = Field(default_factory=list)
    timeout: Annotated[float, Field(gt=0)] | None = None
    resourceLimits: dict[str, str] = Field(default_factory=dict)
    env: _Texts | None = None
    metadata: _Texts | None = None
    networkPolicy: dict[str, Any] | None = None
    extensions: dict[str, Any] | None = None
    volumes: list[dict[str, Any]] | None = None


class Renewal(ForeignBody):
    expiresAt: datetime


@router.post("/sandboxes", status_code=202)
async def create(request: Request, caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    """Create a sandbox. Its kernel starts at the first use."""
    new = await body_of(request, NewOpenSandbox)
    if new.snapshotId is not None:
        raise _not_available("a sandbox from a snapshot")
    if new.volumes:
        raise _not_available("a volume; the operator mounts directories of the host")
    image = new.templateId or (new.image.uri if new.image is not None else "")
    try:
        policy = policy_of(request.app.state.settings.templates, image)
    except NotFound as error:  # the SDK reads the code of a 400 only
        raise BadRequest(error.message, code=error.code, hint=error.hint) from None
    narrower = await limits_within(
        service,
        policy,
        cpus=new.resourceLimits.get("cpu"),
        memory=new.resourceLimits.get("memory"),
    )
    narrower |= await _network(service, policy, new.networkPolicy)
    env, command_env = split_environment(new.env)
    labels = {
        "surface": SURFACE,
        "env": command_env,
        "image": image,
        "entrypoint": new.entrypoint,
        "metadata": new.metadata or {},
    }
    view = await service.sandboxes.create(
        caller,
        policy=policy,
        narrower=narrower,
        env=env or None,
        ttl_s=new.timeout,
        labels=labels,
    )
    await service.recording.record(caller, "sandbox.create", view.id, surface=SURFACE)
    return shown(view)


async def _network(
    service: Service, policy: str, network: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the `narrower` for a requested network policy. It can only take hosts away, and an
    empty one takes all.

    Raise BadRequest for a rule that denies a host which the policy would still reach.
    """
    if network is None:
        return {}
    loaded, _ = await service.runtime.decide(policy)
    rules = [rule if isinstance(rule, Mapping) else {} for rule in network.get("egress") or ()]
    allowed = [str(rule.get("target")) for rule in rules if rule.get("action") == "allow"]
    denied = [str(rule.get("target")) for rule in rules if rule.get("action") != "allow"]
    if loaded.network.mode == "none":
        return {}
    is_open = network.get("defaultAction") == "allow"
    if denied and (is_open or allowed):
        raise deny_not_enforced(denied)
    return {} if is_open else {"network": {"allow": allowed}}


@router.get("/sandboxes")
async def list_(
    caller: CallerDep,
    service: ServiceDep,
    state: Annotated[list[str] | None, Query()] = None,
    metadata: str | None = None,
    page: Annotated[int, Query(ge=0)] = 1,
    pageSize: Annotated[int, Query(ge=1)] = 20,
) -> dict[str, Any]:
    """List the caller's sandboxes of this surface, the newest first."""
    states = {each.lower() for each in state or ()}
    wanted_labels = dict(parse_qsl(metadata or "", keep_blank_values=True))
    every = [
        shown(await sandbox.view())
        for sandbox in service.sandboxes.index.visible(caller)
        if labels_of(sandbox).get("surface") == SURFACE
    ]
    matching = [
        each
        for each in sorted(every, key=lambda each: each["createdAt"], reverse=True)
        if (not states or each["status"]["state"].lower() in states)
        and wanted_labels.items() <= each.get("metadata", {}).items()
    ]
    page, size = max(1, page), min(pageSize, _PAGE_MAX)
    pages = -(-len(matching) // size)
    return {
        "items": matching[(page - 1) * size : page * size],
        "pagination": {
            "page": page,
            "pageSize": size,
            "totalItems": len(matching),
            "totalPages": pages,
            "hasNextPage": page < pages,
        },
    }


@router.get("/sandboxes/{sandbox_id}")
async def get(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    return shown(await find(service, caller, sandbox_id).view())


@router.patch("/sandboxes/{sandbox_id}/metadata")
async def patch_metadata(
    sandbox_id: str, request: Request, caller: CallerDep, service: ServiceDep
) -> dict[str, Any]:
    """Set the metadata with a text, and remove those with null."""
    changes = await request.json()
    if not isinstance(changes, dict) or not all(
        value is None or isinstance(value, str) for value in changes.values()
    ):
        raise BadRequest("metadata are texts, or null to remove one", code="invalid_metadata")
    sandbox = find(service, caller, sandbox_id, scope="admin")
    metadata = {**labels_of(sandbox).get("metadata", {}), **changes}
    kept = {name: value for name, value in metadata.items() if value is not None}
    await sandbox.set_labels({**labels_of(sandbox), "metadata": kept})
    return shown(await sandbox.view())


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def delete(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Delete a sandbox and its files."""
    sandbox = find(service, caller, sandbox_id)
    await service.sandboxes.delete(caller, sandbox.id)
    await service.recording.record(caller, "sandbox.delete", sandbox.id)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=202)
async def pause(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    """Refuse calls until `resume`. Files, variables and processes stay; processes continue."""
    sandbox = find(service, caller, sandbox_id, scope="execute")
    check_running(sandbox)
    await sandbox.set_labels({**labels_of(sandbox), "paused": True})
    await service.recording.record(caller, "sandbox.pause", sandbox.id)
    return shown(await sandbox.view())


@router.post("/sandboxes/{sandbox_id}/resume", status_code=202)
async def resume(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    sandbox = find(service, caller, sandbox_id, scope="execute")
    if not labels_of(sandbox).get("paused"):
        raise Conflict("the sandbox is not paused", code="DOCKER::SANDBOX_NOT_PAUSED")
    await sandbox.set_labels({**labels_of(sandbox), "paused": False})
    await service.recording.record(caller, "sandbox.resume", sandbox.id)
    return shown(await sandbox.view())


@router.post("/sandboxes/{sandbox_id}/renew-expiration")
async def renew(
    sandbox_id: str, request: Request, caller: CallerDep, service: ServiceDep
) -> dict[str, Any]:
    """Set the time of the expiry, also to an earlier one."""
    end = (await body_of(request, Renewal)).expiresAt
    end = end if end.tzinfo is not None else end.replace(tzinfo=UTC)
    sandbox = find(service, caller, sandbox_id, scope="admin")
    after_s = end.timestamp() - service.clock.now()
    if after_s <= 0:
        raise BadRequest("the time is over already", code="DOCKER::INVALID_EXPIRATION")
    if sandbox.row.expires_at is None:
        raise Conflict("the sandbox never expires", code="sandbox_ttl_infinite")
    await sandbox.set_expiry(after_s)
    await service.recording.record(caller, "sandbox.extend", sandbox.id, by_s=after_s)
    assert sandbox.row.expires_at is not None
    return {"expiresAt": iso(sandbox.row.expires_at)}


@router.get("/sandboxes/{sandbox_id}/endpoints/{port}")
async def endpoint(
    sandbox_id: str,
    port: int,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    expires: int | None = None,
) -> dict[str, Any]:
    """Return the address of a port inside, on this service, and the headers that open it."""
    if not 1 <= port <= 65_535:
        raise BadRequest("a port is 1 to 65535")
    sandbox = find(service, caller, sandbox_id)
    link = await service.links.make(
        caller,
        sandbox.id,
        port=None if port in PLANE_PORTS else port,
        expires_at=expires,
    )
    host = request.headers.get("host", "localhost")
    return {
        "endpoint": f"{host}/{SURFACE}/v1/sandboxes/{sandbox.id}/proxy/{port}",
        "headers": {LINK_HEADER: link},
    }


@router.post("/metrics/events", status_code=204)
async def telemetry(_caller: CallerDep) -> None:
    """Ignore what the SDK reports about itself after a creation."""


@router.api_route("/snapshots{rest:path}", methods=["GET", "POST", "DELETE"])
async def snapshots(rest: str, _caller: CallerDep) -> Response:
    raise _not_available("a snapshot")


@router.api_route("/templates{rest:path}", methods=["GET", "POST", "DELETE"])
async def templates(rest: str, _caller: CallerDep) -> Response:
    raise _not_available("a template; the operator maps images to policies")


@router.api_route("/sandboxes/{sandbox_id}/snapshots{rest:path}", methods=["GET", "POST", "DELETE"])
async def sandbox_snapshots(sandbox_id: str, rest: str, _caller: CallerDep) -> Response:
    raise _not_available("a snapshot")


@router.get("/sandboxes/{sandbox_id}/diagnostics/{kind}")
async def diagnostics(sandbox_id: str, kind: str, _caller: CallerDep) -> Response:
    raise _not_available("diagnostics of a container; see sbx logs and sbx inspect")


def shown(view: SandboxView) -> dict[str, Any]:
    """Return a sandbox without the optional keys that it does not have: null breaks the SDK."""
    labels = view.labels or {}
    body: dict[str, Any] = {
        "id": view.id,
        "status": _status(view, paused=bool(labels.get("paused"))),
        "createdAt": iso(view.created_at),
        "entrypoint": labels.get("entrypoint", []),
        "image": {"uri": labels.get("image", "")},
        "metadata": labels.get("metadata", {}),
    }
    if view.expires_at is not None:
        body["expiresAt"] = iso(view.expires_at)
    return body


def _status(view: SandboxView, *, paused: bool) -> dict[str, str]:
    if view.state in (State.EXPIRED, State.DELETED):
        return {"state": "Terminated"}
    if view.state is State.FAILED:
        failure = view.failure or {}
        return {"state": "Failed", "message": str(failure.get("message", ""))}
    if paused:
        message = (
            "calls are refused; files stay, and variables and processes until the idle time-out;"
            " processes are not frozen"
        )
        return {"state": "Paused", "message": message}
    return {"state": "Running"}


def _not_available(what: str) -> Unavailable:
    return Unavailable(f"sbx does not offer {what}", code="api_not_supported")
