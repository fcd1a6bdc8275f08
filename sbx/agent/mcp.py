"""The tools as an MCP server over stdio, by the official SDK: for one client, over one sandbox.

What a call leaves, variables and files, is there for the next. A call that goes wrong is a result
marked as an error, never an error of the protocol, so that a model may read it and go on. A client
that asked for progress of a call is told its output live. A call that is cancelled ends its run.
"""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any, cast

from sbx import __version__
from sbx.agent.messages import ToolCall, carried
from sbx.agent.sandbox import Sandbox
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolDefinition, ToolResult
from sbx.errors import Unavailable

try:
    import anyio
    import mcp_types as types
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from mcp.server.session import ServerSession
    from mcp.server.stdio import stdio_server
except ImportError as error:
    raise Unavailable(
        "the MCP server needs the package mcp, which is not installed",
        code="extra_missing",
        hint="pip install 'sbx[mcp]'",
    ) from error

_STDIN = 0
_PIECE = 1 << 16
_TOLD_MAX = 4096  # characters of live output in one message; what was skipped is in the result
_ENDING_S = 5.0  # for a run that was given up
_INSTRUCTIONS = (
    "All tools act on one sandbox, which is yours until you disconnect: variables of run_code and "
    "files below /workspace are there for the next call."
)
Context = ServerRequestContext[Any, Any]


async def serve(sandbox: Sandbox, tools: Tools) -> None:
    """Serve stdin and stdout of this process until the client closes them. Meanwhile whatever else
    writes to stdout writes to stderr."""
    server = make_server(sandbox, tools)
    # Lines of our own: the SDK's are read by a thread, which no signal calls back.
    async with stdio_server(stdin=cast("anyio.AsyncFile[str]", _lines(_STDIN))) as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())


def make_server(sandbox: Sandbox, tools: Tools) -> Server[Any]:
    """A server of these tools, for one client."""

    async def list_tools(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(one) for one in tools.definitions()])

    async def call_tool(
        context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        call = ToolCall(
            f"call-{secrets.token_hex(8)}", params.name, json.dumps(params.arguments or {})
        )
        live = _Live(context.session)
        telling = asyncio.create_task(live.tell())
        try:
            return _result(await _to_its_end(tools, call, sandbox, live))
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    return Server(
        "sbx",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _to_its_end(tools: Tools, call: ToolCall, sandbox: Sandbox, emit: "_Live") -> ToolResult:
    """The call in a task of its own: a cancelled scope of anyio cancels each wait of a task again,
    and so also those in which it gives up its run."""
    calling = asyncio.create_task(tools.call(call, sandbox, emit))
    try:
        await asyncio.wait([calling])
    finally:
        if not calling.done():
            calling.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([calling], timeout=_ENDING_S)
    return calling.result()


class _Live:
    """The live output of one call, as progress: a count of characters, and the latest of them."""

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._count = 0
        self._untold = ""
        self._more = asyncio.Event()

    def __call__(self, stream: str, text: str) -> None:
        self._count += len(text)
        self._untold = (self._untold + text)[-_TOLD_MAX:]
        self._more.set()

    async def tell(self) -> None:
        """Until it is cancelled. To a client that did not ask, the session tells nothing."""
        while True:
            await self._more.wait()
            self._more.clear()
            text, self._untold = self._untold, ""
            await self._session.report_progress(self._count, None, carried(text))


def _described(definition: ToolDefinition) -> types.Tool:
    return types.Tool(
        name=definition.name,
        description=definition.description,
        input_schema=dict(definition.parameters),
    )


def _result(result: ToolResult) -> types.CallToolResult:
    content: list[Any] = [types.TextContent(text=carried(result.text))]
    content += [
        types.ImageContent(data=image.data, mime_type=image.media_type) for image in result.images
    ]
    return types.CallToolResult(content=content, is_error=result.is_error)


async def _lines(fd: int) -> AsyncIterator[str]:
    """The lines of a pipe or a file; the last one may lack its end."""
    held = bytearray()
    while piece := await _read(fd):
        begin = len(held)
        held += piece
        while (end := held.find(b"\n", begin)) >= 0:
            yield held[: end + 1].decode(errors="replace")
            del held[: end + 1]
            begin = 0
    if held:
        yield held.decode(errors="replace")


async def _read(fd: int) -> bytes:
    """What is there, when something is; nothing at the end."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(fd, readable.set)
    except OSError:  # epoll(7) refuses a regular file, which always has something
        return os.read(fd, _PIECE)
    try:
        await readable.wait()
        return os.read(fd, _PIECE)
    finally:
        loop.remove_reader(fd)
