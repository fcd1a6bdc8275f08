"""Background commands of a conversation: they continue after the call that started them."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from sbx.api import sse
from sbx.api.bodies import OkBody, RequestBody
from sbx.api.errors import documented
from sbx.api.v1.dependencies import PREFIX, Target, TargetDep
from sbx.api.v1.runs import StdinPiece
from sbx.protocol.commands import (
    LOG_PIECE,
    LOG_PIECE_MAX,
    WAIT_MAX_S,
    to_json,
)
from sbx.protocol.events import text_from_json
from sbx.runtime.processes.commands import STOP_GRACE_S, BackgroundCommand

router = APIRouter(prefix=f"{PREFIX}/commands", tags=["native"])

_LOOK = documented(404, 409)
_START = documented(404, 409, 429, 504)
_OFFSET_MAX = 1 << 53
Offset = Annotated[int, Query(ge=0, le=_OFFSET_MAX, description="A byte of the log.")]


class NewCommand(RequestBody):
    """`stdin_open`: its standard input may be written to while it runs; otherwise it is empty."""

    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin_open: bool = False


class CommandBody(BaseModel):
    """A background command, see sbx/protocol/commands.py; seconds of the epoch, bytes."""

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
            "honeytoken",
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
    """Text from `offset` to `next_offset`. If `offset` is beyond the requested one, the text before
    it is no longer kept."""

    offset: int
    next_offset: int
    text: str


class Stop(BaseModel):
    """`grace_s`: seconds from SIGTERM to SIGKILL."""

    grace_s: Annotated[float, Field(ge=0, le=60)] = STOP_GRACE_S


@router.post("", responses=_START)
async def start(new: NewCommand, target: TargetDep) -> CommandBody:
    """Start a command in the background, and the kernel if need be."""
    async with target.use("execute", creates=True) as conversation:
        command = await conversation.commands.start(
            new.command,
            cwd=new.cwd,
            env=new.env,
            stdin_open=new.stdin_open,
        )
        body = await _body(command)
    await target.record(
        "command.start",
        command=body.command,
    )
    return body


@router.get("", responses=_LOOK)
async def every(target: TargetDep) -> CommandList:
    """List the running commands and those that ended lately, the newest first."""
    async with target.use("execute", starts=False) as conversation:
        statuses = await conversation.commands.list()
    return CommandList(
        commands=[CommandBody.model_validate(to_json(status)) for status in statuses]
    )


@router.get("/{command_id}", responses=_LOOK)
async def status(command_id: str, target: TargetDep) -> CommandBody:
    """Return its state."""
    async with target.use("execute", starts=False) as conversation:
        return await _body(await conversation.commands.get(command_id))


@router.get("/{command_id}/wait", responses=_LOOK)
async def wait(
    command_id: str,
    target: TargetDep,
    timeout_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = WAIT_MAX_S,
) -> CommandBody:
    """Wait for its end, at most `timeout_s` seconds, and return its state."""
    async with target.use("execute", starts=False) as conversation:
        command = await conversation.commands.get(command_id)
        return CommandBody.model_validate(to_json(await command.wait(timeout_s)))


@router.get("/{command_id}/logs", responses=_LOOK)
async def logs(
    command_id: str,
    target: TargetDep,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=4, le=LOG_PIECE_MAX)] = LOG_PIECE,
) -> LogBody:
    """Return a piece of its output; an empty piece is the end of the log."""
    async with target.use("execute", starts=False) as conversation:
        command = await conversation.commands.get(command_id)
        return LogBody.model_validate(to_json(await command.logs(offset, limit=limit)))


@router.get(
    "/{command_id}/follow",
    response_class=Response,
    responses={**documented(404, 409, 429), 200: {"content": sse.DOCUMENTED}},
)
async def follow(
    command_id: str,
    request: Request,
    target: TargetDep,
    offset: Offset = 0,
) -> Response:
    """Follow its output as events `log`; the id of each is the next offset. The last event is
    `command_end`. `Last-Event-ID` precedes `offset`."""
    after = sse.last_event_id(request) or offset
    events = _events(target, command_id, after)
    return await sse.stream(events, request=request)


@router.post("/{command_id}/stdin", responses=_LOOK)
async def write(
    command_id: str,
    piece: StdinPiece,
    target: TargetDep,
) -> OkBody:
    """Write to its standard input; 409 `stdin_full` until it reads the pending data."""
    async with target.use("execute", starts=False) as conversation:
        command = await conversation.commands.get(command_id)
        await command.write(None if piece.text is None else text_from_json(piece.text))
    return OkBody()


@router.post("/{command_id}/stop", responses=_LOOK)
async def stop(
    command_id: str,
    target: TargetDep,
    order: Stop | None = None,
) -> CommandBody:
    """Send SIGTERM, then SIGKILL. A command that has ended stays as it is."""
    async with target.use("execute", starts=False) as conversation:
        command = await conversation.commands.get(command_id)
        ended = await command.stop(grace_s=(order or Stop()).grace_s)
    await target.record("command.stop", command=ended.id)
    return CommandBody.model_validate(to_json(ended))


async def _body(command: BackgroundCommand) -> CommandBody:
    return CommandBody.model_validate(to_json(await command.status()))


async def _events(
    target: Target, command_id: str, offset: int
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    async with target.use("execute", starts=False) as conversation:
        command = await conversation.commands.get(command_id)
        end = offset
        async with aclosing(command.follow(offset)) as pieces:
            async for piece in pieces:
                end = piece.next_offset
                yield end, {"type": "log", **to_json(piece)}
        status = to_json(await command.status())
    yield end, {"type": "command_end", "command": status}
