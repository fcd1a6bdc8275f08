"""The content of a file at any path inside, as a reply: whole, or a range of its bytes."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sbx.api.inner_files import InnerFiles, is_in_workspace
from sbx.api.slots import take_slot
from sbx.errors import BadRequest, InvalidPath
from sbx.runtime.conversation import Conversation

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def content_size(conversation: Conversation, path: str) -> int:
    """Return the size of a file in bytes. Raise NotFound, InvalidPath."""
    if is_in_workspace(path):
        try:
            async with await conversation.files.open_stream(path) as stream:
                return stream.size
        except InvalidPath:
            pass  # a symlink, or a directory
    request = {"act": "read", "path": path, "offset": 0, "length": 0}
    (answer,) = await InnerFiles(conversation).call(request)
    return answer.size


def send_range(
    request: Request,
    stack: AsyncExitStack,
    conversation: Conversation,
    path: str,
    size: int,
) -> Response:
    """Return the reply with a file of this size, or with the range that the request names. Raise
    Unavailable `too_many_downloads`."""
    requested = request.headers.get("range")
    start, end, status = 0, size, 200
    headers = {"accept-ranges": "bytes"}
    if requested and (match := _RANGE.fullmatch(requested.strip())) and any(match.groups()):
        bounds = _bounds(match[1], match[2], size)
        if bounds is None:
            return _not_satisfiable(size)
        start, end = bounds
        status = 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    if request.method == "HEAD":
        headers["content-length"] = str(end - start)
        return Response(None, status, headers, "application/octet-stream")
    slot = take_slot(request, "downloads")
    if slot is not None:
        stack.callback(slot.end)
    return _Exactly(content_of(conversation, path, start, end), end - start, status, headers)


def _bounds(first: str, last: str, size: int) -> tuple[int, int] | None:
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    return (start, end) if start < end else None


def _not_satisfiable(size: int) -> Response:
    body = {"code": "RANGE_NOT_SATISFIABLE", "message": f"the file has {size} bytes"}
    headers = {"content-range": f"bytes */{size}"}
    return Response(json.dumps(body), 416, headers, "application/json")


async def content_of(
    conversation: Conversation, path: str, start: int, end: int
) -> AsyncIterator[bytes]:
    """Yield the bytes of a file: read by the host in the workspace, else by a process inside."""
    if is_in_workspace(path):
        try:
            stream = await conversation.files.open_stream(path)
        except InvalidPath:
            pass  # a symlink, which only a process inside follows
        else:
            async with stream, aclosing(stream.chunks(start, end - start)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
    async with aclosing(InnerFiles(conversation).pieces(path, start, end)) as pieces:
        async for piece in pieces:
            yield piece


class _Exactly(Response):
    """Send the announced number of bytes, or cut the connection."""

    def __init__(
        self, pieces: AsyncIterator[bytes], size: int, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(
            None, status, {**headers, "content-length": str(size)}, "application/octet-stream"
        )
        self._pieces = pieces
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        left = self._size
        async for piece in self._pieces:
            left -= len(piece)
            if left < 0:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if left != 0:
            raise BadRequest("the file changed while it was read", code="file_changed")
        await send({"type": "http.response.body", "body": b""})
