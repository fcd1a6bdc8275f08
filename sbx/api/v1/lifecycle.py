"""The life of the kernel of a conversation, the inspection of a sandbox, its usage, and the access
that a person granted beyond the policy.

A token may not grant access: it may be that of an agent, whose access a person decides about
(`/api/v1/approvals`).
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, StringConstraints

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import ConversationBody, OkBody, RequestBody
from sbx.api.errors import documented
from sbx.api.v1.bay.models import SandboxResponse
from sbx.api.v1.bay.sandboxes import shown
from sbx.api.v1.dependencies import Target, TargetDep
from sbx.errors import Denied, NotFound
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.grants import Access, AccessKind, Grant, GrantDuration
from sbx.protocol.surroundings import Surroundings
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, SandboxUsage, usage_to_json

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["native"])
_ERRORS = documented(404, 409, 429)
_GRANTS = "/conversations/{conversation}/grants"


class ReceiptBody(BaseModel):
    """The walls in force around the live kernel; null if there is none."""

    receipt: dict[str, Any] | None


class NewGrant(RequestBody):
    """`target`: `host:port` for `network`, a name for `secret`, an absolute path for `directory`,
    seconds for `run_time`, MiB for `memory`, and a canonical name for `package`. `once` is for
    the next run."""

    kind: AccessKind
    target: Annotated[str, StringConstraints(min_length=1, max_length=4095)]
    duration: GrantDuration = "once"


class GrantList(BaseModel):
    items: list[Grant]


class KernelBody(BaseModel):
    """A live kernel: its walls, and its processes as the host numbers them, PID 1 first."""

    conversation: str
    context: str
    busy: bool
    host_pids: list[int]
    receipt: dict[str, Any]


class InspectedMount(BaseModel):
    """A directory of the host, mounted at `target`; only the operator sees `source`."""

    target: str
    read_only: bool
    source: str | None


class Inspection(BaseModel):
    """The data of a sandbox for callers that may see it. `narrower` and `env` are null for a caller
    that may not run code in all of it; `kernels` are for callers that may run code there."""

    sandbox: SandboxResponse
    owner: str
    stopped: bool
    failure: dict[str, Any] | None
    session_id: str | None
    user_id: str | None
    agent_id: str | None
    narrower: dict[str, Any] | None
    env: dict[str, str] | None
    limits: dict[str, Any]
    network: dict[str, Any]
    conversations: list[ConversationBody]
    mounts: list[InspectedMount]
    kernels: list[KernelBody]


@router.post("/conversations/{conversation}/start", responses=_ERRORS)
async def start(target: TargetDep) -> ReceiptBody:
    """Start the kernel now instead of with the first run."""
    async with target.use("execute", creates=True) as conversation:
        receipt = await conversation.start()
    await target.record("conversation.start")
    return ReceiptBody(receipt=receipt.to_dict())


@router.post("/conversations/{conversation}/stop", responses=_ERRORS)
async def stop(target: TargetDep) -> OkBody:
    """End the kernel and its runs. Files stay, and the next run starts another kernel."""
    async with target.lease("execute", starts=False) as use:
        if (conversation := use.active.existing(target.name)) is not None:
            await conversation.stop()
            await target.record("conversation.stop")
    return OkBody()


@router.get("/conversations/{conversation}/receipt", responses=_ERRORS)
async def receipt(target: TargetDep) -> ReceiptBody:
    """Return the walls in force around the live kernel, read back now. No kernel starts."""
    caller, sandboxes = target.caller, target.service.sandboxes
    view = await sandboxes.get(caller, target.sandbox_id)
    if not caller.may("execute") or not caller.sees(view.user_id, view.agent_id, target.name):
        raise NotFound(f"conversation {target.name} does not exist")
    for context in sandboxes.live(view.id):
        if (context.conversation, context.name) == (target.name, DEFAULT_CONTEXT):
            receipt = await context.read_receipt()
            return ReceiptBody(receipt=receipt.to_dict() if receipt is not None else None)
    return ReceiptBody(receipt=None)


@router.get("/conversations/{conversation}/surroundings", responses=_ERRORS)
async def surroundings(target: TargetDep) -> Surroundings:
    """Return the paths, languages and capabilities that code and tools have there. No kernel
    starts."""
    async with target.use("execute", creates=True, starts=False) as conversation:
        return await conversation.surroundings()


@router.get(_GRANTS, responses=_ERRORS)
async def grants(target: TargetDep) -> GrantList:
    """List the grants that are valid now, the oldest first. No kernel starts."""
    async with target.use("execute", creates=True, starts=False) as conversation:
        return GrantList(items=list(conversation.grants.active))


@router.post(_GRANTS, status_code=201, responses=_ERRORS)
async def grant(new: NewGrant, target: TargetDep) -> Grant:
    """Grant access that the policy permits to grant. It is in the receipt and the audit log."""
    caller = target.caller
    if caller.via == "token":
        raise Denied(
            "a token may not grant access",
            code="rule_not_permitted",
            hint="grant it with a key of the owner",
        )
    async with target.use("execute", creates=True, starts=False) as conversation:
        access = Access(new.kind, new.target)
        return await conversation.grants.grant(access, new.duration, caller.who)


@router.delete(f"{_GRANTS}/{{grant_id}}", status_code=204, responses=_ERRORS)
async def revoke(grant_id: str, target: TargetDep) -> None:
    """End a grant now: its connections are closed, and later requests are refused."""
    async with target.use("execute", creates=True, starts=False) as conversation:
        await conversation.grants.revoke(grant_id)
        await target.record("grant.revoke", grant=grant_id)


@router.get("/inspect", responses=_ERRORS)
async def inspect(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> Inspection:
    """Return the sandbox, its conversations, and its live kernels with their receipts."""
    view = await service.sandboxes.get(caller, sandbox_id)
    conversations = await service.sandboxes.conversations(caller, sandbox_id)
    live = service.sandboxes.live(view.id) if caller.may("execute") else []
    whole = caller.whole_sandbox and caller.may("execute")
    return Inspection(
        sandbox=shown(view, containers=True),
        owner=view.owner,
        stopped=view.stopped,
        failure=view.failure,
        session_id=view.session_id,
        user_id=view.user_id,
        agent_id=view.agent_id,
        narrower=view.narrower if whole else None,
        env=view.env if whole else None,
        limits=view.policy.limits.model_dump(mode="json"),
        network=view.policy.network.model_dump(mode="json"),
        conversations=[ConversationBody.of(each) for each in conversations],
        mounts=[
            InspectedMount(
                target=each.target,
                read_only=each.read_only,
                source=each.source if caller.operator else None,
            )
            for each in service.sandboxes.index.get(caller, view.id).mounted
        ],
        kernels=[
            KernelBody(
                conversation=each.conversation,
                context=each.name,
                busy=each.busy,
                host_pids=each.processes,
                receipt=receipt.to_dict(),
            )
            for each in live
            if caller.sees(view.user_id, view.agent_id, each.conversation)
            and (receipt := await each.read_receipt()) is not None
        ],
    )


@router.get(
    "/conversations/{conversation}/usage",
    response_model=SandboxUsage,
    responses={**documented(404, 409, 429), 200: {"content": sse.DOCUMENTED}},
)
async def usage(
    request: Request,
    target: TargetDep,
    interval_s: Annotated[float, Query(ge=INTERVAL_MIN_S, le=INTERVAL_MAX_S)] = 1.0,
) -> SandboxUsage | Response:
    """Return the usage now. No kernel starts. A client that accepts events gets one now and one
    after each interval. The sandbox is in use while the client follows them, except with `peek`."""
    if sse.accepts_events(request):
        return await sse.stream(_events(target, interval_s), request=request)
    async with target.use("execute", starts=False) as conversation:
        return await conversation.usage()


async def _events(target: Target, interval_s: float) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    number = 0
    async with (
        target.use("execute", starts=False) as conversation,
        aclosing(conversation.stream_usage(interval_s)) as stream,
    ):
        async for usage in stream:
            number += 1
            yield number, {"type": "usage", **usage_to_json(usage)}
