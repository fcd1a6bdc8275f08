"""The contexts of a conversation: kernels side by side over its files. Runs in one go by the routes
of runs, which take its name."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, StringConstraints

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.errors import documented
from sbx.api.v1.lifecycle import ReceiptBody
from sbx.api.v1.runs import InterruptReply
from sbx.protocol.contexts import CONTEXTS_MAX, check_context
from sbx.runtime.run.context import Context

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}/contexts", tags=["native"]
)
_ERRORS = documented(404, 409, 429, 504)


class NewContext(BaseModel):
    """`name`: any text of 1 to 128 characters without '/', '\\' and control characters."""

    name: Annotated[str, StringConstraints(max_length=1000)]


class ContextBody(BaseModel):
    """`status`: `idle` has no kernel now, and gets one with its next run; `busy` runs something or
    starts. `receipt`: which walls stand around the live kernel."""

    name: str
    status: Literal["idle", "ready", "busy"]
    receipt: dict[str, Any] | None


class ContextList(BaseModel):
    """`default` first, which every conversation has, the others by name; `limit` is how many there
    may be."""

    items: list[ContextBody]
    limit: int


@router.get("", responses=_ERRORS)
async def contexts(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> ContextList:
    """All contexts of a conversation; nothing starts for this."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        found = await (await use.existing(conversation)).contexts.list()
        return ContextList(items=[await _shown(one) for one in found], limit=CONTEXTS_MAX)


@router.post("", status_code=201, responses=_ERRORS)
async def create(
    sandbox_id: str, conversation: str, new: NewContext, caller: CallerDep, service: ServiceDep
) -> ContextBody:
    """Make another context and start its kernel; where that fails there is none."""
    check_context(new.name)
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", conversation=conversation
    ) as use:
        made = await _shown(await use.conversation(conversation).contexts.create(new.name))
    await service.recording.record(
        caller, "context.create", use.view.id, conversation=conversation, context=new.name
    )
    return made


@router.get("/{context}", responses=_ERRORS)
async def context(
    sandbox_id: str, conversation: str, context: str, caller: CallerDep, service: ServiceDep
) -> ContextBody:
    """One context; nothing starts for this."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        return await _shown(await (await use.existing(conversation)).contexts.get(context))


@router.delete("/{context}", status_code=204, responses=_ERRORS)
async def delete(
    sandbox_id: str, conversation: str, context: str, caller: CallerDep, service: ServiceDep
) -> None:
    """End its kernel and what runs or waits in it, for good; files stay."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        await (await use.existing(conversation)).contexts.delete(context)
    await service.recording.record(
        caller, "context.delete", use.view.id, conversation=conversation, context=context
    )


@router.post("/{context}/restart", responses=_ERRORS)
async def restart(
    sandbox_id: str, conversation: str, context: str, caller: CallerDep, service: ServiceDep
) -> ReceiptBody:
    """End its kernel and what runs or waits in it, and start another: a clean namespace."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", conversation=conversation
    ) as use:
        one = await (await use.existing(conversation)).contexts.get(context)
        receipt = await one.restart()
    await service.recording.record(
        caller, "context.restart", use.view.id, conversation=conversation, context=context
    )
    return ReceiptBody(receipt=receipt.to_dict())


@router.post("/{context}/stop", responses=_ERRORS)
async def stop(
    sandbox_id: str, conversation: str, context: str, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """End its kernel and what runs in it; the next run starts another."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        await (await (await use.existing(conversation)).contexts.get(context)).stop()
    await service.recording.record(
        caller, "context.stop", use.view.id, conversation=conversation, context=context
    )
    return OkBody()


@router.post("/{context}/interrupt", responses=_ERRORS)
async def interrupt(
    sandbox_id: str, conversation: str, context: str, caller: CallerDep, service: ServiceDep
) -> InterruptReply:
    """Interrupt what runs now in this context, as Ctrl-C would; the variables stay."""
    check_context(context)
    done = await service.runs.interrupt(caller, sandbox_id, conversation, context)
    return InterruptReply(interrupted=done)


async def _shown(one: Context) -> ContextBody:
    status: Literal["idle", "ready", "busy"] = "idle"
    if one.busy:
        status = "busy"
    elif one.alive:
        status = "ready"
    return ContextBody(name=one.name, status=status, receipt=await _walls(one))


async def _walls(one: Context) -> dict[str, Any] | None:
    receipt = await one.read_receipt()
    return None if receipt is None else receipt.to_dict()
