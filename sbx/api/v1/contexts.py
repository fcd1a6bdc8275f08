"""The contexts of a conversation: several kernels over its files. The routes of runs take the name
of a context."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, StringConstraints

from sbx.api.bodies import InterruptReply, OkBody, RequestBody
from sbx.api.errors import documented
from sbx.api.v1.dependencies import PREFIX, TargetDep
from sbx.api.v1.lifecycle import ReceiptBody
from sbx.protocol.contexts import CONTEXTS_MAX, check_context
from sbx.runtime.run.context import Context

router = APIRouter(prefix=f"{PREFIX}/contexts", tags=["native"])
_ERRORS = documented(404, 409, 429, 504)


class NewContext(RequestBody):
    """`name`: any text of 1 to 128 characters without '/', '\\' and control characters."""

    name: Annotated[str, StringConstraints(max_length=1000)]


class ContextBody(BaseModel):
    """`status`: `idle` has no kernel now, and gets one with its next run; `busy` runs something or
    starts. `receipt`: the walls in force around the live kernel."""

    name: str
    status: Literal["idle", "ready", "busy"]
    receipt: dict[str, Any] | None


class ContextList(BaseModel):
    """`default` first, the others by name; `limit` is the largest number of contexts."""

    items: list[ContextBody]
    limit: int


@router.get("", responses=_ERRORS)
async def contexts(target: TargetDep) -> ContextList:
    """List the contexts of a conversation. No kernel starts."""
    async with target.use("execute", starts=False) as conversation:
        items = [await _shown(each) for each in await conversation.contexts.list()]
    return ContextList(items=items, limit=CONTEXTS_MAX)


@router.post("", status_code=201, responses=_ERRORS)
async def create(new: NewContext, target: TargetDep) -> ContextBody:
    """Create a context and start its kernel. If that fails, the context does not exist."""
    check_context(new.name)
    async with target.use("execute", creates=True) as conversation:
        body = await _shown(await conversation.contexts.create(new.name))
    await target.record("context.create", context=new.name)
    return body


@router.get("/{context}", responses=_ERRORS)
async def context(context: str, target: TargetDep) -> ContextBody:
    """Return one context. No kernel starts."""
    async with target.use("execute", starts=False) as conversation:
        return await _shown(await conversation.contexts.get(context))


@router.delete("/{context}", status_code=204, responses=_ERRORS)
async def delete(context: str, target: TargetDep) -> None:
    """Delete the context: end its kernel and its runs. Files stay."""
    async with target.use("execute", starts=False, frees=True) as conversation:
        await conversation.contexts.delete(context)
    await target.record("context.delete", context=context)


@router.post("/{context}/restart", responses=_ERRORS)
async def restart(context: str, target: TargetDep) -> ReceiptBody:
    """End its kernel and its runs, and start another kernel: a clean namespace."""
    async with target.use("execute") as conversation:
        receipt = await (await conversation.contexts.get(context)).restart()
    await target.record("context.restart", context=context)
    return ReceiptBody(receipt=receipt.to_dict())


@router.post("/{context}/stop", responses=_ERRORS)
async def stop(context: str, target: TargetDep) -> OkBody:
    """End its kernel and its runs. The next run starts another kernel."""
    async with target.use("execute", starts=False) as conversation:
        await (await conversation.contexts.get(context)).stop()
    await target.record("context.stop", context=context)
    return OkBody()


@router.post("/{context}/interrupt", responses=_ERRORS)
async def interrupt(context: str, target: TargetDep) -> InterruptReply:
    """Interrupt the current run of this context, like Ctrl-C. The variables stay."""
    check_context(context)
    done = await target.service.runs.interrupt(
        target.caller, target.sandbox_id, target.name, context
    )
    return InterruptReply(interrupted=done)


async def _shown(context: Context) -> ContextBody:
    status: Literal["idle", "ready", "busy"] = "idle"
    if context.busy:
        status = "busy"
    elif context.alive:
        status = "ready"
    receipt = await context.read_receipt()
    return ContextBody(
        name=context.name,
        status=status,
        receipt=receipt.to_dict() if receipt is not None else None,
    )
