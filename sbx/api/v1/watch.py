"""Changes of the files of a conversation, as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.api import sse
from sbx.api.errors import documented
from sbx.api.v1.dependencies import PREFIX, Path, Target, TargetDep

router = APIRouter(prefix=PREFIX, tags=["native"])
_ERRORS = documented(404, 409, 429)


@router.get(
    "/watch", response_class=Response, responses={**_ERRORS, 200: {"content": sse.DOCUMENTED}}
)
async def watch(
    request: Request,
    target: TargetDep,
    path: Path = ".",
    recursive: bool = True,
) -> Response:
    """Follow a directory: `started`, then `created`, `modified`, `deleted` with a path, and
    `overflow` if some were missed. The stream ends with the conversation."""
    return await sse.stream(_events(target, path, recursive=recursive), request=request)


async def _events(
    target: Target, path: str, *, recursive: bool
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Lease the sandbox only until the watch has begun: a watching client does not prevent the idle
    time-out."""
    async with target.use("files:read") as talk:
        changes = talk.files.watch(path, recursive=recursive)
        change = await anext(changes)
    number = 1
    async with aclosing(changes):
        yield number, {"type": change.kind, "path": change.path}
        async for change in changes:
            number += 1
            yield number, {"type": change.kind, "path": change.path}
