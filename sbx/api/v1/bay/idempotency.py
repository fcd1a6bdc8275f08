"""Idempotency-Key: the same call again gives the same answer, and does nothing."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from sbx.api import sse
from sbx.service.auth import Caller
from sbx.service.runs import RunHandle
from sbx.service.service import Service

Answer = tuple[int, bytes]
HEADER = "Idempotency-Key"

# For the OpenAPI document of the routes that take the key: the rules for it are those of Replies,
# whose refusal is 409 and not 422.
TAKES_KEY = {
    "parameters": [
        {
            "name": HEADER,
            "in": "header",
            "required": False,
            "description": "1 to 128 of a-z A-Z 0-9 _ -; one key space for all routes of an owner",
            "schema": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"},
        }
    ]
}
_background: set[asyncio.Task[Answer]] = set()


async def answered(
    request: Request,
    service: Service,
    caller: Caller,
    body: BaseModel,
    work: Callable[[], Awaitable[Answer]],
) -> Response:
    """The answer of `work`, or the one it gave to the same call before.

    Raises Conflict for a malformed key, for one that another request has used, and for a call of
    which the outcome is unknown.
    """
    key = request.headers.get(HEADER)
    if key is None:
        status, content = await work()
    else:
        call = fingerprint(request.method, request.url.path, body)
        status, content = await service.replies.once(caller, key, call, work)
    return reply(status, content)


async def streamed(
    request: Request,
    service: Service,
    caller: Caller,
    body: BaseModel,
    start: Callable[[], Awaitable[RunHandle]],
    *,
    events: Callable[[RunHandle], sse.Events],
    content: Callable[[RunHandle], Awaitable[bytes]],
) -> Response:
    """The `events` of a run. Under an Idempotency-Key the same call again begins no second run, and
    gets one event with the `content` that the run ended with.

    A task of its own awaits the run, so that its reply is kept also when the client goes. Raises as
    `answered`.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return await sse.stream(events(await start()), request=request)
    started: asyncio.Future[RunHandle] = asyncio.get_running_loop().create_future()

    async def work() -> Answer:
        handle = await start()
        started.set_result(handle)
        return 200, await content(handle)

    call = fingerprint(request.method, request.url.path, body)
    answer = asyncio.ensure_future(service.replies.once(caller, key, call, work))
    _background.add(answer)
    answer.add_done_callback(_forget)
    await asyncio.wait((started, answer), return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        return await sse.stream(events(started.result()), request=request)
    _, told = await answer
    return await sse.stream(_end_only(told), request=request)


def _forget(answer: asyncio.Task[Answer]) -> None:
    _background.discard(answer)
    if not answer.cancelled():
        answer.exception()  # taken here: the stream sends it as its last event


async def _end_only(content: bytes) -> AsyncIterator[tuple[int, sse.Encoded]]:
    """`content` is the JSON of an object with members, as `encode` writes it."""
    yield 1, sse.Encoded("run_end", b'{"type":"run_end",' + content[1:])


def reservation(request: Request, caller: Caller) -> tuple[str, str] | None:
    """Return the idempotency key that a run is recorded with."""
    key = request.headers.get(HEADER)
    return None if key is None else (caller.space, key)


def reply(status: int, content: bytes) -> Response:
    return Response(content, status, media_type="application/json")


def encoded(body: BaseModel | dict[str, Any]) -> bytes:
    """JSON in ASCII: names and output may hold what UTF-8 cannot carry."""
    told = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
    return json.dumps(told, separators=(",", ":")).encode("ascii")


def fingerprint(method: str, path: str, body: BaseModel) -> str:
    """SHA-256 over what was asked. The model and not its text: order of keys, white space and
    defaults left out make no other request."""
    told = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{method}:{path}:{told}".encode()).hexdigest()
