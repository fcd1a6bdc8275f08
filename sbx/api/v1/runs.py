"""Runs of any conversation. The way of a short cell: few awaits, one validation, one encoding."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, StringConstraints
from starlette.routing import Match, Route
from starlette.types import Scope

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep, caller, service
from sbx.api.bodies import OkBody, body_of, documented_body
from sbx.api.encoding import encoded_event, encoded_run
from sbx.api.errors import documented
from sbx.protocol.contexts import DEFAULT_CONTEXT, check_context
from sbx.protocol.events import text_from_json
from sbx.protocol.languages import ARGUMENTS_MAX, Language
from sbx.protocol.runs import Run
from sbx.service.runs import RunHandle, RunRequest

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["native"])

_ATTEND_AFTER_S = 0.05  # a shorter run ends before anybody could have gone
_ERRORS = documented(404, 409, 429, 504)
_STREAM = {"content": sse.DOCUMENTED}


class NewRun(BaseModel):
    """`timeout` in seconds, null for the policy's; `interactive`: input() asks by an event;
    `stream`: events as they come; `attended`: the run is interrupted when the caller goes;
    `context`: in which kernel of the conversation; `args`: what a script is given; `stdin_open`: a
    command also reads what `/runs/{run_id}/stdin` is given."""

    kind: Literal["python", "shell"] | Language = "python"
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
    args: Annotated[list[str], Field(max_length=ARGUMENTS_MAX)] = []


class RunErrorBody(BaseModel):
    name: str
    value: str
    traceback: str


class QuarantinedBody(BaseModel):
    """A host executable that waits outside of the user's directory."""

    path: str
    name: str
    why: str
    id: str


class RunBody(BaseModel):
    """A run's result, as sbx/protocol/events.py writes it; durations in seconds. `recorded` is
    there, and false, where the history does not have it yet."""

    run_id: str
    status: Literal["ok", "error", "interrupted", "timeout", "killed"]
    cause: (
        Literal["memory", "pids", "cpu", "disk", "output", "crashed", "tripwire", "descriptors"]
        | None
    )
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


class InterruptReply(BaseModel):
    """`interrupted` is false when nothing ran."""

    interrupted: bool


class InputLine(BaseModel):
    """The answer to input(); null says that there is none, and interrupts the run."""

    text: str | None


@router.post(
    "/conversations/{conversation}/runs",
    response_model=RunBody,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=documented_body(NewRun),
)
async def run(
    sandbox_id: str, conversation: str, request: Request, caller: CallerDep, service: ServiceDep
) -> Response:
    """Run a cell, a command or a script. Code that fails is a success of this call."""
    asked = await body_of(request, NewRun)
    ask = RunRequest(
        kind=asked.kind,
        code=asked.code,
        timeout_s=asked.timeout,
        cwd=asked.cwd,
        env=asked.env,
        stdin=asked.stdin,
        stdin_open=asked.stdin_open,
        interactive=asked.interactive,
        description=asked.description,
        tags=asked.tags,
        context=check_context(asked.context),
        args=asked.args,
    )
    handle = await service.runs.start(caller, sandbox_id, conversation, ask)
    if asked.stream or sse.wanted(request):
        return await sse.stream(_events(handle), request=request)
    result = await (_attended(handle, request) if asked.attended else handle.result())
    return Response(
        await encoded_run(result, recorded=handle.recorded), media_type="application/json"
    )


class FastRunRoute(Route):
    """The route of `run` for requests; the one above is for the OpenAPI document. FastAPI's way to
    a function (nested routers, dependencies solved anew each time) takes longer than a short cell.
    """

    def __init__(self) -> None:
        path = f"{router.prefix}/conversations/{{conversation}}/runs"
        super().__init__(path, _run, methods=["POST"])

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL:
            child["route"] = self  # as FastAPI's do; metrics are kept by it
        return match, child


async def _run(request: Request) -> Response:
    names = request.path_params
    return await run(
        names["sandbox_id"], names["conversation"], request, await caller(request), service(request)
    )


@router.post("/conversations/{conversation}/interrupt", responses=documented(404, 409))
async def interrupt(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> InterruptReply:
    """Interrupt what runs now, as Ctrl-C would; the variables stay."""
    return InterruptReply(
        interrupted=await service.runs.interrupt(caller, sandbox_id, conversation)
    )


@router.post("/runs/{run_id}/interrupt", responses=documented(404, 409))
async def interrupt_run(
    sandbox_id: str, run_id: str, caller: CallerDep, service: ServiceDep
) -> InterruptReply:
    """Interrupt this run and no other; one that waits for its turn is taken out of the queue."""
    handle = await service.runs.attach(caller, sandbox_id, run_id)
    return InterruptReply(interrupted=await handle.interrupt())


@router.post("/runs/{run_id}/input", responses=documented(404, 409))
async def answer(
    sandbox_id: str, run_id: str, line: InputLine, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Answer the oldest question of an interactive run."""
    handle = await service.runs.attach(caller, sandbox_id, run_id)
    await handle.answer(None if line.text is None else text_from_json(line.text))
    return OkBody()


async def _attended(handle: RunHandle, request: Request) -> Run:
    """The result, for a caller whose going away ends the run. Awaits nothing before the result
    does: then a short cell is driven by this very task."""
    watching: list[asyncio.Task[None]] = []

    def begin() -> None:
        watching.append(asyncio.create_task(_interrupt_when_gone(handle, request)))

    timer = asyncio.get_running_loop().call_later(_ATTEND_AFTER_S, begin)
    try:
        return await handle.result()
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


async def _interrupt_when_gone(handle: RunHandle, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    await handle.interrupt()


async def _events(handle: RunHandle) -> AsyncIterator[tuple[int, sse.Encoded]]:
    async with aclosing(handle.events()) as events:
        async for number, event in events:
            yield number, await encoded_event(event, recorded=handle.recorded)
