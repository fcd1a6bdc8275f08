"""Run code in a conversation, interrupt it, follow it."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import InterruptReply
from sbx.api.encoding import encoded_event, encoded_run, event_form
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionDep, demand, demand_existing
from sbx.api.sessions_v1.models import (
    Execution,
    Interruption,
    SessionRunBody,
    run_body,
)
from sbx.api.v1.bay.idempotency import TAKES_KEY, Answer, answered, reservation, streamed
from sbx.errors import NotFound
from sbx.protocol.runs import Event, RunEnd
from sbx.service.ids import check_id
from sbx.service.run import RunHandle, RunRequest

router = APIRouter(prefix="/api/v1", tags=["execution"])
_STREAM: dict[str, Any] = {"content": {sse.MEDIA_TYPE: {}}}


@router.post(
    "/sessions/{session_id}/execute",
    response_model=SessionRunBody,
    responses={**documented(404, 409, 429), 200: _STREAM},
    openapi_extra=TAKES_KEY,
)
async def execute(
    execution: Execution, request: Request, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run code in a conversation, created if need be. Code that fails is a success of this call:
    see `status`."""
    name = check_id("conversation_id", execution.conversation_id)
    demand(caller, view, "execute", name)
    ask = RunRequest(
        kind=execution.language,
        code=execution.code,
        timeout_s=execution.timeout,
        reservation=reservation(request, caller),
    )
    start = partial(service.runs.start, caller, view.id, name, ask)
    if execution.stream or sse.accepts_events(request):
        return await streamed(
            request,
            service,
            caller,
            execution,
            start,
            events=partial(_events, after=0),
            content=_content,
        )

    async def work() -> Answer:
        return 200, await _content(await start())

    return await answered(request, service, caller, execution, work)


@router.post("/sessions/{session_id}/interrupt", responses=documented(404, 409))
async def interrupt(
    interruption: Interruption, view: SessionDep, caller: CallerDep, service: ServiceDep
) -> InterruptReply:
    """Interrupt the current run of a conversation, like Ctrl-C. The variables stay."""
    name = check_id("conversation_id", interruption.conversation_id)
    await demand_existing(service, caller, view, "execute", name)
    return InterruptReply(interrupted=await service.runs.interrupt(caller, view.id, name))


@router.get(
    "/runs/{run_id}/events",
    response_class=Response,
    responses={**documented(404), 200: _STREAM},
)
async def follow(run_id: str, request: Request, caller: CallerDep, service: ServiceDep) -> Response:
    """Stream the events of a run after `Last-Event-ID`, until a minute after its end."""
    if not caller.may("execute"):
        raise NotFound(f"run {run_id[:80]!r} does not exist")
    handle = await service.runs.attach(caller, None, run_id)
    return await sse.stream(_events(handle, sse.last_event_id(request)), request=request)


async def _content(handle: RunHandle) -> bytes:
    result = await handle.result()
    return await encoded_run(result, run_body, recorded=handle.recorded)


async def _events(handle: RunHandle, after: int) -> AsyncIterator[tuple[int, sse.Encoded]]:
    async with aclosing(handle.events(after)) as events:
        async for number, event in events:
            yield number, await encoded_event(event, _as_json, recorded=handle.recorded)


def _as_json(event: Event) -> dict[str, Any]:
    """Return an event. The final one has the body of a reply."""
    return (
        {"type": event.type, **run_body(event.run)}
        if isinstance(event, RunEnd)
        else event_form(event)
    )
