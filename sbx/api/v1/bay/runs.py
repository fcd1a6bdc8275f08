"""Run code by python/exec and shell/exec, interrupt a run, and follow one."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.encoding import encoded_event, encoded_run, event_form
from sbx.api.errors import documented
from sbx.api.v1.bay.files import relative
from sbx.api.v1.bay.idempotency import TAKES_KEY, Answer, answered, reservation, streamed
from sbx.api.v1.bay.models import (
    BayInterruptReply,
    PythonExec,
    PythonExecResponse,
    ShellExec,
    ShellExecResponse,
    execution_id,
    python_body,
    run_id_of,
    shell_body,
)
from sbx.errors import BadRequest, Conflict
from sbx.protocol.runs import Event, Run, RunEnd
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.service.auth import Caller
from sbx.service.runs import RunHandle, RunRequest
from sbx.service.service import Service

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["runs"])

Body = Callable[[Run], dict[str, Any]]
_STREAM = {"content": sse.DOCUMENTED}
_ERRORS = documented(404, 409, 429, 504)


@router.post(
    "/python/exec",
    response_model=PythonExecResponse,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=TAKES_KEY,
)
async def python(
    sandbox_id: str, asked: PythonExec, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run a cell. Code that fails is a success of this call: `success` tells."""
    ask = RunRequest(
        kind="python",
        code=asked.code,
        description=asked.description,
        tags=asked.tags,
        reservation=reservation(request, caller),
    )
    code = asked.code if asked.include_code else None
    return await _run(
        _Call(request, service, caller, sandbox_id, ask, asked), lambda run: python_body(run, code)
    )


@router.post(
    "/shell/exec",
    response_model=ShellExecResponse,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=TAKES_KEY,
)
async def shell(
    sandbox_id: str, asked: ShellExec, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run a command with /bin/bash -c. A command that fails is a success of this call."""
    if asked.cwd is not None:
        relative(asked.cwd)
    ask = RunRequest(
        kind="shell",
        code=asked.command,
        cwd=asked.cwd,
        description=asked.description,
        tags=asked.tags,
        reservation=reservation(request, caller),
    )
    command = asked.command if asked.include_code else None
    return await _run(
        _Call(request, service, caller, sandbox_id, ask, asked),
        lambda run: shell_body(run, command),
    )


@router.api_route("/browser/{rest:path}", methods=["GET", "POST"], include_in_schema=False)
async def browser(sandbox_id: str, rest: str, caller: CallerDep, service: ServiceDep) -> None:
    """Bay's browser is not offered by any policy."""
    view = await service.sandboxes.get(caller, sandbox_id)
    raise BadRequest(
        "no policy offers a browser",
        code="capability_not_supported",
        details={"capability": "browser", "available": list(view.policy.capabilities)},
    )


@router.post("/interrupt", responses=documented(404, 409))
async def interrupt(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> BayInterruptReply:
    """Interrupt what runs now, as Ctrl-C would; the variables stay."""
    done = await service.runs.interrupt(caller, sandbox_id, DEFAULT_CONVERSATION)
    return BayInterruptReply(interrupted=done)


@router.get(
    "/runs/{run_id}/events",
    response_class=Response,
    responses={**documented(404), 200: _STREAM},
)
async def follow(
    sandbox_id: str, run_id: str, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """The events of a run after `Last-Event-ID`, while it lives and for a minute after its end."""
    handle = await service.runs.attach(caller, sandbox_id, run_id_of(run_id))
    body = python_body if handle.kind == "python" else shell_body
    events = _told(handle, lambda run: body(run, None), sse.last_event_id(request))
    return await sse.stream(events, request=request)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an exec route: who asks for what, and the model that its key is held against."""

    request: Request
    service: Service
    caller: Caller
    sandbox_id: str
    ask: RunRequest
    asked: PythonExec | ShellExec

    async def start(self) -> RunHandle:
        """Bay takes any time-out up to 300 s: one beyond the policy's wall_time is that."""
        view = await self.service.sandboxes.get(self.caller, self.sandbox_id)
        timeout_s = min(float(self.asked.timeout), view.policy.limits.wall_time)
        return await self.service.runs.start(
            self.caller,
            self.sandbox_id,
            DEFAULT_CONVERSATION,
            replace(self.ask, timeout_s=timeout_s),
        )


async def _run(call: _Call, body: Body) -> Response:
    try:
        return await _reply(call, body)
    except Conflict as error:
        raise _with_execution_id(error) from None


def _with_execution_id(error: Conflict) -> Conflict:
    """Name the run of a refusal as Bay does."""
    if (run_id := error.details.pop("run_id", None)) is not None:
        error.details["execution_id"] = execution_id(run_id)
    return error


async def _reply(call: _Call, body: Body) -> Response:
    async def content(handle: RunHandle) -> bytes:
        result = await handle.result()
        return await encoded_run(result, body, recorded=handle.recorded)

    async def work() -> Answer:
        return 200, await content(await call.start())

    about = call.request, call.service, call.caller, call.asked
    if call.asked.stream or sse.accepts_events(call.request):
        events = partial(_told, body=body, after=0)
        return await streamed(*about, call.start, events=events, content=content)
    return await answered(*about, work)


async def _told(
    handle: RunHandle, body: Body, after: int
) -> AsyncIterator[tuple[int, sse.Encoded]]:
    async with aclosing(handle.events(after)) as events:
        async for number, event in events:
            form = partial(_as_json, body=body)
            yield number, await encoded_event(event, form, recorded=handle.recorded)


def _as_json(event: Event, body: Body) -> dict[str, Any]:
    """The end carries the usual body too, so that either reader finds what it knows."""
    told = event_form(event)
    return {**told, **body(event.run)} if isinstance(event, RunEnd) else told
