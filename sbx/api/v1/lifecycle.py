"""The life of one conversation's kernel, and all that is known of a sandbox."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.errors import documented
from sbx.api.v1.bay.models import SandboxResponse
from sbx.api.v1.bay.sandboxes import shown
from sbx.errors import NotFound
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.service.auth import Caller
from sbx.service.sandboxes import SandboxView

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["native"])
_ERRORS = documented(404, 409, 429)


class ReceiptBody(BaseModel):
    """Which walls stand around the live kernel; null while there is none."""

    receipt: dict[str, Any] | None


class KernelBody(BaseModel):
    """A live kernel: its walls, and its processes as the host numbers them, PID 1 first."""

    conversation: str
    context: str
    busy: bool
    host_pids: list[int]
    receipt: dict[str, Any]


class ConversationBody(BaseModel):
    conversation_id: str
    created_at: float
    status: str
    files: int
    bytes: int


class MountBody(BaseModel):
    """A directory of the host that is seen at `target`; `source` is told to the operator."""

    target: str
    read_only: bool
    source: str | None


class Inspection(BaseModel):
    """All that the service tells of a sandbox to those who may see it. `narrower` and `env` are
    null for who does not run code in all of it; `kernels` are told to who may run code there."""

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
    attachments: list[MountBody]
    kernels: list[KernelBody]


@router.post("/conversations/{conversation}/start", responses=_ERRORS)
async def start(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> ReceiptBody:
    """Start the kernel now instead of with the first run."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", conversation=conversation
    ) as use:
        receipt = await use.conversation(conversation).start()
    await service.recording.record(
        caller, "conversation.start", use.view.id, conversation=conversation
    )
    return ReceiptBody(receipt=receipt.to_dict())


@router.post("/conversations/{conversation}/stop", responses=_ERRORS)
async def stop(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """End the kernel and what runs in it; files stay, and the next run starts another."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        _check_bounds(caller, use.view, conversation)
        if (found := use.box.known(conversation)) is not None:
            await found.stop()
    if found is not None:
        await service.recording.record(
            caller, "conversation.stop", use.view.id, conversation=conversation
        )
    return OkBody()


@router.get("/conversations/{conversation}/receipt", responses=_ERRORS)
async def receipt(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> ReceiptBody:
    """Which walls stand around the live kernel, read back from it now; nothing starts for this."""
    view = await service.sandboxes.get(caller, sandbox_id)
    _check_bounds(caller, view, conversation)
    live = {(one.conversation, one.name): one for one in service.sandboxes.live(view.id)}
    kernel = live.get((conversation, DEFAULT_CONTEXT))
    standing = await kernel.read_receipt() if kernel is not None else None
    return ReceiptBody(receipt=standing.to_dict() if standing is not None else None)


@router.get("/inspect", responses=_ERRORS)
async def inspect(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> Inspection:
    """The sandbox, its conversations, and its live kernels with their receipts."""
    view = await service.sandboxes.get(caller, sandbox_id)
    seen = await service.sandboxes.conversations(caller, sandbox_id)
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
        conversations=[
            ConversationBody(
                conversation_id=one.name,
                created_at=one.created_at,
                status=one.status,
                files=one.files,
                bytes=one.bytes,
            )
            for one in seen
        ],
        attachments=[
            MountBody(
                target=one.target,
                read_only=one.read_only,
                source=one.source if caller.operator else None,
            )
            for one in service.sandboxes.attached(caller, view.id)
        ],
        kernels=[
            KernelBody(
                conversation=one.conversation,
                context=one.name,
                busy=one.busy,
                host_pids=one.processes,
                receipt=receipt.to_dict(),
            )
            for one in live
            if caller.sees(view.user_id, view.agent_id, one.conversation)
            and (receipt := await one.read_receipt()) is not None
        ],
    )


def _check_bounds(caller: Caller, view: SandboxView, conversation: str) -> None:
    """Raises NotFound for what lies beyond a token's bounds."""
    if not caller.may("execute") or not caller.sees(view.user_id, view.agent_id, conversation):
        raise NotFound(f"there is no conversation {conversation}")
