"""An MCP server of the operator: connected, supervised, and started again after it has ended.

    McpServer.run    the supervisor: connect, list the tools, wait for the end, connect again
    McpServer.call   one call; it fails at once while the server is not connected

The official SDK has the protocol. The transport of a started server is ours: that of the SDK keeps
a line of any length in memory and copies it with each piece, so an answer of 100 MB blocks the
event loop for seconds.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from sbx.agent.external.http import ANSWER_MAX, AnswerTooLong
from sbx.agent.external.source import McpSource
from sbx.agent.messages import Image
from sbx.agent.models.sdk_model import bounded_client
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolDefinition, ToolResult
from sbx.aio import run_to_completion
from sbx.errors import SbxError, Unavailable, needs_extra
from sbx.protocol.bundles import ValueCounter

with needs_extra("a source of tools with MCP", "mcp"):
    import anyio
    import mcp_types as types
    from anyio.abc import Process
    from anyio.streams.buffered import BufferedByteReceiveStream
    from mcp import Client, MCPError
    from mcp.client.stdio import get_default_environment
    from mcp.client.streamable_http import streamable_http_client
    from mcp.os.posix.utilities import terminate_posix_process_tree
    from mcp.shared.message import SessionMessage

_CONNECT_S = 15.0
_END_S = 1.0  # for the server, after its stdin is closed, and after SIGTERM
_PAUSE_S, _PAUSE_MAX_S = 0.5, 60.0  # before a new start; the pause doubles
_STABLE_S = 60.0  # a server that ran for so long is started again at once
_TOOLS_MAX = 200
_PAGES_MAX = 20
_SCHEMA_MAX = 64 << 10  # characters
_DESCRIPTION_MAX = 2000
_PARTS_MAX = 1000  # of a result
_VALUES_MAX = 50_000  # in a message; the SDK takes 1 µs of the event loop for each
_COUNTED_AT_ONCE = 64 << 10  # bytes
_IMAGES_MAX = 4
_IMAGE_MAX = 4 << 20  # characters of base64
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_ERRORS_MAX = 2000  # bytes of stderr that explain an end
_CLOSED = -32000  # JSON-RPC: the connection has ended
_log = logging.getLogger(__name__)
Clean = Callable[[str], str]


class McpServer:
    """`env` and `headers` have the values of secrets; `clean` removes them from a text."""

    def __init__(
        self,
        name: str,
        source: McpSource,
        *,
        env: Mapping[str, str],
        headers: Mapping[str, str],
        timeout_s: float,
        clean: Clean,
    ) -> None:
        self.tools: Sequence[Tool] = ()
        self.problem: str | None = None
        self.settled = asyncio.Event()  # the first attempt to connect has ended
        self._name, self._source = name, source
        self._env, self._headers = env, headers
        self._timeout_s, self._clean = timeout_s, clean
        self._client: Client | None = None
        self._ended = asyncio.Event()
        self._stderr = b""

    async def run(self) -> None:
        """Keep the server connected until this is cancelled."""
        pause = _PAUSE_S
        while True:
            started_at = asyncio.get_running_loop().time()
            try:
                await self._connected()
                self._fail("the server has ended")
            except Exception as error:  # noqa: BLE001  # the border of a program of others
                self._fail(_reason(error))
            if asyncio.get_running_loop().time() - started_at > _STABLE_S:
                pause = _PAUSE_S
            await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSE_MAX_S)

    def _fail(self, reason: str) -> None:
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        more = f"; its last words: {lines[-1]:.300}" if lines else ""
        self.problem = self._clean(f"{reason}{more}")
        self.settled.set()
        _log.warning("the MCP server %s is not connected: %s", self._name, self.problem)

    async def _connected(self) -> None:
        self._ended.clear()
        self._stderr = b""
        async with (
            asyncio.timeout(_CONNECT_S) as limit,
            Client(self._transport(), read_timeout_seconds=self._timeout_s) as client,
        ):
            self.tools = await self._list(client)
            limit.reschedule(None)
            if not self._ended.is_set():
                self._client, self.problem = client, None
            self.settled.set()
            try:
                await self._ended.wait()
            finally:
                self._client = None

    def _lost(self) -> None:
        """End the connection. Calls fail from now on."""
        self._client = None
        self.problem = self.problem or "the server has ended"
        self._ended.set()

    def _transport(self) -> Any:
        if self._source.url is not None:
            return self._over_http(self._source.url)
        return self._over_pipes(self._source.command or ())

    async def _list(self, client: Client) -> list[Tool]:
        tools: dict[str, Tool] = {}
        cursor = None
        for _ in range(_PAGES_MAX):
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            for each in page.tools:
                chosen = self._source.tools is None or each.name in self._source.tools
                if chosen and len(tools) < _TOOLS_MAX and (tool := self._tool(each)) is not None:
                    tools.setdefault(tool.name, tool)
            if (cursor := page.next_cursor) is None:
                break
        return list(tools.values())

    def _tool(self, described: types.Tool) -> Tool | None:
        """Return a tool of the server. Leave one out whose schema is too large or not of an object:
        a provider would refuse the whole request."""
        schema = described.input_schema
        if schema.get("type") != "object" or len(json.dumps(schema)) > _SCHEMA_MAX:
            _log.warning("a tool of the MCP server %s has an unusable schema", self._name)
            return None
        text = (described.description or described.title or described.name)[:_DESCRIPTION_MAX]
        original = described.name

        async def act(_: ToolCallRequest, arguments: Arguments) -> ToolResult:
            return await self._call(original, arguments)

        return Tool(ToolDefinition(original, text, schema), act, effect=lambda _: "read")

    async def _call(self, name: str, arguments: Arguments) -> ToolResult:
        if (client := self._client) is None:
            raise Unavailable(
                f"the server {self._name} is not connected: {self.problem}",
                code="tool_unavailable",
                hint="go on without it, or try again later",
            )
        try:
            return _result(await client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.error.code == _CLOSED:
                self._lost()
                raise Unavailable(
                    f"the server {self._name} ended during the call", code="tool_unavailable"
                ) from None
            raise Unavailable(f"{error.error.message:.2000}", code="tool_failed") from None
        except (AnswerTooLong, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            self._lost()
            raise Unavailable(f"the call failed: {error!s:.300}", code="tool_failed") from None

    # -- transports -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _over_http(self, url: str) -> AsyncGenerator[Any, None]:
        client = bounded_client(self._timeout_s, AnswerTooLong, ANSWER_MAX, _VALUES_MAX)
        client.headers.update(self._headers)
        async with client, streamable_http_client(url, http_client=client) as streams:
            yield streams

    @asynccontextmanager
    async def _over_pipes(self, command: Sequence[str]) -> AsyncGenerator[Any, None]:
        """Start the server, and yield its messages. It gets few variables of this process. A line
        of more than ANSWER_MAX bytes or 50,000 values ends it. Its directory is `/`: `npx`, `uvx`
        and `python -m` take programs from their working directory, which may be a workspace."""
        process = await anyio.open_process(
            list(command),
            cwd="/",
            env=get_default_environment() | dict(self._env),
            start_new_session=True,  # its group is ended with it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        incoming, reads = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        writes, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            lines = BufferedByteReceiveStream(stdout)
            async with incoming:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    while True:
                        try:
                            line = await lines.receive_until(b"\n", ANSWER_MAX)
                        except (anyio.DelimiterNotFound, anyio.IncompleteRead):
                            break  # a line that is too long, or the end
                        if await _is_crowded(line):
                            self.problem = f"it sent a message of more than {_VALUES_MAX} values"
                            break
                        await incoming.send(_message(line))
            self._lost()

        async def write() -> None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                async for message in outgoing:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await stdin.send(text.encode() + b"\n")

        async def read_errors() -> None:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for piece in stderr:
                    self._stderr = (self._stderr + piece)[-_ERRORS_MAX:]

        async with anyio.create_task_group() as tasks:
            for part in (read, write, read_errors):
                tasks.start_soon(part)
            try:
                yield reads, writes
            finally:
                try:
                    await run_to_completion(_end(process))
                finally:
                    tasks.cancel_scope.cancel()
                    for stream in (reads, writes, incoming, outgoing):
                        stream.close()


async def _end(process: Process) -> None:
    """End a server with all processes of its group."""
    with suppress(OSError, anyio.BrokenResourceError):
        if process.stdin is not None:
            await process.stdin.aclose()
    with anyio.move_on_after(_END_S):
        await process.wait()
    await terminate_posix_process_tree(process, _END_S)
    await process.wait()
    await process.aclose()


async def _is_crowded(line: bytes) -> bool:
    """Return whether a message has more than 50,000 values. Other tasks run meanwhile."""
    values = ValueCounter()
    for at in range(0, len(line) if len(line) > _VALUES_MAX else 0, _COUNTED_AT_ONCE):
        values.feed(line[at : at + _COUNTED_AT_ONCE])
        await asyncio.sleep(0)
    return values.count > _VALUES_MAX


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


def _reason(error: BaseException) -> str:
    """Return the cause in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it did not answer within {_CONNECT_S:g} s"
    return error.message if isinstance(error, SbxError) else f"{type(error).__name__}: {error}"


def _result(result: types.CallToolResult) -> ToolResult:
    texts: list[str] = []
    images: list[Image] = []
    for part in result.content[:_PARTS_MAX]:
        if isinstance(part, types.TextContent):
            texts.append(part.text)
        elif isinstance(part, types.ImageContent):
            usable = part.mime_type in _IMAGE_TYPES and len(part.data) <= _IMAGE_MAX
            if usable and len(images) < _IMAGES_MAX:
                images.append(Image(part.mime_type, part.data))
            else:
                texts.append(f"[an image of the type {part.mime_type:.80} is left out]")
        elif isinstance(part, types.EmbeddedResource) and hasattr(part.resource, "text"):
            texts.append(part.resource.text)
        else:
            texts.append(f"[content of the type {part.type} is left out]")
    if (left_out := len(result.content) - _PARTS_MAX) > 0:
        texts.append(f"[{left_out} more parts are left out]")
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n\n".join(texts) or ("" if images else "done, without a text")
    return ToolResult(text, is_error=bool(result.is_error), images=tuple(images))
