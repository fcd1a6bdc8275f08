"""A client of a terminal in a service: a WebSocket to the address of all other requests.

sbx/protocol/terminals.py has its messages and its close codes.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sbx import errors
from sbx.client.http import HttpClient
from sbx.client.websocket import connected
from sbx.protocol.terminals import NOT_READ, TYPED_MAX, UNKNOWN, check_size


class RemoteAttached:
    """One client of a terminal. `async for piece in attached` ends with the terminal."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.ended: tuple[int | None, str] | None = None

    async def read(self) -> bytes:
        """Return the next output: first the current screen, then new output. Return b"" after the
        end of the terminal and its output. Raise Unavailable `connection_lost`."""
        while self.ended is None:
            try:
                message = await self._socket.recv()
            except ConnectionClosed as error:
                raise _lost(error) from error
            if isinstance(message, bytes):
                return message
            self.ended = _ended(message)
        return b""

    async def write(self, data: bytes) -> None:
        """Type these bytes. Discard them if the terminal has ended. Raise Unavailable
        `connection_lost`, Conflict `terminal_not_read`."""
        for start in range(0, len(data), TYPED_MAX):
            await self._send(bytes(data[start : start + TYPED_MAX]))

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size for all clients, as `RemoteTerminal.resize`."""
        check_size(rows, columns)
        await self._send(json.dumps({"type": "resize", "rows": rows, "columns": columns}))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if data := await self.read():
            return data
        raise StopAsyncIteration

    async def _send(self, message: bytes | str) -> None:
        try:
            await self._socket.send(message)
        except ConnectionClosed as error:
            if self.ended is None and not _is_end(error):
                raise _lost(error) from error


@asynccontextmanager
async def attached(wire: HttpClient, path: str) -> AsyncIterator[RemoteAttached]:
    """Connect, and disconnect at the end. Raise the error of the body, Unavailable
    `service_unreachable`."""
    socket = await connected(wire, path)
    try:
        yield RemoteAttached(socket)
    finally:
        await socket.close()


def _ended(message: str) -> tuple[int | None, str]:
    try:
        data = json.loads(message)
        if data["type"] == "ended":
            code = data["exit_code"]
            return (code if isinstance(code, int) else None), str(data["reason"])
    except (ValueError, KeyError, TypeError):
        pass
    raise errors.Broken("the service sent an invalid terminal message", code="foreign_reply")


def _is_end(error: ConnectionClosed) -> bool:
    return error.rcvd is not None and error.rcvd.code == 1000


def _lost(error: ConnectionClosed) -> errors.SbxError:
    code = error.rcvd.code if error.rcvd is not None else None
    if code == NOT_READ:
        return errors.Conflict(
            "the program in the terminal does not read its input",
            code="terminal_not_read",
            hint="interrupt the program, or put the data in a file",
        )
    if code == UNKNOWN:
        return errors.Denied(
            "the key or token is no longer valid",
            code="unauthorized",
            hint="attach again with another one",
        )
    reason = "the service ended" if code == 1012 else f"the connection was lost: {error}"
    return errors.Unavailable(
        reason, code="connection_lost", hint="attach again: the terminal may still exist"
    )
