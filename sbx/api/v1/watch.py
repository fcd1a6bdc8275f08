"""What changes in the files of any conversation, as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.v1.files import Path, conversation_lease
from sbx.protocol.files import FileEvent
from sbx.service.auth import Caller
from sbx.service.service import Service

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}", tags=["native"]
)
_ERRORS = documented(404, 409, 429)


@router.get(
    "/watch", response_class=Response, responses={**_ERRORS, 200: {"content": sse.DOCUMENTED}}
)
async def watch(
    sandbox_id: str,
    conversation: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    path: Path = ".",
    recursive: bool = True,
) -> Response:
    """Follow a directory: `started`, then `created`, `modified`, `deleted` with a path, and
    `overflow` where some were missed. Ends with the conversation."""
    events = _events(service, caller, (sandbox_id, conversation), path, recursive=recursive)
    return await sse.stream(events, request=request)


async def _events(
    service: Service, caller: Caller, where: tuple[str, str], path: str, *, recursive: bool
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """The sandbox is in use until the watch stands, and no longer: who looks on keeps nobody from
    the idle time-out."""
    number = 1
    async with conversation_lease(service, caller, *where, "files:read") as (talk, _):
        changes = talk.files.watch(path, recursive=recursive)
        first = await anext(changes)
    async with aclosing(changes):
        yield number, _told(first)
        async for change in changes:
            number += 1
            yield number, _told(change)


def _told(change: FileEvent) -> dict[str, Any]:
    return {"type": change.kind, "path": change.path}
