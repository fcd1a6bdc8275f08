"""Running code: python/exec and shell/exec, interrupting a run, and following one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.api import sse
from sbx.api.bay.files import relative
from sbx.api.bay.models import (
    Interrupted,
    PythonExec,
    PythonExecResponse,
    ShellExec,
    ShellExecResponse,
    python_body,
    run_id_of,
    shell_body,
)
from sbx.api.bay.replays import HEADER, TAKES_KEY, Answer, answered, fingerprint
from sbx.api.callers import CallerDep, HouseDep
from sbx.api.encoding import encoded_event, encoded_run, event_form
from sbx.api.errors import documented
from sbx.errors import BadRequest
from sbx.protocol.runs import Event, Run, RunEnd
from sbx.runtime.access import Caller
from sbx.runtime.house import House
from sbx.runtime.runs import Ask, RunHandle
from sbx.runtime.sandbox import DEFAULT_CONVERSATION

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["runs"])

Body = Callable[[Run], dict[str, Any]]
_STREAM = {"content": sse.DOCUMENTED}
_ERRORS = documented(404, 409, 429, 504)
_background: set[asyncio.Task[Any]] = set()


@router.post(
    "/python/exec",
    response_model=PythonExecResponse,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=TAKES_KEY,
)
async def python(
    sandbox_id: str, asked: PythonExec, request: Request, caller: CallerDep, house: HouseDep
) -> Response:
    """Run a cell. Code that fails is a success of this call: `success` tells."""
    ask = Ask(
        kind="python",
        code=asked.code,
        description=asked.description,
        tags=asked.tags,
    )
    code = asked.code if asked.include_code else None
    return await _run(
        _Call(request, house, caller, sandbox_id, ask, asked), lambda run: python_body(run, code)
    )


@router.post(
    "/shell/exec",
    response_model=ShellExecResponse,
    responses={**_ERRORS, 200: _STREAM},
    openapi_extra=TAKES_KEY,
)
async def shell(
    sandbox_id: str, asked: ShellExec, request: Request, caller: CallerDep, house: HouseDep
) -> Response:
    """Run a command with /bin/bash -c. A command that fails is a success of this call."""
    if asked.cwd is not None:
        relative(asked.cwd)
    ask = Ask(
        kind="shell",
        code=asked.command,
        cwd=asked.cwd,
        description=asked.description,
        tags=asked.tags,
    )
    command = asked.command if asked.include_code else None
    return await _run(
        _Call(request, house, caller, sandbox_id, ask, asked), lambda run: shell_body(run, command)
    )


@router.api_route("/browser/{rest:path}", methods=["GET", "POST"], include_in_schema=False)
async def browser(sandbox_id: str, rest: str, caller: CallerDep, house: HouseDep) -> None:
    """Bay's browser is not offered by any policy."""
    view = await house.sandboxes.get(caller, sandbox_id)
    raise BadRequest(
        "no policy offers a browser",
        code="capability_not_supported",
        details={"capability": "browser", "available": list(view.policy.capabilities)},
    )


@router.post("/interrupt", responses=documented(404, 409))
async def interrupt(sandbox_id: str, caller: CallerDep, house: HouseDep) -> Interrupted:
    """Interrupt what runs now, as Ctrl-C would; the variables stay."""
    done = await house.runs.interrupt(caller, sandbox_id, DEFAULT_CONVERSATION)
    return Interrupted(interrupted=done)


@router.get(
    "/runs/{run_id}/events",
    response_class=Response,
    responses={**documented(404), 200: _STREAM},
)
async def follow(
    sandbox_id: str, run_id: str, request: Request, caller: CallerDep, house: HouseDep
) -> Response:
    """The events of a run after `Last-Event-ID`, while it lives and for a minute after its end."""
    handle = await house.runs.attach(caller, sandbox_id, run_id_of(run_id))
    body = python_body if handle.kind == "python" else shell_body
    events = _told(handle, lambda run: body(run, None), sse.last_event_id(request))
    return await sse.stream(events, request=request)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an exec route: who asks for what, and the model that its key is held against."""

    request: Request
    house: House
    caller: Caller
    sandbox_id: str
    ask: Ask
    asked: PythonExec | ShellExec

    async def start(self) -> RunHandle:
        """Bay takes any time-out up to 300 s: one beyond the policy's wall_time is that."""
        view = await self.house.sandboxes.get(self.caller, self.sandbox_id)
        timeout_s = min(float(self.asked.timeout), view.policy.limits.wall_time)
        return await self.house.runs.start(
            self.caller,
            self.sandbox_id,
            DEFAULT_CONVERSATION,
            replace(self.ask, timeout_s=timeout_s),
        )


async def _run(call: _Call, body: Body) -> Response:
    if call.asked.stream or sse.wanted(call.request):
        if HEADER in call.request.headers:
            return await _streamed_once(call, body)
        events = _told(await call.start(), body, 0)
        return await sse.stream(events, request=call.request)

    async def work() -> Answer:
        handle = await call.start()
        return 200, await encoded_run(await handle.result(), body)

    return await answered(call.request, call.house, call.caller, call.asked, work)


async def _streamed_once(call: _Call, body: Body) -> Response:
    """A stream under an Idempotency-Key: the first call runs and tells; to the same call again only
    the end is told. The run is awaited by a task of its own, so that its answer is kept also when
    the client goes."""
    started: asyncio.Future[RunHandle] = asyncio.get_running_loop().create_future()

    async def work() -> Answer:
        handle = await call.start()
        started.set_result(handle)
        return 200, await encoded_run(await handle.result(), body)

    key = call.request.headers[HEADER]
    asked = fingerprint(call.request.method, call.request.url.path, call.asked)
    answer = asyncio.ensure_future(call.house.replies.once(call.caller, key, asked, work))
    _background.add(answer)
    answer.add_done_callback(_forget)
    await asyncio.wait((started, answer), return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        return await sse.stream(_told(started.result(), body, 0), request=call.request)
    _, content = await answer
    return await sse.stream(_end_only(content), request=call.request)


def _forget(answer: asyncio.Task[Any]) -> None:
    _background.discard(answer)
    if not answer.cancelled():
        answer.exception()  # whoever waited was told; a stream tells it by its last event


async def _told(
    handle: RunHandle, body: Body, after: int
) -> AsyncIterator[tuple[int, sse.Encoded]]:
    async with aclosing(handle.events(after)) as events:
        async for number, event in events:
            yield number, await encoded_event(event, partial(_as_json, body=body))


async def _end_only(content: bytes) -> AsyncIterator[tuple[int, sse.Encoded]]:
    """`content` is the JSON of an object with members, as `encode` writes it."""
    yield 1, sse.Encoded("run_end", b'{"type":"run_end",' + content[1:])


def _as_json(event: Event, body: Body) -> dict[str, Any]:
    """The end carries the usual body too, so that either reader finds what it knows."""
    told = event_form(event)
    return {**told, **body(event.run)} if isinstance(event, RunEnd) else told
