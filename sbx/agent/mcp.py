"""The tools as an MCP server, with the official SDK, for one sandbox: over stdio for one client, or
over HTTP for one request after the other.

Variables and files of one call are available to the next. A failed call returns a result that is
marked as an error, never a protocol error, so that the model can read it and continue. A client
that requested progress for a call receives its output live. Cancelling a call interrupts its run.

The files of the workspace are resources, with addresses such as file:///workspace/data.csv. The
templates of tasks are prompts. A call that needs an approval asks the user through the client, by
elicitation; without this ability of the client it is denied.
"""

import asyncio
import base64
import mimetypes
import os
import posixpath
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

from sbx import __version__
from sbx.agent.mcp_calls import McpApprovals, McpCalls
from sbx.agent.messages import ToolCall, carried
from sbx.agent.prompt import surroundings_of
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.task import TaskTemplate, fill
from sbx.agent.tools import paths
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolDefinition, ToolResult
from sbx.aio import in_thread
from sbx.errors import BadRequest, SbxError, needs_extra
from sbx.protocol.events import encode
from sbx.protocol.files import FileEntry
from sbx.protocol.surroundings import Surroundings

with needs_extra("sbx mcp", "mcp"):
    import anyio
    import mcp_types as types
    from mcp import MCPError
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from mcp.server.session import ServerSession
    from mcp.server.stdio import stdio_server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from starlette.types import Receive, Scope, Send

_STDIN = 0
_PIECE = 1 << 16
_PROGRESS_MAX = 4096  # characters of live output in one message; the result has the rest
_WORKSPACE = "/workspace"
_BODY_MAX = 16 << 20  # bytes of an HTTP request: one writes a file
_FILES_MAX = 1000  # of the list of resources
Context = ServerRequestContext[Any, Any]
ReadTemplates = Callable[[], Awaitable[Mapping[str, TaskTemplate]]]


async def serve(
    sandbox: ToolSandbox,
    tools: Tools,
    read_templates: ReadTemplates,
    asks: McpApprovals,
) -> None:
    """Serve stdin and stdout of this process until the client closes them. Meanwhile all other
    writes to stdout go to stderr."""
    calls = McpCalls(lambda: nullcontext(sandbox), tools, asks)
    server = make_server(sandbox, tools, read_templates, calls, await surroundings_of(sandbox))
    # Use our own reader: the reader of the SDK blocks in a thread that no signal interrupts.
    async with stdio_server(stdin=cast("anyio.AsyncFile[str]", _lines(_STDIN))) as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())


async def serve_http(
    sandbox: ToolSandbox,
    tools: Tools,
    read_templates: ReadTemplates,
    calls: McpCalls,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Serve one HTTP request of a client, by ASGI, and forget the client."""
    server = make_server(sandbox, tools, read_templates, calls, await surroundings_of(sandbox))
    manager = StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=_BODY_MAX)
    async with manager.run():
        await manager.handle_request(scope, receive, send)


def make_server(
    sandbox: ToolSandbox,
    tools: Tools,
    read_templates: ReadTemplates,
    calls: McpCalls,
    around: Surroundings,
) -> Server[Any]:
    """Return a server of these tools for one client, as far as they exist in `around`.
    `read_templates` reads its prompts when a client asks for them. `calls` asks the user of the
    client about calls that need an approval."""
    tools = tools.with_access(sandbox)

    async def list_tools(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[_described(definition) for definition in tools.definitions(around)]
        )

    async def call_tool(
        context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        arguments = await in_thread(encode, params.arguments or {})  # they may have 16 MiB
        call = ToolCall(f"call-{secrets.token_hex(8)}", params.name, arguments.decode("ascii"))
        live = _Live(context.session)
        telling = asyncio.create_task(live.tell())
        try:
            result = await calls.call(context.session, params, call, live)
            return result if isinstance(result, types.InputRequiredResult) else _result(result)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def list_resources(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        listing = await sandbox.files.find("*", kind="file", max_results=_FILES_MAX)
        return types.ListResourcesResult(resources=[_resource(file) for file in listing])

    async def read_resource(
        context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        try:
            content = await paths.read(sandbox, _path_of(params.uri))
        except SbxError as error:
            raise MCPError(types.INVALID_PARAMS, carried(error.message)) from None
        return types.ReadResourceResult(contents=[_contents(params.uri, content)])

    async def list_prompts(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListPromptsResult:
        return types.ListPromptsResult(
            prompts=[_prompt(name, template) for name, template in (await read_templates()).items()]
        )

    async def get_prompt(
        context: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        if (template := (await read_templates()).get(params.name)) is None:
            raise MCPError(types.INVALID_PARAMS, f"the prompt {params.name[:80]!r} does not exist")
        try:
            prompt = fill(template, params.arguments or {}).prompt
        except SbxError as error:
            raise MCPError(types.INVALID_PARAMS, carried(error.message)) from None
        content = types.TextContent(text=carried(prompt))
        return types.GetPromptResult(
            description=template.description,
            messages=[types.PromptMessage(role="user", content=content)],
        )

    return Server(
        "sbx",
        version=__version__,
        instructions=_instructions(around),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


def _instructions(around: Surroundings) -> str:
    if around.place == "host":
        what = "the computer of the user, without a sandbox"
    else:
        what = "one sandbox, which is yours until you disconnect"
    variables = "variables of run_code and " if "python" in around.run_languages else ""
    files = f"{variables}files below {around.shown_directory}"
    return f"All tools act on {what}: {files} are there for the next call."


class _Live:
    """The live output of one call as progress: the number of characters, and the latest ones."""

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._count = 0
        self._pending_text = ""
        self._more = asyncio.Event()

    def __call__(self, stream: str, text: str) -> None:
        self._count += len(text)
        self._pending_text = (self._pending_text + text)[-_PROGRESS_MAX:]
        self._more.set()

    async def tell(self) -> None:
        """Report progress until cancelled. The session sends nothing if the client did not request
        it."""
        while True:
            await self._more.wait()
            self._more.clear()
            text, self._pending_text = self._pending_text, ""
            await self._session.report_progress(self._count, None, carried(text))


def _prompt(name: str, template: TaskTemplate) -> types.Prompt:
    arguments = [
        types.PromptArgument(
            name=label, description=parameter.description, required=parameter.default is None
        )
        for label, parameter in template.parameters.items()
    ]
    return types.Prompt(name=name, description=template.description, arguments=arguments)


def _resource(file: FileEntry) -> types.Resource:
    path = posixpath.join(_WORKSPACE, file.path)
    return types.Resource(
        name=carried(path.removeprefix(f"{_WORKSPACE}/")),
        uri=f"file://{quote(path, errors='replace')}",
        mime_type=mimetypes.guess_type(file.path)[0],
        size=file.size,
    )


def _path_of(uri: str) -> str:
    """Return the path of a file of the workspace. Raise BadRequest for another address."""
    address = urlsplit(uri)
    path = posixpath.normpath(unquote(address.path))
    if address.scheme != "file" or address.netloc or not path.startswith(f"{_WORKSPACE}/"):
        raise BadRequest("resources have addresses such as file:///workspace/data.csv")
    return path


def _contents(uri: str, content: bytes) -> types.TextResourceContents | types.BlobResourceContents:
    kind = mimetypes.guess_type(uri)[0]
    try:
        return types.TextResourceContents(uri=uri, text=content.decode(), mime_type=kind)
    except UnicodeDecodeError:
        data = base64.b64encode(content).decode()
        return types.BlobResourceContents(uri=uri, blob=data, mime_type=kind)


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
    """Yield the lines of a pipe or a file. The last line may lack its newline."""
    buffer = bytearray()
    while piece := await _read(fd):
        start = len(buffer)
        buffer += piece
        while (end := buffer.find(b"\n", start)) >= 0:
            yield buffer[: end + 1].decode(errors="replace")
            del buffer[: end + 1]
            start = 0
    if buffer:
        yield buffer.decode(errors="replace")


async def _read(fd: int) -> bytes:
    """Wait for data and return it. Return no bytes at the end of the file."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(fd, readable.set)
    except OSError:  # epoll(7) refuses a regular file, which is always readable
        return os.read(fd, _PIECE)
    try:
        await readable.wait()
        return os.read(fd, _PIECE)
    finally:
        loop.remove_reader(fd)
