"""A directory of any conversation as an archive, down and up, streamed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from sbx.api.auth import CallerDep, HeldDep, ServiceDep
from sbx.api.downloads import attachment
from sbx.api.errors import documented
from sbx.api.multipart import slot
from sbx.api.shares import share
from sbx.api.v1.files import RAW, Path, body_of, conversation_lease
from sbx.errors import Denied
from sbx.runtime.files.archives import ArchiveFormat
from sbx.service.auth import Caller

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}", tags=["native"]
)
_ERRORS = documented(404, 409, 413, 415, 429, 504, 507)
_STALLED_S = 60.0  # without the client taking one piece
_TYPES = {"tar.gz": "application/gzip", "zip": "application/zip"}
_SENT: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    200: {"content": {kind: {} for kind in _TYPES.values()}},
}


class UnpackedBody(BaseModel):
    """`skipped` entries were left out: links and names that lead out, devices."""

    entries: int
    bytes: int
    skipped: int


@router.get("/archive", response_class=Response, responses=_SENT)
async def pack(
    sandbox_id: str,
    conversation: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    held: HeldDep,
    path: Path = ".",
    format: Annotated[ArchiveFormat, Query()] = "tar.gz",
) -> Response:
    """A directory as an archive, packed inside as it is sent; the connection is cut where it cannot
    be finished. Starts the kernel."""
    _check(caller)
    talk, _ = await held.enter_async_context(
        conversation_lease(service, caller, sandbox_id, conversation, "files:read")
    )
    taken = share(request, "downloads")
    if taken is not None:
        held.callback(taken.end)
    pieces = talk.files.archive(path, format=format)
    held.push_async_callback(pieces.aclose)
    first = await anext(pieces)
    name = path.rstrip("/").rpartition("/")[2]
    name = f"{name if name not in ('', '.', '..') else 'workspace'}.{format}"
    return _Packed(_all(first, pieces), _TYPES[format], name)


@router.put("/archive", responses=_ERRORS, openapi_extra=RAW)
async def unpack(
    sandbox_id: str,
    conversation: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    path: Path = ".",
) -> UnpackedBody:
    """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside. Starts the kernel."""
    _check(caller)
    async with (
        conversation_lease(
            service, caller, sandbox_id, conversation, "files:write", makes=True
        ) as (
            talk,
            view,
        ),
        slot(request, caller),
    ):
        done = await talk.files.unpack(body_of(request), path)
    told = {"path": path, "size": done.bytes}
    await service.recording.record(
        caller, "archive.unpack", view.id, conversation=conversation, **told
    )
    return UnpackedBody(**asdict(done))


def _check(caller: Caller) -> None:
    """An archive takes a process inside."""
    if not caller.may("execute"):
        raise Denied(
            "archives are made and read by a process in the sandbox, and this token starts none",
            code="forbidden",
            hint="ask for a token with the scope execute, or read the files one by one",
        )


async def _all(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


class _Packed(Response):
    """Bytes as they come. Ends early when the client has gone, or takes nothing any more."""

    def __init__(self, pieces: AsyncIterator[bytes], media_type: str, name: str) -> None:
        headers = {
            "content-disposition": attachment(name),
            "x-content-type-options": "nosniff",
            "cache-control": "no-store",
        }
        super().__init__(None, 200, headers, media_type)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        sending = asyncio.ensure_future(self._send(send))
        try:
            either: set[asyncio.Future[None]] = {gone, sending}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (gone, sending):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for piece in self._pieces:
            async with asyncio.timeout(_STALLED_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
