"""The terminals of a conversation, and the WebSocket that attaches a client to one.

`GET …/terminals/{terminal}/attach`, as a WebSocket: callers that may run code there may attach. A
page of another origin may not, unless --cors-origin allows it. A refusal is an HTTP error reply.
sbx/protocol/terminals.py has the messages and codes of the open WebSocket.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, Field, StringConstraints
from starlette.websockets import WebSocketDisconnect

from sbx.api.auth import authenticate, caller, check_origin, service
from sbx.api.bodies import RequestBody
from sbx.api.errors import broken, documented, error_response
from sbx.api.slots import take_slot
from sbx.api.v1.dependencies import PREFIX, Target, TargetDep
from sbx.errors import BadRequest, Conflict, Denied, SbxError
from sbx.protocol.terminals import (
    COLUMNS_MAX,
    NOT_A_MESSAGE,
    NOT_READ,
    ROWS_MAX,
    TERMINALS_MAX,
    UNKNOWN,
    TerminalScreen,
    TerminalStatus,
)
from sbx.runtime.processes.terminal import Terminal, TerminalClient

router = APIRouter(prefix=f"{PREFIX}/terminals", tags=["native"])
_ERRORS = documented(404, 409, 429, 504)
_SEND_S = 30.0  # for a client to take one message, before it is cut off
_MESSAGE_MAX = 4096  # characters
_CHECK_S = 5.0  # between two checks of the key or token of a client
_log = logging.getLogger(__name__)

Rows = Annotated[int, Field(ge=1, le=ROWS_MAX)]
Columns = Annotated[int, Field(ge=1, le=COLUMNS_MAX)]


class NewTerminal(RequestBody):
    """bash runs `command` instead of an interactive shell. `cwd` is relative to /workspace, or
    absolute. `env` is added to the environment."""

    rows: Rows = 24
    columns: Columns = 80
    command: Annotated[str, StringConstraints(max_length=200_000)] | None = None
    cwd: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    env: dict[str, str] | None = None


class Size(RequestBody):
    rows: Rows
    columns: Columns


class TerminalList(BaseModel):
    """The oldest first, with those that ended lately; `limit` is the largest number."""

    items: list[TerminalStatus]
    limit: int


@router.get("", responses=_ERRORS)
async def terminals(target: TargetDep) -> TerminalList:
    """List the terminals of a conversation. No kernel starts."""
    async with target.use("execute", starts=False) as conversation:
        items = [terminal.now() for terminal in await conversation.terminals.list()]
    return TerminalList(items=items, limit=TERMINALS_MAX)


@router.post("", status_code=201, responses=_ERRORS)
async def create(new: NewTerminal, target: TargetDep) -> TerminalStatus:
    """Open a terminal with a shell or a command. It needs no client."""
    async with target.use("execute", creates=True) as conversation:
        terminal = await conversation.terminals.open(
            rows=new.rows, columns=new.columns, command=new.command, cwd=new.cwd, env=new.env
        )
    await target.record("terminal.open", terminal=terminal.id)
    return terminal.now()


@router.get("/{terminal}", responses=_ERRORS)
async def terminal(terminal: str, target: TargetDep) -> TerminalStatus:
    """Return one terminal. To attach to it, open a WebSocket at `…/{terminal}/attach`: binary
    messages are bytes in both directions, `{"type": "resize", "rows", "columns"}` sets the size,
    and `{"type": "ended", "exit_code", "reason"}` is the last message."""
    async with target.use("execute", starts=False) as conversation:
        return (await conversation.terminals.get(terminal)).now()


@router.get("/{terminal}/screen", responses=_ERRORS)
async def screen(terminal: str, target: TargetDep) -> TerminalScreen:
    """Return the current or last screen as text."""
    async with target.use("execute", starts=False) as conversation:
        return await (await conversation.terminals.get(terminal)).screen()


@router.post("/{terminal}/resize", responses=_ERRORS)
async def resize(terminal: str, size: Size, target: TargetDep) -> TerminalStatus:
    """Set the size. Linux notifies the programs in the terminal."""
    async with target.use("execute", starts=False) as conversation:
        resized = await conversation.terminals.get(terminal)
        await resized.resize(size.rows, size.columns)
        return resized.now()


@router.delete("/{terminal}", status_code=204, responses=_ERRORS)
async def close(terminal: str, target: TargetDep) -> None:
    """Hang up, kill the rest of its session after a second, and delete it."""
    async with target.use("execute", starts=False) as conversation:
        await conversation.terminals.close(terminal)
    await target.record("terminal.close", terminal=terminal)


# -- the WebSocket -------------------------------------------------------------------------------


@router.websocket("/{terminal}/attach")
async def attach(socket: WebSocket, sandbox_id: str, conversation: str, terminal: str) -> None:
    """See the module. `rows` and `columns` of the query set the size of the client. A client counts
    among the followers of its owner."""
    async with socket_errors(socket), AsyncExitStack() as stack:
        check_origin(socket)
        target = Target(service(socket), await caller(socket), sandbox_id, conversation)
        size = _size(socket)
        if (place := take_slot(socket, "followers")) is not None:
            stack.callback(place.end)
        async with target.use("execute", starts=False) as leased:
            attached = await leased.terminals.get(terminal)
            async with attached.attach() as client:
                if size is not None:
                    await attached.resize(size.rows, size.columns)
                await socket.accept()
                await target.record("terminal.attach", terminal=attached.id)
                await _TerminalRelay(socket, attached, client).run()


class _TerminalRelay:
    """One client: its input and its output, while its key or token is valid."""

    def __init__(self, socket: WebSocket, terminal: Terminal, client: TerminalClient) -> None:
        self._socket = socket
        self._terminal = terminal
        self._client = client

    async def run(self) -> None:
        """Relay until the terminal ends or the client disconnects."""
        parts = (self._relay_output(), self._relay_input(), self._check_caller())
        tasks = {asyncio.create_task(part) for part in parts}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _relay_output(self) -> None:
        async for data in self._client:
            async with asyncio.timeout(_SEND_S):
                await self._socket.send_bytes(data)
        status = self._terminal.now()
        message = {"type": "ended", "exit_code": status.exit_code, "reason": status.reason}
        async with asyncio.timeout(_SEND_S):
            await self._socket.send_text(json.dumps(message))
            await self._socket.close(1000)

    async def _relay_input(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                if (data := message.get("bytes")) is not None:
                    await self._client.write(data)
                else:
                    size = Size.model_validate(_parse(message.get("text") or ""))
                    await self._client.resize(size.rows, size.columns)
            except Conflict as error:
                await self._socket.close(NOT_READ, error.code)
                return
            except (ValueError, RecursionError):
                await self._socket.close(NOT_A_MESSAGE, "not_a_message")
                return
            await asyncio.sleep(0)  # no call waits while there are messages

    async def _check_caller(self) -> None:
        """Raise Denied once its key is revoked or its token has expired."""
        while True:
            await asyncio.sleep(_CHECK_S)
            await authenticate(self._socket)


def _parse(text: str) -> dict[str, Any]:
    if len(text) > _MESSAGE_MAX:
        raise ValueError("the message is too long")
    message = json.loads(text)
    if not isinstance(message, dict) or message.pop("type", None) != "resize":
        raise ValueError("not a resize message")
    return message


def _size(socket: WebSocket) -> Size | None:
    """Return the size in the query, or None. Raise BadRequest."""
    query = socket.query_params
    size = {name: query[name] for name in ("rows", "columns") if name in query}
    if not size:
        return None
    try:
        return Size.model_validate(size)
    except ValueError:
        raise BadRequest(
            f"a terminal has 1 to {ROWS_MAX} rows and 1 to {COLUMNS_MAX} columns",
            code="invalid_size",
        ) from None


@asynccontextmanager
async def socket_errors(socket: WebSocket) -> AsyncIterator[None]:
    """Report the errors of a WebSocket to its client, see `refuse_socket`."""
    try:
        yield
    except WebSocketDisconnect:
        pass
    except SbxError as error:
        await refuse_socket(socket, error)
    except Exception:  # noqa: BLE001  # the border: a WebSocket has no other
        _log.exception("a WebSocket failed")
        await refuse_socket(socket, broken())


async def refuse_socket(socket: WebSocket, error: SbxError) -> None:
    """Send an HTTP reply before the WebSocket is accepted, a close code afterwards."""
    if socket.application_state.name == "CONNECTING":
        request_id = getattr(socket.state, "request_id", None)
        await socket.send_denial_response(error_response(error, request_id))
    elif socket.application_state.name == "CONNECTED":
        await socket.close(UNKNOWN if isinstance(error, Denied) else 1011, error.code)
