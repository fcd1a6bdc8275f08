"""One WebSocket for all that changes: a browser has six connections to a host, and many tabs.

→ {"do": "follow", "id": "1", "topic": "owner"}, and other topics: topics.py
→ {"do": "drop", "id": "1"}
← {"type": "hello", …} first, and {"type": "beat", "now"} every ten seconds
← {"id": "1", "seq": 18, "event": {…}}
← {"id": "1", "type": "end"} or {"id": "1", "type": "failure", "error": {…}}
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from fastapi import APIRouter, Request, Response, WebSocket
from starlette.websockets import WebSocketDisconnect

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep, authenticate, caller, check_origin, service
from sbx.api.console.listener import site_of
from sbx.api.console.topics import Drop, Follow, follow, owner_events, parse
from sbx.api.errors import broken, documented, error_body
from sbx.api.slots import take_slot
from sbx.api.v1.terminals import socket_errors
from sbx.console import build
from sbx.errors import BadRequest, Denied, SbxError
from sbx.service.caller import Caller

router = APIRouter(prefix="/api/v1/events", tags=["console"])
_BEAT_S = 10.0
_CHECK_S = 5.0  # between two checks of the login
_SEND_S = 30.0  # for a client to take one message
_TOPICS_MAX = 64
_MESSAGE_MAX = 64 << 10  # characters
_LOGIN_OVER = 4401
_TOO_SLOW = 4408
_log = logging.getLogger(__name__)


_REPLIES: dict[int | str, Any] = {**documented(429), 200: {"content": sse.DOCUMENTED}}


@router.get("", response_class=Response, responses=_REPLIES)
async def owner(request: Request, caller: CallerDep, service: ServiceDep) -> Response:
    """Follow what changes for the caller: sandboxes, approvals, chats, conversations, projects and
    uploads. As a WebSocket, this route has all topics."""
    return await sse.stream(owner_events(service, caller), request=request)


@router.websocket("")
async def events(socket: WebSocket) -> None:
    """See the module. A client counts among the followers of its owner."""
    async with socket_errors(socket), AsyncExitStack() as stack:
        if site_of(socket.scope) is None:
            check_origin(socket)
        who = await caller(socket)
        if (place := take_slot(socket, "followers")) is not None:
            stack.callback(place.end)
        await socket.accept()
        try:
            await _Stream(socket, who).run()
        except TimeoutError:
            await _close(socket, _TOO_SLOW, "too_slow")
        except Denied as error:
            await _close(socket, _LOGIN_OVER, error.code)


class _Stream:
    """One client: its topics, while its login is valid."""

    def __init__(self, socket: WebSocket, who: Caller) -> None:
        self._socket = socket
        self._caller = who
        self._topics: dict[str, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Serve until the client disconnects. Raise TimeoutError for one that does not read."""
        state = service(self._socket)
        await self._send(
            {
                "type": "hello",
                "version": self._socket.app.version,
                "build": build(),
                "instance_id": state.instance_id,
                "now": time.time(),
            }
        )
        parts = (self._receive(), self._beat(), self._check_caller())
        tasks = {asyncio.create_task(part) for part in parts}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = [*tasks, *self._topics.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        for task in done:
            task.result()

    async def _receive(self) -> None:
        while True:
            try:
                text = await self._socket.receive_text()
                if len(text) > _MESSAGE_MAX:
                    raise ValueError
                message = parse(json.loads(text))
            except (KeyError, ValueError, RecursionError, BadRequest):  # KeyError: it is binary
                await _close(self._socket, 1008, "not_a_message")
                return
            if isinstance(message, Drop):
                await self._drop(message.id)
            else:
                await self._follow(message)
            await asyncio.sleep(0)  # no call waits while there are messages

    async def _follow(self, request: Follow) -> None:
        await self._drop(request.id)
        if len(self._topics) >= _TOPICS_MAX:
            error = BadRequest(
                f"one connection follows at most {_TOPICS_MAX} topics", code="too_many_topics"
            )
            await self._fail(request.id, error)
            return
        self._topics[request.id] = asyncio.create_task(self._relay(request))

    async def _drop(self, topic_id: str) -> None:
        if (task := self._topics.pop(topic_id, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _relay(self, request: Follow) -> None:
        try:
            topic = follow(self._socket.app, self._caller, request)
            async with aclosing(topic) as numbered:  # type: ignore[type-var]  # it is a generator
                async for number, event in numbered:
                    await self._send({"id": request.id, "seq": number, "event": event})
            await self._send({"id": request.id, "type": "end"})
        except SbxError as error:
            await self._fail(request.id, error)
        except TimeoutError:
            await _close(self._socket, _TOO_SLOW, "too_slow")
        except Exception:  # noqa: BLE001  # the border of a background task
            _log.exception("a topic of a stream failed")
            await self._fail(request.id, broken())
        finally:
            if self._topics.get(request.id) is asyncio.current_task():
                del self._topics[request.id]

    async def _fail(self, topic_id: str, error: SbxError) -> None:
        body = error_body(error, None)["error"]
        await self._send({"id": topic_id, "type": "failure", "error": body})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            await self._send({"type": "beat", "now": time.time()})

    async def _check_caller(self) -> None:
        """Raise Denied once the login or the key has ended."""
        while True:
            await asyncio.sleep(_CHECK_S)
            await authenticate(self._socket)

    async def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the client has left: then `_receive` ends the stream."""
        text = json.dumps(message, default=str)
        async with asyncio.timeout(_SEND_S), self._sending:
            if self._socket.application_state.name == "CONNECTED":
                with suppress(WebSocketDisconnect):
                    await self._socket.send_text(text)


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    if socket.application_state.name == "CONNECTED":
        try:
            async with asyncio.timeout(_CHECK_S):
                await socket.close(code, reason)
        except (TimeoutError, RuntimeError):
            pass
