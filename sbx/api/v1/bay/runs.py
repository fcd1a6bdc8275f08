"""Run code by python/exec and shell/exec, interrupt a run, and follow one."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import Struct
from msgspec.structs import replace

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
from sbx.service.caller import Caller
from sbx.service.run import RunHandle, RunRequest
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
    sandbox_id: str, cell: PythonExec, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run a cell. Code that fails is a success of this call: `success` is false."""
    ask = RunRequest(
        kind="python",
        code=cell.code,
        description=cell.description,
        tags=cell.tags,
        reservation=reservation(request, caller),
    )
    code = cell.code if cell.include_code else None
    return await _run(
        _Call(request, service, caller, sandbox_id, ask, cell), lambda run: python_body(run, code)
    )


@router.post(
    "/shell/exec",
    response_model=ShellExecResponse,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=TAKES_KEY,
)
async def shell(
    sandbox_id: str, command: ShellExec, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run a command with /bin/bash -c. A command that fails is a success of this call."""
    if command.cwd is not None:
        relative(command.cwd, "cwd")
    ask = RunRequest(
        kind="shell",
        code=command.command,
        cwd=command.cwd,
        description=command.description,
        tags=command.tags,
        reservation=reservation(request, caller),
    )
    code = command.command if command.include_code else None
    return await _run(
        _Call(request, service, caller, sandbox_id, ask, command),
        lambda run: shell_body(run, code),
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
    """Interrupt the current run, like Ctrl-C. The variables stay."""
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
    """Stream the events of a run after `Last-Event-ID`, until a minute after its end."""
    handle = await service.runs.attach(caller, sandbox_id, run_id_of(run_id))
    body = python_body if handle.kind == "python" else shell_body
    events = _events(handle, lambda run: body(run, None), sse.last_event_id(request))
    return await sse.stream(events, request=request)


class _Call(Struct, frozen=True):
    """One call of an exec route. `body` is the model for its idempotency key."""

    request: Request
    service: Service
    caller: Caller
    sandbox_id: str
    ask: RunRequest
    body: PythonExec | ShellExec

    async def start(self) -> RunHandle:
        """Start the run. Bay's default of 30 s is never more than the policy's wall_time; a
        requested time-out above it raises BadRequest `limit_widened`."""
        timeout_s = float(self.body.timeout)
        if "timeout" not in self.body.model_fields_set:
            view = await self.service.sandboxes.get(self.caller, self.sandbox_id)
            timeout_s = min(timeout_s, view.policy.limits.wall_time)
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
    """Name the run in an error as Bay does."""
    if (run_id := error.details.pop("run_id", None)) is not None:
        error.details["execution_id"] = execution_id(run_id)
    return error


async def _reply(call: _Call, body: Body) -> Response:
    async def content(handle: RunHandle) -> bytes:
        result = await handle.result()
        return await encoded_run(result, body, recorded=handle.recorded)

    async def work() -> Answer:
        return 200, await content(await call.start())

    about = call.request, call.service, call.caller, call.body
    if call.body.stream or sse.accepts_events(call.request):
        events = partial(_events, body=body, after=0)
        return await streamed(*about, call.start, events=events, content=content)
    return await answered(*about, work)


async def _events(
    handle: RunHandle, body: Body, after: int
) -> AsyncIterator[tuple[int, sse.Encoded]]:
    async with aclosing(handle.events(after)) as events:
        async for number, event in events:
            form = partial(_as_json, body=body)
            yield number, await encoded_event(event, form, recorded=handle.recorded)


def _as_json(event: Event, body: Body) -> dict[str, Any]:
    """Return an event. The final one also has the body of a reply, for either kind of client."""
    data = event_form(event)
    return {**data, **body(event.run)} if isinstance(event, RunEnd) else data
