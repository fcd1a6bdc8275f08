"""The terminals of a conversation, and the WebSocket that attaches a client to one.

`GET …/terminals/{terminal}/attach`, as a WebSocket: who may run code there may attach. A page of
another origin may not, unless it is allowed by --cors-origin. What refuses it is a reply of HTTP in
the shape of all errors; once it is there, sbx/protocol/terminals.py has its messages and codes.
"""

import asyncio
import json
import logging
from typing import Annotated, Any

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, Field, StringConstraints
from starlette.websockets import WebSocketDisconnect

from sbx.api.auth import CallerDep, ServiceDep, authenticate, check_origin, known, service
from sbx.api.errors import broken, documented, error_response
from sbx.api.shares import Slot, share
from sbx.errors import BadRequest, Conflict, Denied, SbxError
from sbx.protocol.terminals import (
    COLUMNS_MAX,
    NOT_A_MESSAGE,
    NOT_READ,
    ROWS_MAX,
    TERMINALS_MAX,
    UNKNOWN,
    TerminalStatus,
)
from sbx.runtime.processes.terminals import Terminal, TerminalClient

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}/terminals", tags=["native"]
)
_ERRORS = documented(404, 409, 429, 504)
_SEND_S = 30.0  # for a client to take one message, before it is cut off
_ORDER_MAX = 4096  # characters
_KNOWN_S = 5.0  # after which it is asked again who a client is
_log = logging.getLogger(__name__)

Rows = Annotated[int, Field(ge=1, le=ROWS_MAX)]
Columns = Annotated[int, Field(ge=1, le=COLUMNS_MAX)]


class NewTerminal(BaseModel):
    """`command` is run by bash in place of an interactive shell; `cwd` is relative to /workspace,
    or absolute; `env` is added to the environment."""

    rows: Rows = 24
    columns: Columns = 80
    command: Annotated[str, StringConstraints(max_length=200_000)] | None = None
    cwd: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    env: dict[str, str] | None = None


class Size(BaseModel):
    rows: Rows
    columns: Columns


class TerminalBody(BaseModel):
    """One terminal. `command` is null for a shell; `attached` counts its clients. `exit_code` is
    128 + N for signal N, and null while it runs and where its kernel ended: `reason` says so.
    `created_at` in seconds of the epoch."""

    id: str
    command: str | None
    rows: int
    columns: int
    running: bool
    created_at: float
    attached: int
    exit_code: int | None
    reason: str


class TerminalList(BaseModel):
    """The oldest first, with those that ended a while ago; `limit` is how many there may be."""

    items: list[TerminalBody]
    limit: int


class ScreenBody(BaseModel):
    """What it shows, without colours; `cursor` is [row, column], counted from 0."""

    rows: int
    columns: int
    lines: list[str]
    cursor: tuple[int, int]


@router.get("", responses=_ERRORS)
async def terminals(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> TerminalList:
    """The terminals of a conversation; nothing starts for this."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        found = await (await use.existing(conversation)).terminals.list()
        return TerminalList(items=[_shown(one.now()) for one in found], limit=TERMINALS_MAX)


@router.post("", status_code=201, responses=_ERRORS)
async def create(
    sandbox_id: str, conversation: str, new: NewTerminal, caller: CallerDep, service: ServiceDep
) -> TerminalBody:
    """Open a terminal with a shell or a command on it, whether or not anybody attaches."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", conversation=conversation
    ) as use:
        made = await use.conversation(conversation).terminals.open(
            rows=new.rows, columns=new.columns, command=new.command, cwd=new.cwd, env=new.env
        )
    await service.recording.record(
        caller, "terminal.open", use.view.id, conversation=conversation, terminal=made.id
    )
    return _shown(made.now())


@router.get("/{terminal}", responses=_ERRORS)
async def terminal(
    sandbox_id: str, conversation: str, terminal: str, caller: CallerDep, service: ServiceDep
) -> TerminalBody:
    """One terminal; to attach to it, open a WebSocket at `…/{terminal}/attach`: binary messages are
    bytes as they are, both ways, `{"type": "resize", "rows", "columns"}` sets the size, and
    `{"type": "ended", "exit_code", "reason"}` is the last one."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        found = await (await use.existing(conversation)).terminals.get(terminal)
        return _shown(found.now())


@router.get("/{terminal}/screen", responses=_ERRORS)
async def screen(
    sandbox_id: str, conversation: str, terminal: str, caller: CallerDep, service: ServiceDep
) -> ScreenBody:
    """What it shows now, or showed last, as text."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        found = await (await use.existing(conversation)).terminals.get(terminal)
        shown = await found.screen()
    return ScreenBody(
        rows=shown.rows, columns=shown.columns, lines=list(shown.lines), cursor=shown.cursor
    )


@router.post("/{terminal}/resize", responses=_ERRORS)
async def resize(
    sandbox_id: str,
    conversation: str,
    terminal: str,
    size: Size,
    caller: CallerDep,
    service: ServiceDep,
) -> TerminalBody:
    """Give it another size; linux tells whoever runs there."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        found = await (await use.existing(conversation)).terminals.get(terminal)
        await found.resize(size.rows, size.columns)
        return _shown(found.now())


@router.delete("/{terminal}", status_code=204, responses=_ERRORS)
async def close(
    sandbox_id: str, conversation: str, terminal: str, caller: CallerDep, service: ServiceDep
) -> None:
    """Hang up, kill what is left of its session after a second, and forget it."""
    async with service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=conversation
    ) as use:
        await (await use.existing(conversation)).terminals.close(terminal)
    await service.recording.record(
        caller, "terminal.close", use.view.id, conversation=conversation, terminal=terminal
    )


# -- the WebSocket -------------------------------------------------------------------------------


@router.websocket("/{terminal}/attach")
async def attach(socket: WebSocket, sandbox_id: str, conversation: str, terminal: str) -> None:
    """See the module. `rows` and `columns` of the query set the size, as the client has it. It is
    one of the owner's followers."""
    held: Slot | None = None
    try:
        check_origin(socket)
        caller, whole = await known(socket), service(socket)
        size = _size(socket)
        held = share(socket, "followers")
        async with whole.sandboxes.using(
            caller, sandbox_id, scope="execute", starts=False, conversation=conversation
        ) as use:
            found = await (await use.existing(conversation)).terminals.get(terminal)
            async with found.attach() as client:
                if size is not None:
                    await found.resize(size.rows, size.columns)
                await socket.accept()
                await whole.recording.record(
                    caller,
                    "terminal.attach",
                    use.view.id,
                    conversation=conversation,
                    terminal=found.id,
                )
                await _Talk(socket, found, client).run()
    except WebSocketDisconnect:
        pass
    except SbxError as error:
        await _refuse(socket, error)
    except Exception:  # noqa: BLE001  # the border: a WebSocket has no other
        _log.exception("a WebSocket failed")
        await _refuse(socket, broken())
    finally:
        if held is not None:
            held.end()


class _Talk:
    """One client: what it types and what it is shown, for as long as it is known."""

    def __init__(self, socket: WebSocket, terminal: Terminal, client: TerminalClient) -> None:
        self._socket = socket
        self._terminal = terminal
        self._client = client

    async def run(self) -> None:
        """Until the terminal has ended and all was told, or the client is gone."""
        parts = (self._shows(), self._types(), self._is_known())
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

    async def _shows(self) -> None:
        async for data in self._client:
            async with asyncio.timeout(_SEND_S):
                await self._socket.send_bytes(data)
        ended = self._terminal.now()
        told = {"type": "ended", "exit_code": ended.exit_code, "reason": ended.reason}
        async with asyncio.timeout(_SEND_S):
            await self._socket.send_text(json.dumps(told))
            await self._socket.close(1000)

    async def _types(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                if (data := message.get("bytes")) is not None:
                    await self._client.write(data)
                else:
                    size = Size.model_validate(_order(message.get("text") or ""))
                    await self._client.resize(size.rows, size.columns)
            except Conflict as error:
                await self._socket.close(NOT_READ, error.code)
                return
            except (ValueError, RecursionError):
                await self._socket.close(NOT_A_MESSAGE, "not_a_message")
                return

    async def _is_known(self) -> None:
        """Raises Denied once its key was revoked, or its token has expired."""
        while True:
            await asyncio.sleep(_KNOWN_S)
            await authenticate(self._socket)


def _order(text: str) -> dict[str, Any]:
    if len(text) > _ORDER_MAX:
        raise ValueError("too long an order")
    told = json.loads(text)
    if not isinstance(told, dict) or told.pop("type", None) != "resize":
        raise ValueError("no message of these")
    return told


def _size(socket: WebSocket) -> Size | None:
    """Raises BadRequest."""
    asked = {
        name: socket.query_params[name]
        for name in ("rows", "columns")
        if name in socket.query_params
    }
    if not asked:
        return None
    try:
        return Size.model_validate(asked)
    except ValueError:
        raise BadRequest(
            f"a terminal has 1 to {ROWS_MAX} rows and 1 to {COLUMNS_MAX} columns",
            code="invalid_size",
        ) from None


async def _refuse(socket: WebSocket, error: SbxError) -> None:
    """By a reply of HTTP as long as there is no WebSocket, by a code where there is one."""
    if socket.application_state.name == "CONNECTING":
        request_id = getattr(socket.state, "request_id", None)
        await socket.send_denial_response(error_response(error, request_id))
    elif socket.application_state.name == "CONNECTED":
        await socket.close(UNKNOWN if isinstance(error, Denied) else 1011, error.code)


def _shown(status: TerminalStatus) -> TerminalBody:
    return TerminalBody(
        id=status.id,
        command=status.command,
        rows=status.rows,
        columns=status.columns,
        running=status.running,
        created_at=status.created_at,
        attached=status.attached,
        exit_code=status.exit_code,
        reason=status.reason,
    )
