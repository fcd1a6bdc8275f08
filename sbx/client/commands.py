"""Background commands of a conversation over there, with the methods of the embedded ones."""

import asyncio
import builtins
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sbx.client import checks
from sbx.client.conversation_calls import SandboxState
from sbx.client.errors import failure
from sbx.client.http import connection_lost, query, target
from sbx.client.http_connection import ConnectionLost
from sbx.errors import Broken, Unavailable
from sbx.protocol.commands import (
    LOG_PIECE,
    WAIT_MAX_S,
    CommandStatus,
    LogPiece,
    piece_from_json,
    status_from_json,
)
from sbx.protocol.events import text_to_json

_REATTACH_S = 55.0
_REATTACH_PAUSE_S = 0.25
_BEYOND_S = 10.0  # for an answer, beyond what was asked to be waited for
_STOP_GRACE_S = 2.0


class RemoteCommand:
    """One background command in a service."""

    def __init__(self, held: SandboxState, path: str, command_id: str) -> None:
        self.id = command_id
        self._held = held
        self._path = f"{path}{target(command_id)}"

    async def status(self) -> CommandStatus:
        """How it is now. Raises NotFound once it is forgotten."""
        return status_from(await _call(self._held, "GET", self._path))

    async def logs(self, offset: int = 0, *, limit: int = LOG_PIECE) -> LogPiece:
        """What it wrote, from this byte on: at most `limit` bytes. Where the piece begins later
        than was asked for, what lies between is kept no more; an empty one is the end of the log.

        Raises BadRequest `invalid_offset`.
        """
        path = f"{self._path}/logs{query({'offset': offset, 'limit': limit})}"
        return _piece(await _call(self._held, "GET", path))

    async def follow(self, offset: int = 0) -> AsyncGenerator[LogPiece, None]:
        """What it wrote from this byte on, and what it writes, until it has ended. When the
        connection breaks it is taken up again."""
        self._held.check()
        loop, at = asyncio.get_running_loop(), offset
        deadline = loop.time() + _REATTACH_S
        while True:
            lost = ConnectionLost("the stream ended before the command did")
            try:
                path = f"{self._path}/follow{query({'offset': at})}"
                async with aclosing(self._held.wire.events("GET", path)) as events:
                    async for _, kind, data in events:
                        deadline = loop.time() + _REATTACH_S
                        if kind == "failure":
                            raise failure(data)
                        if kind == "command_end":
                            return
                        piece = _piece(_decoded(data))
                        at = piece.next_offset
                        yield piece
            except ConnectionLost as error:
                lost = error
            except Unavailable as error:
                if error.code not in ("service_unreachable", "timeout"):
                    raise
                lost = ConnectionLost(error.message)
            if loop.time() > deadline:
                raise connection_lost(self._held.wire.address, str(lost)) from lost
            await asyncio.sleep(_REATTACH_PAUSE_S)

    async def write(self, text: str | None) -> None:
        """Feed its standard input, which was left open at the start; None closes it. Does not wait
        for the command to read: raises Conflict `stdin_full` instead, and `stdin_closed`."""
        told = None if text is None else text_to_json(checks.text(text, "stdin"))
        await _call(self._held, "POST", f"{self._path}/stdin", {"text": told})

    async def stop(self, *, grace_s: float = _STOP_GRACE_S) -> CommandStatus:
        """SIGTERM to its process group, and SIGKILL after `grace_s` seconds; how it ended. What has
        ended stays as it is, and what it left in the background goes on."""
        path, ask = f"{self._path}/stop", {"grace_s": grace_s}
        return status_from(await _call(self._held, "POST", path, ask, wait_s=grace_s, again=True))

    async def wait(self, timeout: float | None = None) -> CommandStatus:
        """Wait for its end, at most `timeout` seconds; how it is then."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = WAIT_MAX_S if deadline is None else min(WAIT_MAX_S, deadline - loop.time())
            path = f"{self._path}/wait{query({'timeout_s': round(max(0.0, left), 3)})}"
            status = status_from(await _call(self._held, "GET", path, wait_s=max(0.0, left)))
            if not status.running or (deadline is not None and loop.time() >= deadline):
                return status


class RemoteCommands:
    """Background commands by their ids. Its methods may be called concurrently from one event
    loop."""

    def __init__(self, held: SandboxState, path: str) -> None:
        """`path` is that of the conversation."""
        self._held = held
        self._path = f"{path}/commands"

    async def start(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
    ) -> RemoteCommand:
        """Start `/bin/bash -c command` beside the kernel, which is started where there is none.

        Raises Denied, BadRequest, TooLarge, Closed as a shell command does, Conflict
        `too_many_commands`, Unavailable `no_space`, and what starting a kernel raises.
        """
        ask = {
            "command": checks.text(command, "command"),
            "cwd": cwd if cwd is None else checks.path(cwd),
            "env": checks.environment(env),
            "stdin_open": stdin_open,
        }
        told = status_from(await _call(self._held, "POST", self._path, ask, wait_s=30.0))
        return RemoteCommand(self._held, self._path, told.id)

    async def get(self, command_id: str) -> RemoteCommand:
        """A command by its id, also one that has ended. Raises NotFound, Closed."""
        command = RemoteCommand(self._held, self._path, command_id)
        await command.status()
        return command

    async def list(self) -> builtins.list[CommandStatus]:
        """Those that run and those that ended a while ago, the newest first."""
        told = await _call(self._held, "GET", self._path)
        return [status_from(one) for one in told["commands"]]


async def _call(
    held: SandboxState,
    method: str,
    path: str,
    ask: Mapping[str, Any] | None = None,
    *,
    wait_s: float = 0.0,
    again: bool | None = None,
) -> Any:
    held.check()
    body = b"" if ask is None else json.dumps(ask).encode("ascii")
    timeout_s = max(held.wire.timeout_s, wait_s + _BEYOND_S)
    reply = await held.wire.call(method, path, body=body, timeout_s=timeout_s, again=again)
    return reply.json()


def status_from(told: Mapping[str, Any]) -> CommandStatus:
    """Raises Broken `foreign_reply`."""
    try:
        return status_from_json(told)
    except ValueError as error:
        raise _foreign(error) from error


def _piece(told: Mapping[str, Any]) -> LogPiece:
    try:
        return piece_from_json(told)
    except ValueError as error:
        raise _foreign(error) from error


def _decoded(data: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise _foreign(error) from error


def _foreign(error: ValueError) -> Broken:
    return Broken(
        f"the service told of a command in words that are none: {error}",
        code="foreign_reply",
        hint="the client and the service may be of different versions",
    )
