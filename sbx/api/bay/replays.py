"""Idempotency-Key: the same call again gives the same answer, and does nothing."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from sbx.runtime.access import Caller
from sbx.runtime.house import House

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


async def answered(
    request: Request,
    house: House,
    caller: Caller,
    body: BaseModel,
    work: Callable[[], Awaitable[Answer]],
) -> Response:
    """The answer of `work`, or the one it gave to the same call before.

    Raises Conflict for a malformed key, and for one that another request has used.
    """
    key = request.headers.get(HEADER)
    if key is None:
        status, content = await work()
    else:
        asked = fingerprint(request.method, request.url.path, body)
        status, content = await house.replies.once(caller, key, asked, work)
    return reply(status, content)


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
