"""Idempotency-Key: a repeated call returns the same answer, and does nothing."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from sbx.api import sse
from sbx.service.caller import Caller
from sbx.service.run import RunHandle
from sbx.service.service import Service

Answer = tuple[int, bytes]
HEADER = "Idempotency-Key"

# For the OpenAPI document of the routes that take the key. IdempotencyCache checks it, and refuses
# with 409, not 422.
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
    """Return the answer of `work`, or its answer to the same call before.

    Raise Conflict for a malformed key, for the key of another request, and for a call with an
    unknown outcome.
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
    """Stream the `events` of a run. With an Idempotency-Key, a repeated call starts no second run,
    and gets one event with the final `content` of the run.

    Another task awaits the run, so that its reply is stored even if the client disconnects. Raise
    as `answered`.
    """
    sse.reserve(request)
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
    _, end = await answer
    return await sse.stream(_end_only(end), request=request)


def _forget(answer: asyncio.Task[Answer]) -> None:
    _background.discard(answer)
    if not answer.cancelled():
        answer.exception()  # retrieved; the stream sends it as its last event


async def _end_only(content: bytes) -> AsyncIterator[tuple[int, sse.Encoded]]:
    """Yield the final event. `content` is the JSON of an object with members, from `encode`."""
    yield 1, sse.Encoded("run_end", b'{"type":"run_end",' + content[1:])


def reservation(request: Request, caller: Caller) -> tuple[str, str] | None:
    """Return the idempotency key that a run is recorded with."""
    key = request.headers.get(HEADER)
    return None if key is None else (caller.space, key)


def reply(status: int, content: bytes) -> Response:
    return Response(content, status, media_type="application/json")


def encoded(body: BaseModel | dict[str, Any]) -> bytes:
    """Return JSON in ASCII: names and output may contain lone surrogates."""
    data = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
    return json.dumps(data, separators=(",", ":")).encode("ascii")


def fingerprint(method: str, path: str, body: BaseModel) -> str:
    """Return a SHA-256 of the request. It covers the model, not the text: the order of keys, white
    space and omitted defaults do not change it."""
    data = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{method}:{path}:{data}".encode()).hexdigest()
