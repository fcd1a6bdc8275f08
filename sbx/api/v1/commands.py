"""Background commands of a conversation: they go on when the call that started them is over."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.errors import documented
from sbx.protocol.commands import (
    LOG_PIECE,
    LOG_PIECE_MAX,
    WAIT_MAX_S,
    piece_to_json,
    status_to_json,
)
from sbx.protocol.events import text_from_json
from sbx.runtime.processes.commands import STOP_GRACE_S, BackgroundCommand
from sbx.service.auth import Caller
from sbx.service.service import Service

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}/commands", tags=["native"]
)
of_runs = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/runs/{run_id}", tags=["native"])

_LOOK = documented(404, 409)
_START = documented(404, 409, 429, 504)
_OFFSET_MAX = 1 << 53
Offset = Annotated[int, Query(ge=0, le=_OFFSET_MAX, description="A byte of the log.")]


class NewCommand(BaseModel):
    """`stdin_open`: it may be written to while it runs; without it there is nothing to read."""

    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin_open: bool = False


class CommandBody(BaseModel):
    """A background command, as sbx/protocol/commands.py tells it; seconds of the epoch, bytes."""

    id: str
    command: str
    state: Literal["running", "exited", "stopped", "killed", "failed"]
    started_at: float
    ended_at: float | None
    exit_code: int | None
    cause: (
        Literal[
            "memory",
            "pids",
            "cpu",
            "disk",
            "output",
            "tripwire",
            "descriptors",
            "crashed",
            "interrupted",
            "stopped",
            "evicted",
            "closed",
        ]
        | None
    )
    reason: str
    log_begin: int
    log_end: int
    stdin_open: bool
    state_lost: bool


class CommandList(BaseModel):
    commands: list[CommandBody]


class LogBody(BaseModel):
    """Text from `offset` to `next_offset`; where `offset` is beyond the one that was asked for,
    what lies between is kept no more."""

    offset: int
    next_offset: int
    text: str


class StdinReply(BaseModel):
    """More of a standard input; null is its end."""

    text: str | None


class Stop(BaseModel):
    """`grace_s`: seconds from SIGTERM to SIGKILL."""

    grace_s: Annotated[float, Field(ge=0, le=60)] = STOP_GRACE_S


@router.post("", responses=_START)
async def start(
    sandbox_id: str, conversation: str, asked: NewCommand, caller: CallerDep, service: ServiceDep
) -> CommandBody:
    """Start a command in the background; the kernel is started where there is none."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", conversation=conversation
    ) as use:
        command = await use.conversation(conversation).commands.start(
            asked.command,
            cwd=asked.cwd,
            env=asked.env,
            stdin_open=asked.stdin_open,
        )
        told = await _body(command)
    await service.recording.record(
        caller,
        "command.start",
        use.view.id,
        conversation=conversation,
        command=told.command,
    )
    return told


@router.get("", responses=_LOOK)
async def every(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> CommandList:
    """Those that run, and those that ended a while ago; the newest first."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        found = await (await use.existing(conversation)).commands.list()
        told = [CommandBody.model_validate(status_to_json(one)) for one in found]
        return CommandList(commands=told)


@router.get("/{command_id}", responses=_LOOK)
async def status(
    sandbox_id: str, conversation: str, command_id: str, caller: CallerDep, service: ServiceDep
) -> CommandBody:
    """How it is now."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        return await _body(await (await use.existing(conversation)).commands.get(command_id))


@router.get("/{command_id}/wait", responses=_LOOK)
async def wait(
    sandbox_id: str,
    conversation: str,
    command_id: str,
    caller: CallerDep,
    service: ServiceDep,
    timeout_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = WAIT_MAX_S,
) -> CommandBody:
    """Its end, or how it is after so many seconds."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        command = await (await use.existing(conversation)).commands.get(command_id)
        return CommandBody.model_validate(status_to_json(await command.wait(timeout_s)))


@router.get("/{command_id}/logs", responses=_LOOK)
async def logs(
    sandbox_id: str,
    conversation: str,
    command_id: str,
    caller: CallerDep,
    service: ServiceDep,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=4, le=LOG_PIECE_MAX)] = LOG_PIECE,
) -> LogBody:
    """A piece of what it wrote; an empty one is the end of what there is."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        command = await (await use.existing(conversation)).commands.get(command_id)
        return LogBody.model_validate(piece_to_json(await command.logs(offset, limit=limit)))


@router.get(
    "/{command_id}/follow",
    response_class=Response,
    responses={**documented(404, 409, 429), 200: {"content": sse.DOCUMENTED}},
)
async def follow(
    sandbox_id: str,
    conversation: str,
    command_id: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    offset: Offset = 0,
) -> Response:
    """What it wrote and writes, as events `log`, each with the next offset for its id; the last one
    is `command_end`. `Last-Event-ID` goes before `offset`."""
    after = sse.last_event_id(request) or offset
    events = _events(service, caller, (sandbox_id, conversation, command_id), after)
    return await sse.stream(events, request=request)


@router.post("/{command_id}/stdin", responses=_LOOK)
async def write(
    sandbox_id: str,
    conversation: str,
    command_id: str,
    written: StdinReply,
    caller: CallerDep,
    service: ServiceDep,
) -> OkBody:
    """Feed its standard input; 409 `stdin_full` while it does not read what it has."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        command = await (await use.existing(conversation)).commands.get(command_id)
        await command.write(None if written.text is None else text_from_json(written.text))
    return OkBody()


@router.post("/{command_id}/stop", responses=_LOOK)
async def stop(
    sandbox_id: str,
    conversation: str,
    command_id: str,
    caller: CallerDep,
    service: ServiceDep,
    asked: Stop | None = None,
) -> CommandBody:
    """SIGTERM, then SIGKILL; what has ended stays as it is."""
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        command = await (await use.existing(conversation)).commands.get(command_id)
        ended = await command.stop(grace_s=(asked or Stop()).grace_s)
    await service.recording.record(
        caller, "command.stop", use.view.id, conversation=conversation, command=ended.id
    )
    return CommandBody.model_validate(status_to_json(ended))


@of_runs.post("/stdin", responses=_LOOK)
async def feed(
    sandbox_id: str, run_id: str, written: StdinReply, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Feed a command that goes on as a run, and was started with `stdin_open`."""
    handle = await service.runs.attach(caller, sandbox_id, run_id)
    await handle.write(None if written.text is None else text_from_json(written.text))
    return OkBody()


async def _body(command: BackgroundCommand) -> CommandBody:
    return CommandBody.model_validate(status_to_json(await command.status()))


async def _events(
    service: Service, caller: Caller, names: tuple[str, str, str], offset: int
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    sandbox_id, conversation, command_id = names
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        command = await (await use.existing(conversation)).commands.get(command_id)
        at = offset
        async with aclosing(command.follow(offset)) as pieces:
            async for piece in pieces:
                at = piece.next_offset
                yield at, {"type": "log", **piece_to_json(piece)}
        ended = status_to_json(await command.status())
    yield at, {"type": "command_end", "command": ended}
