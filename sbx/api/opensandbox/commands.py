"""Commands with their events, background commands with logs, and sessions of bash."""

import asyncio
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from io import StringIO
from typing import Annotated, Any

from cachetools import LRUCache
from dotenv import dotenv_values
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from sbx.api import sse
from sbx.api.bodies import ForeignBody, body_of
from sbx.api.errors import iso
from sbx.api.opensandbox.execd import INTERPRETER_PROBE, PREFIX, ExecdTarget, TargetDep
from sbx.api.opensandbox.stream import Event, event, reply, run_events
from sbx.errors import BadRequest, Conflict, InvalidPath, NotFound, TooLarge
from sbx.protocol.commands import LOG_PIECE_MAX, CommandStatus
from sbx.service.run import RunRequest

router = APIRouter(prefix=PREFIX, include_in_schema=False)

_STOP_GRACE_S = 3.0
_LOGS_MAX = 8 << 20  # bytes of one reply
_USER = (1000, "sandbox")  # inside, always
_ENV_FILE = "/workspace/.opensandbox_env"  # where the SDK's set_env appends lines
_ENV_MAX = 64 << 10  # bytes of it; the parser takes 3 µs for one
_VARIABLE_SIZE = 200  # bytes, about, of one without its text
_SESSIONS = "/tmp/.opensandbox-sessions"  # noqa: S108  # the jail's own tmpfs
_SESSION_ID = re.compile(r"[0-9a-f]{32}")
# bash writes its state when it ends, and the next run of the session reads it.
_SESSION = (
    '__state={path}; [ -r "$__state" ] && . "$__state" 2>/dev/null; '
    "__save() {{ {{ declare -p | grep -v '^declare -[a-zA-Z]*r'; declare -f; shopt -p; set +o; "
    'printf "cd %q\\n" "$PWD"; }} > "$__state.new" 2>/dev/null; '
    'mv "$__state.new" "$__state"; }}; '
    "trap __save EXIT; "
)


def _size_of(variables: Mapping[str, str]) -> int:
    texts = sum(len(name) + len(value) for name, value in variables.items())
    return texts + _VARIABLE_SIZE * (1 + len(variables))


_parsed: LRUCache[tuple[str, float, int], dict[str, str]] = LRUCache(8 << 20, _size_of)


class RunCommand(ForeignBody):
    """`timeout` in milliseconds."""

    command: str | None = None
    argv: list[str] | None = None
    cwd: str | None = None
    background: bool = False
    timeout: Annotated[float, Field(ge=0)] | None = None
    uid: int | None = None
    gid: int | None = None
    envs: dict[str, str] | None = None


class NewSession(ForeignBody):
    cwd: str | None = None


class SessionRun(ForeignBody):
    """`timeout` in milliseconds."""

    command: str
    cwd: str | None = None
    timeout: Annotated[float, Field(ge=0)] | None = None


@router.post("/command")
async def run(request: Request, target: TargetDep) -> Response:
    """Run a command by bash, and stream its events; or start it in the background."""
    new = await body_of(request, RunCommand)
    text = _text(new)
    if any(each not in (None, _USER[0]) for each in (new.uid, new.gid)):
        raise BadRequest(
            f"a command runs as the user {_USER[1]} ({_USER[0]}) of the sandbox",
            code="NOT_SUPPORTED",
        )
    if INTERPRETER_PROBE in text:
        await target.open_interpreter_port()
    env = {**await _kept_env(target), **(new.envs or {})}
    timeout_s = new.timeout / 1000 if new.timeout else None
    if new.background:
        return await reply(_started(target, text, new.cwd, env, timeout_s), request)
    return await _streamed(target, request, text, new.cwd, env, timeout_s)


async def _streamed(
    target: ExecdTarget,
    request: Request,
    text: str,
    cwd: str | None,
    env: Mapping[str, str],
    timeout_s: float | None,
) -> Response:
    sse.reserve(request)
    await _check_directory(target, cwd)
    handle = await target.start(
        RunRequest(kind="shell", code=text, cwd=cwd, env=env, timeout_s=timeout_s)
    )
    return await reply(run_events(handle, command=True), request)


async def _kept_env(target: ExecdTarget) -> dict[str, str]:
    """Return the variables of the SDK's `set_env`, which appends lines to the file EXECD_ENVS.
    Raise TooLarge for a file of more than 64 KiB."""
    kept: dict[str, str] = {}
    async with target.use() as conversation:
        with suppress(NotFound, InvalidPath):
            async with await conversation.files.open_stream(_ENV_FILE) as stream:
                if stream.size > _ENV_MAX:
                    raise TooLarge(
                        f"{_ENV_FILE} is larger than {_ENV_MAX >> 10} KiB",
                        hint="remove variables that you no longer need from this file",
                        details={"limit": _ENV_MAX},
                    )
                key = target.sandbox.id, stream.modified_s, stream.size
                if (parsed := _parsed.get(key)) is None:
                    content = b"".join([chunk async for chunk in stream.chunks()])
                    parsed = _parsed[key] = await asyncio.to_thread(_variables, content)
                kept = parsed
    return {"EXECD_ENVS": _ENV_FILE, **target.labels.get("env", {}), **kept}


def _variables(content: bytes) -> dict[str, str]:
    text = StringIO(content.decode("utf-8", "replace"))
    values = dotenv_values(stream=text, interpolate=False)
    return {name: value for name, value in values.items() if value is not None}


async def _check_directory(target: ExecdTarget, cwd: str | None) -> None:
    """Raise BadRequest for a directory that does not exist: the stream could not report it."""
    if cwd is None:
        return
    async with target.use() as conversation:
        live = conversation.start_shell(f"test -d {shlex.quote(cwd)}")
        if not (await live.result()).ok:
            raise BadRequest(f"the directory {cwd[:300]} does not exist")


def _text(new: RunCommand) -> str:
    if (new.command is None) == (new.argv is None):
        raise BadRequest("exactly one of command and argv is needed")
    if new.gid is not None and new.uid is None:
        raise BadRequest("gid needs uid")
    if new.command is not None:
        return new.command
    if not new.argv or not new.argv[0]:
        raise BadRequest("argv is empty")
    return f"exec {shlex.join(new.argv)}"


async def _started(
    target: ExecdTarget, text: str, cwd: str | None, env: Mapping[str, str], timeout_s: float | None
) -> AsyncIterator[tuple[int, Event]]:
    await _check_directory(target, cwd)
    if timeout_s is not None:
        text = f"exec timeout -k 3 {timeout_s:g} /bin/bash -c {shlex.quote(text)}"
    async with target.use() as conversation:
        command = await conversation.commands.start(text, cwd=cwd, env=env)
    yield 1, event("init", text=command.id)
    yield 2, event("execution_complete", execution_time=0)


@router.delete("/command")
async def interrupt(target: TargetDep, id: Annotated[str, Query()]) -> Response:
    """End a command: SIGINT or SIGTERM to its group, then SIGKILL."""
    if id.startswith("cmd-"):
        async with target.use(starts=False) as conversation:
            command = await conversation.commands.get(id)
            if not (await command.status()).running:
                raise Conflict(f"the command {id} has ended", code="RUNTIME_ERROR")
            await command.stop(grace_s=_STOP_GRACE_S)
        return Response()
    handle = await target.service.runs.attach(target.caller, target.sandbox.id, id)
    if not await handle.interrupt():
        raise Conflict(f"the command {id[:80]} has ended", code="RUNTIME_ERROR")
    return Response()


@router.get("/command/status/{command_id}")
async def status(command_id: str, target: TargetDep) -> dict[str, Any]:
    if command_id.startswith("cmd-"):
        async with target.use(starts=False) as conversation:
            return _shown(await (await conversation.commands.get(command_id)).status())
    row = await target.service.runs.history.entry(target.caller, target.sandbox.id, command_id)
    body: dict[str, Any] = {
        "id": row.id,
        "content": row.code,
        "running": row.run is None,
        "started_at": iso(row.started_at),
    }
    if row.run is not None:
        body["exit_code"] = -1 if row.run.exit_code is None else row.run.exit_code
        if row.ended_at is not None:
            body["finished_at"] = iso(row.ended_at)
        if row.run.error is not None:
            body["error"] = row.run.error.value
    return body


def _shown(status: CommandStatus) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": status.id,
        "content": status.command,
        "running": status.running,
        "started_at": iso(status.started_at),
    }
    if not status.running:
        body["exit_code"] = -1 if status.exit_code is None else status.exit_code
        if status.ended_at is not None:
            body["finished_at"] = iso(status.ended_at)
        if status.reason:
            body["error"] = status.reason
    return body


@router.get("/command/{command_id}/logs")
async def logs(
    command_id: str, target: TargetDep, cursor: Annotated[int, Query(ge=0)] = 0
) -> Response:
    """Return the output of a background command from a byte on, both streams in order."""
    if not command_id.startswith("cmd-"):
        raise NotFound(f"{command_id[:80]} is not a background command")
    text, offset = [], cursor
    async with target.use(starts=False) as conversation:
        command = await conversation.commands.get(command_id)
        while offset - cursor < _LOGS_MAX:
            piece = await command.logs(offset, limit=LOG_PIECE_MAX)
            offset = max(offset, piece.next_offset)
            if not piece.text:
                break
            text.append(piece.text)
    return Response(
        "".join(text).encode("utf-8", "replace"),
        media_type="text/plain",
        headers={"EXECD-COMMANDS-TAIL-CURSOR": str(offset)},
    )


# -- sessions of bash ------------------------------------------------------------------------------


@router.post("/session")
async def create_session(request: Request, target: TargetDep) -> dict[str, str]:
    """Create a bash whose directory, variables and functions stay between its runs."""
    new = await body_of(request, NewSession) if await request.body() else NewSession()
    await _check_directory(target, new.cwd)
    session_id = secrets.token_hex(16)
    begin = f"cd {shlex.quote(new.cwd)}" if new.cwd else "cd /workspace"
    await _in_sessions(target, f'printf "%s\\n" {shlex.quote(begin)} > {session_id}')
    return {"session_id": session_id}


@router.post("/session/{session_id}/run")
async def run_in_session(session_id: str, request: Request, target: TargetDep) -> Response:
    new = await body_of(request, SessionRun)
    path = await _session_file(target, session_id)
    cd = f"cd {shlex.quote(new.cwd)} || exit; " if new.cwd else ""
    text = f"{_SESSION.format(path=path)}{cd}{new.command}"
    timeout_s = new.timeout / 1000 if new.timeout else None
    await _check_directory(target, new.cwd)
    return await _streamed(target, request, text, None, await _kept_env(target), timeout_s)


@router.delete("/session/{session_id}")
async def delete_session(session_id: str, target: TargetDep) -> Response:
    path = await _session_file(target, session_id)
    await _in_sessions(target, f"rm -f {path}")
    return Response()


async def _session_file(target: ExecdTarget, session_id: str) -> str:
    """Return the path of the state of a session. Raise NotFound."""
    if _SESSION_ID.fullmatch(session_id) and await _in_sessions(target, f"test -f {session_id}"):
        return f"{_SESSIONS}/{session_id}"
    raise NotFound(f"the session {session_id[:80]} does not exist")


async def _in_sessions(target: ExecdTarget, command: str) -> bool:
    async with target.use() as conversation:
        live = conversation.start_shell(
            f"mkdir -p {_SESSIONS} && cd {_SESSIONS} && {command}", timeout=_STOP_GRACE_S * 10
        )
        return (await live.result()).ok
