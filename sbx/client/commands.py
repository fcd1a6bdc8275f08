"""Background commands of a conversation in a service, with the methods of the embedded ones."""

import asyncio
import builtins
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sbx.client import checks
from sbx.client.conversation_calls import SandboxState
from sbx.client.errors import decode
from sbx.client.http import query, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.replies import connection_lost
from sbx.errors import Unavailable
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
_REPLY_S = 10.0  # for a reply, in addition to the requested wait
_STOP_GRACE_S = 2.0


class RemoteCommand:
    """One background command in a service."""

    def __init__(self, state: SandboxState, path: str, command_id: str) -> None:
        self.id = command_id
        self._state = state
        self._path = f"{path}{target(command_id)}"

    async def status(self) -> CommandStatus:
        """Return its status. Raise NotFound if the service has discarded it."""
        return _status(await _call(self._state, "GET", self._path))

    async def logs(self, offset: int = 0, *, limit: int = LOG_PIECE) -> LogPiece:
        """Return at most `limit` bytes of its output from `offset` on. A piece with a larger offset
        means that the bytes in between were discarded; an empty piece is the end of the log.

        Raise BadRequest `invalid_offset`.
        """
        path = f"{self._path}/logs{query({'offset': offset, 'limit': limit})}"
        reply = await _call(self._state, "GET", path)
        return decode("piece of a log", piece_from_json, reply)

    async def follow(self, offset: int = 0) -> AsyncGenerator[LogPiece, None]:
        """Yield its past and future output from `offset` on, until its end. Connect again if the
        connection is lost."""
        self._state.check()
        loop, at = asyncio.get_running_loop(), offset
        deadline = loop.time() + _REATTACH_S
        while True:
            lost = ConnectionLost("the stream ended before the command did")
            try:
                path = f"{self._path}/follow{query({'offset': at})}"
                async with aclosing(self._state.wire.events("GET", path)) as events:
                    async for _, kind, data in events:
                        deadline = loop.time() + _REATTACH_S
                        if kind == "command_end":
                            return
                        piece = decode("piece of a log", _read_piece, data)
                        at = piece.next_offset
                        yield piece
            except ConnectionLost as error:
                lost = error
            except Unavailable as error:
                if error.code not in ("service_unreachable", "timeout"):
                    raise
                lost = ConnectionLost(error.message)
            if loop.time() > deadline:
                raise connection_lost(self._state.wire.address, lost) from lost
            await asyncio.sleep(_REATTACH_PAUSE_S)

    async def write(self, text: str | None) -> None:
        """Write to its standard input, if it was started with `stdin_open`; None closes it. Do not
        wait until the command reads. Raise Conflict `stdin_full`, `stdin_closed`."""
        line = None if text is None else text_to_json(checks.text(text, "stdin"))
        await _call(self._state, "POST", f"{self._path}/stdin", {"text": line})

    async def stop(self, *, grace_s: float = _STOP_GRACE_S) -> CommandStatus:
        """Send SIGTERM to its process group, and SIGKILL after `grace_s` seconds. Return its final
        status. Processes that it left in the background continue."""
        path, body = f"{self._path}/stop", {"grace_s": grace_s}
        return _status(await _call(self._state, "POST", path, body, wait_s=grace_s, again=True))

    async def wait(self, timeout: float | None = None) -> CommandStatus:
        """Wait for its end, at most `timeout` seconds, and return its status."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = WAIT_MAX_S if deadline is None else min(WAIT_MAX_S, deadline - loop.time())
            path = f"{self._path}/wait{query({'timeout_s': round(max(0.0, left), 3)})}"
            status = _status(await _call(self._state, "GET", path, wait_s=max(0.0, left)))
            if not status.running or (deadline is not None and loop.time() >= deadline):
                return status


class RemoteCommands:
    """Background commands by their ids. Its methods may be called concurrently from one event
    loop."""

    def __init__(self, state: SandboxState, path: str) -> None:
        """Create the commands of the conversation at `path`."""
        self._state = state
        self._path = f"{path}/commands"

    async def start(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
    ) -> RemoteCommand:
        """Start `/bin/bash -c command` next to the kernel. Start the kernel if needed.

        Raise Denied, BadRequest, TooLarge, Closed as a shell command does, Conflict
        `too_many_commands`, Unavailable `no_space`, and the errors of a kernel start.
        """
        body = {
            "command": checks.text(command, "command"),
            "cwd": cwd if cwd is None else checks.path(cwd),
            "env": checks.environment(env),
            "stdin_open": stdin_open,
        }
        status = _status(await _call(self._state, "POST", self._path, body, wait_s=30.0))
        return RemoteCommand(self._state, self._path, status.id)

    async def get(self, command_id: str) -> RemoteCommand:
        """Return a command by its id, also one that has ended. Raise NotFound, Closed."""
        command = RemoteCommand(self._state, self._path, command_id)
        await command.status()
        return command

    async def list(self) -> builtins.list[CommandStatus]:
        """Return the running and the recently ended commands, the newest first."""
        reply = await _call(self._state, "GET", self._path)
        return [_status(item) for item in reply["commands"]]


async def _call(
    state: SandboxState,
    method: str,
    path: str,
    fields: Mapping[str, Any] | None = None,
    *,
    wait_s: float = 0.0,
    again: bool | None = None,
) -> Any:
    state.check()
    body = b"" if fields is None else json.dumps(fields).encode("ascii")
    timeout_s = max(state.wire.timeout_s, wait_s + _REPLY_S)
    reply = await state.wire.call(method, path, body=body, timeout_s=timeout_s, again=again)
    return reply.json()


def _status(reply: Any) -> CommandStatus:
    return decode("command", status_from_json, reply)


def _read_piece(data: str) -> LogPiece:
    return piece_from_json(json.loads(data))
