"""process.Process: commands and terminals, followed live."""

import asyncio
import base64
import shlex
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from sbx.api import sse
from sbx.api.auth import StackDep
from sbx.api.e2b import connect, paths
from sbx.api.e2b.connect import Message
from sbx.api.e2b.target import E2bTarget, TargetDep
from sbx.api.surfaces import ENVD_PORT
from sbx.errors import BadRequest, Conflict, Denied, NotFound
from sbx.runtime.conversation import Conversation
from sbx.runtime.processes.live_processes import LiveProcess, ProcessEnd

router = APIRouter(prefix=f"/e2b/{ENVD_PORT}/process.Process", include_in_schema=False)

_PIECE = 32 << 10  # bytes of output in one message
_KEEPALIVE: dict[str, Any] = {"event": {"keepalive": {}}}
_SIGNALS = {
    "SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM,
    9: signal.SIGKILL, 15: signal.SIGTERM,
}  # fmt: skip
USERS = ("user", "root")


def _decoded(value: object) -> object:
    """Return the bytes of a base64 text, with the alphabet of URLs as well: protobuf allows it."""
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value.replace("-", "+").replace("_", "/") + "==")
    except ValueError:
        raise ValueError("not base64") from None


_Bytes = Annotated[bytes, BeforeValidator(_decoded)]
_Dimension = Annotated[int, Field(ge=1, le=1000)]


class Selector(Message):
    pid: int | None = None
    tag: str | None = None


class Config(Message):
    cmd: Annotated[str, Field(min_length=1)]
    args: list[str] | None = None
    envs: dict[str, str] | None = None
    cwd: str | None = None


class Size(Message):
    cols: _Dimension = 80
    rows: _Dimension = 24


class Pty(Message):
    size: Size = Field(default_factory=Size)


class StartRequest(Message):
    process: Config
    stdin: bool | None = None
    pty: Pty | None = None
    tag: str | None = None


class SelectorRequest(Message):
    process: Selector


class UpdateRequest(SelectorRequest):
    pty: Pty | None = None


class SignalRequest(SelectorRequest):
    signal: str | int = ""


class Input(Message):
    stdin: _Bytes | None = None
    pty: _Bytes | None = None


class InputRequest(SelectorRequest):
    input: Input


class DataPart(Message):
    input: Input


class StreamInputRequest(Message):
    start: SelectorRequest | None = None
    data: DataPart | None = None


def check_user(request: Request) -> None:
    """Accept the default user. Raise Denied for another one: inside, there is only one."""
    header = request.headers.get("authorization", "")
    if not header:
        return
    scheme, _, text = header.partition(" ")
    try:
        name = base64.b64decode(text).decode().partition(":")[0]
    except ValueError:
        name = ""
    if scheme.lower() != "basic" or name not in USERS:
        raise Denied(f"the user {name[:40]!r} does not exist", code="unauthorized")


@router.post("/Start")
async def start(request: Request, target: TargetDep, stack: StackDep) -> Response:
    """Start a program, and stream its output. It continues if the client disconnects."""
    check_user(request)
    sse.reserve(request)
    new = await connect.first(request, StartRequest)
    conversation = await stack.enter_async_context(target.use())
    config = new.process
    cwd = paths.absolute(config.cwd)
    await _check_directory(conversation, cwd)
    process = await conversation.live_processes.start(
        [config.cmd, *(config.args or ())],
        cwd=cwd,
        env={**target.environment, "PWD": cwd, **(config.envs or {})},
        stdin_open=new.stdin is not False,
        terminal=None if new.pty is None else (new.pty.size.rows, new.pty.size.cols),
        tag=new.tag,
        timeout_s=connect.timeout_s(request),
    )
    await target.record("process.start", command=shlex.join(process.argv)[:2000])
    return await connect.stream(request, _events(process), keepalive=_KEEPALIVE, deadline=False)


@router.post("/Connect")
async def connect_to(request: Request, target: TargetDep, stack: StackDep) -> Response:
    """Stream the later output of a process."""
    selector = (await connect.first(request, SelectorRequest)).process
    conversation = await stack.enter_async_context(target.use(starts=False))
    events = _events(_find(conversation, selector))
    return await connect.stream(request, events, keepalive=_KEEPALIVE)


@router.post("/List")
async def list_(target: TargetDep) -> dict[str, Any]:
    async with target.use(starts=False) as conversation:
        return {
            "processes": [_shown(each, target) for each in conversation.live_processes.running()]
        }


@router.post("/SendSignal")
async def send_signal(request: Request, target: TargetDep) -> dict[str, Any]:
    message = await connect.unary(request, SignalRequest)
    if (number := _SIGNALS.get(message.signal)) is None:
        raise BadRequest(f"{message.signal!r} is not SIGNAL_SIGKILL or SIGNAL_SIGTERM")
    async with target.use(starts=False) as conversation:
        process = _find(conversation, message.process)
        if not process.running:
            raise NotFound(f"the process {process.pid} has ended")
        await process.signal(number)
    return {}


@router.post("/SendInput")
async def send_input(request: Request, target: TargetDep) -> dict[str, Any]:
    message = await connect.unary(request, InputRequest)
    async with target.use(starts=False) as conversation:
        await _feed(_find(conversation, message.process), message.input)
    return {}


@router.post("/StreamInput")
async def stream_input(request: Request, target: TargetDep) -> Response:
    """Pass input on as it arrives. It counts among the streams of its owner, for each keeps up to a
    message in memory."""
    sse.reserve(request)
    async with target.use(starts=False) as conversation:
        try:
            async with asyncio.timeout(connect.timeout_s(request)):
                has_process = await _feed_all(request, conversation)
        except TimeoutError:
            return await connect.stream(request, _message(connect.LATE), keepalive=_KEEPALIVE)
    if not has_process:
        raise BadRequest("the first message must name the process")
    return await connect.stream(request, _message({}), keepalive=_KEEPALIVE)


async def _feed_all(request: Request, conversation: Conversation) -> bool:
    """Pass the messages on to their process, and return whether they named one."""
    process: LiveProcess | None = None
    async with aclosing(connect.messages(request)) as contents:
        async for content in contents:
            message = connect.parse(content, StreamInputRequest)
            if message.start is not None:
                process = _find(conversation, message.start.process)
            elif message.data is not None and process is not None:
                await _feed(process, message.data.input)
    return process is not None


async def _message(message: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield message


@router.post("/CloseStdin")
async def close_stdin(request: Request, target: TargetDep) -> dict[str, Any]:
    message = await connect.unary(request, SelectorRequest)
    async with target.use(starts=False) as conversation:
        await _find(conversation, message.process).close_stdin()
    return {}


@router.post("/Update")
async def update(request: Request, target: TargetDep) -> dict[str, Any]:
    """Set the size of a terminal."""
    message = await connect.unary(request, UpdateRequest)
    async with target.use(starts=False) as conversation:
        process = _find(conversation, message.process)
        if message.pty is not None:
            await process.resize(message.pty.size.rows, message.pty.size.cols)
    return {}


def _find(conversation: Conversation, selector: Selector) -> LiveProcess:
    return conversation.live_processes.find(pid=selector.pid, tag=selector.tag)


async def _feed(process: LiveProcess, new: Input) -> None:
    data = new.pty if process.at_terminal else new.stdin
    if data is None:
        raise Conflict(f"the process {process.pid} has another kind of input", code="wrong_input")
    await process.write(data)


async def _check_directory(conversation: Conversation, cwd: str) -> None:
    """Raise BadRequest for a directory that does not exist: the stream could not report it."""
    if cwd in (paths.HOME, "/"):
        return
    live = conversation.start_shell(f"test -d {shlex.quote(cwd)}")
    if not (await live.result()).ok:
        raise BadRequest(f"cwd {cwd[:300]!r} does not exist")


def _shown(process: LiveProcess, target: E2bTarget) -> dict[str, Any]:
    hidden = {*target.environment, "PWD"}
    envs = {name: value for name, value in process.env.items() if name not in hidden}
    cmd, *args = process.argv
    body: dict[str, Any] = {
        "config": {"cmd": cmd, "args": args, "envs": envs, "cwd": process.cwd},
        "pid": process.pid,
    }
    if process.tag is not None:
        body["tag"] = process.tag
    return body


async def _events(process: LiveProcess) -> AsyncGenerator[dict[str, Any], None]:
    async with process.attach() as client:
        yield {"event": {"start": {"pid": process.pid}}}
        async for stream, data in client:
            for begin in range(0, len(data), _PIECE):
                piece = base64.b64encode(data[begin : begin + _PIECE]).decode()
                yield {"event": {"data": {stream: piece}}}
    assert process.end is not None  # else there would be another piece of output
    end = process.end
    if end.timed_out:
        yield connect.end_of_stream("deadline_exceeded", "the time of the process is over")
    elif end.exit_code is None and end.signal is None:
        yield connect.end_of_stream("unavailable", f"the process was lost: {end.reason}")
    else:
        yield {"event": {"end": end_message(end)}}


def end_message(end: ProcessEnd) -> dict[str, Any]:
    """Return a known end of a process as EndEvent."""
    if end.signal is not None:
        text = f"signal: {_signal_name(end.signal)}"
        return {"exitCode": -1, "exited": False, "status": text, "error": text}
    text = f"exit status {end.exit_code}"
    body: dict[str, Any] = {"exitCode": end.exit_code, "exited": True, "status": text}
    return body if end.exit_code == 0 else {**body, "error": text}


def _signal_name(number: int) -> str:
    return (signal.strsignal(number) or str(number)).lower()
