"""Runs of a conversation, their input and their interruption. A short cell takes few awaits, one
validation and one encoding."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import Base64Bytes, BaseModel, BeforeValidator, Field, StringConstraints
from starlette.routing import request_response

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep, caller, service
from sbx.api.bodies import (
    InterruptReply,
    OkBody,
    RequestBody,
    RunErrorBody,
    body_of,
    disconnected,
    documented_body,
)
from sbx.api.encoding import encoded_event, encoded_run
from sbx.api.errors import documented
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.events import run_to_json, text_from_json
from sbx.protocol.languages import ARGUMENTS_MAX, Language, full_name
from sbx.protocol.runs import Cause, Run, Status
from sbx.service.rerun import rerun as run_again
from sbx.service.run import RunHandle, RunRequest

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["native"])

_WATCH_AFTER_S = 0.05  # a shorter run ends before its client could disconnect
_ERRORS = documented(404, 409, 429, 504)
_STREAM = {"content": sse.DOCUMENTED}


class NewRun(RequestBody):
    """`timeout` in seconds, null for the policy's; `interactive`: input() sends an event;
    `stream`: events as they come; `attended`: the run is interrupted if the client disconnects;
    `context`: the kernel of the conversation; `args`: the arguments of a script or a file;
    `stdin_open`: a command also reads the text sent to `/runs/{run_id}/stdin`.

    A `file` runs as `python3 FILE`: `code` is its path in the workspace. Or `code` is `-` (or `-c`)
    and `source` the code. `stdin_data` is its standard input, and `shows_value` displays the value
    of the last expression; both byte strings are base64."""

    kind: Annotated[Literal["python", "shell", "file"] | Language, BeforeValidator(full_name)] = (
        "python"
    )
    code: str
    timeout: float | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin: str | None = None
    stdin_open: bool = False
    interactive: bool = False
    stream: bool = False
    attended: bool = False
    description: Annotated[str, StringConstraints(max_length=100_000)] | None = None
    tags: Annotated[str, StringConstraints(max_length=4_000)] | None = None
    context: str = DEFAULT_CONTEXT
    args: list[str] = Field(default_factory=list, max_length=ARGUMENTS_MAX)
    source: Base64Bytes | None = None
    stdin_data: Base64Bytes | None = None
    shows_value: bool = False


class QuarantinedBody(BaseModel):
    """A host executable that waits outside of the user's directory."""

    path: str
    name: str
    why: str
    id: str


class RunBody(BaseModel):
    """The result of a run, see sbx/protocol/events.py; durations in seconds. `recorded` is present,
    and false, if the history does not have it yet."""

    run_id: str
    status: Status
    cause: Cause | None
    stdout: str
    stderr: str
    text: str
    result: str | None
    outputs: list[dict[str, Any]]
    error: RunErrorBody | None
    exit_code: int | None
    execution_count: int | None
    duration_s: float
    state_lost: bool
    truncated: bool
    quarantined: list[QuarantinedBody] = []
    recorded: bool = True


class NewRerun(RequestBody):
    """`timeout` in seconds, null for the policy's."""

    timeout: float | None = None


class RerunBody(BaseModel):
    """The recorded result and that of the fresh sandbox, both shortened as in the history.
    `differences`: the fields that differ."""

    before: RunBody
    after: RunBody
    differences: list[str]


class InputLine(BaseModel):
    """The answer to input(); null interrupts the run."""

    text: str | None


class StdinPiece(BaseModel):
    """More of a standard input; null is its end."""

    text: str | None


async def create_run(
    sandbox_id: str, conversation: str, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run a cell, a command, a script or a file of Python. If the code fails, the call succeeds."""
    new = await body_of(request, NewRun)
    spec = RunRequest(
        kind=new.kind,
        code=new.code,
        timeout_s=new.timeout,
        cwd=new.cwd,
        env=new.env,
        stdin=new.stdin,
        stdin_open=new.stdin_open,
        interactive=new.interactive,
        description=new.description,
        tags=new.tags,
        context=new.context,
        args=new.args,
        source=new.source,
        stdin_data=new.stdin_data,
        shows_value=new.shows_value,
    )
    streams = new.stream or sse.accepts_events(request)
    if streams:
        sse.reserve(request)
    handle = await service.runs.start(caller, sandbox_id, conversation, spec)
    if streams:
        return await sse.stream(_events(handle), request=request)
    run = await (_result_while_connected(handle, request) if new.attended else handle.result())
    content = await encoded_run(run, recorded=handle.recorded)
    return Response(content, media_type="application/json")


class _FastRoute(APIRoute):
    """The route of `create_run` without FastAPI's way to a function, which solves the dependencies
    again for each call. That takes longer than a short cell."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(_create_run)


async def _create_run(request: Request) -> Response:
    names = request.path_params
    return await create_run(
        names["sandbox_id"], names["conversation"], request, await caller(request), service(request)
    )


router.add_api_route(
    "/conversations/{conversation}/runs",
    create_run,
    methods=["POST"],
    response_model=RunBody,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=documented_body(NewRun),
    route_class_override=_FastRoute,
)


@router.post("/conversations/{conversation}/interrupt", responses=documented(404, 409))
async def interrupt(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> InterruptReply:
    """Interrupt the current run, like Ctrl-C. The variables stay."""
    return InterruptReply(
        interrupted=await service.runs.interrupt(caller, sandbox_id, conversation)
    )


@router.post("/runs/{run_id}/interrupt", responses=documented(404, 409))
async def interrupt_run(
    sandbox_id: str, run_id: str, caller: CallerDep, service: ServiceDep
) -> InterruptReply:
    """Interrupt only this run. A queued run leaves the queue."""
    handle = await service.runs.attach(caller, sandbox_id, run_id)
    return InterruptReply(interrupted=await handle.interrupt())


@router.post("/runs/{run_id}/rerun", responses=documented(404, 409, 413, 429, 504, 507))
async def rerun(
    sandbox_id: str, run_id: str, new: NewRerun, caller: CallerDep, service: ServiceDep
) -> RerunBody:
    """Run the code of an ended run again in a fresh sandbox with the same policy and with copies of
    the files, and compare the results. The sandbox is deleted at the end."""
    result = await run_again(service, caller, sandbox_id, run_id, new.timeout)
    await service.recording.record(caller, "run.rerun", sandbox_id, run=run_id)
    before, after = (run_to_json(run, encoded=True) for run in (result.before, result.after))
    return RerunBody.model_validate(
        {"before": before, "after": after, "differences": result.differences}
    )


@router.post("/runs/{run_id}/stdin", responses=documented(404, 409))
async def write_stdin(
    sandbox_id: str, run_id: str, piece: StdinPiece, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Write to the standard input of a command that was started with `stdin_open`."""
    handle = await service.runs.attach(caller, sandbox_id, run_id)
    await handle.write(None if piece.text is None else text_from_json(piece.text))
    return OkBody()


@router.post("/runs/{run_id}/input", responses=documented(404, 409))
async def answer(
    sandbox_id: str, run_id: str, line: InputLine, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Answer the oldest question of an interactive run."""
    handle = await service.runs.attach(caller, sandbox_id, run_id)
    await handle.answer(None if line.text is None else text_from_json(line.text))
    return OkBody()


async def _result_while_connected(handle: RunHandle, request: Request) -> Run:
    """Return the result, and interrupt the run if the client disconnects. Nothing is awaited before
    the result, so that this task itself drives a short cell."""
    watching: list[asyncio.Task[None]] = []

    def begin() -> None:
        watching.append(asyncio.create_task(_interrupt_on_disconnect(handle, request)))

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        return await handle.result()
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


async def _interrupt_on_disconnect(handle: RunHandle, request: Request) -> None:
    await disconnected(request.receive)
    await handle.interrupt()


async def _events(handle: RunHandle) -> AsyncIterator[tuple[int, sse.Encoded]]:
    async with aclosing(handle.events()) as events:
        async for number, event in events:
            yield number, await encoded_event(event, recorded=handle.recorded)
