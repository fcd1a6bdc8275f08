"""The tools of a conversation as an MCP server, over streamable HTTP.

Each request is served by itself: the variables and files that one call leaves for the next are in
the conversation. A client that disconnects interrupts its call.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from sbx.agent.task import TaskTemplate
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolResult
from sbx.aio import in_thread
from sbx.api.agent_v1.dependencies import AgentsDep
from sbx.api.v1.dependencies import PREFIX, Target, TargetDep
from sbx.errors import BadRequest, Denied
from sbx.service.agent_runs import AgentSandbox
from sbx.service.caller import Caller
from sbx.service.external_tools import scope_of

router = APIRouter(prefix=PREFIX, tags=["tools"])
ServeHttp = Callable[..., Awaitable[None]]


# Not in the OpenAPI document: MCP defines the bodies, and the SDK also replies with plain text.
@router.post("/mcp", include_in_schema=False)
async def mcp(target: TargetDep, agents: AgentsDep) -> Response:
    """Serve one message of the Model Context Protocol, whose SDK reads the body and writes the
    reply: JSON, or a stream of events. A token needs the scope of each tool that it calls."""
    templates = {
        name: template
        for name, template in (await agents.tasks.templates()).items()
        if not isinstance(template, BadRequest)
    }
    return _McpReply(target, agents.tools, templates)


class _McpReply(Response):
    """The reply to one message. It holds the lease of the conversation until its end."""

    def __init__(
        self,
        target: Target,
        tools: Tools,
        templates: Mapping[str, TaskTemplate],
    ) -> None:
        super().__init__()
        self._target = target
        self._tools = tools
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve = await in_thread(_server_of_mcp)  # the import of the SDK takes long
        target, caller = self._target, self._target.caller
        tools = Tools(_scoped(tool, caller) for tool in self._tools)
        async with target.use("execute", creates=True) as conversation:
            sandbox = AgentSandbox(target.service.runs, caller, target.view.id, conversation)
            try:
                await serve(sandbox, tools, self._templates, scope, receive, send)
            finally:
                await sandbox.close()


def _server_of_mcp() -> ServeHttp:
    from sbx.agent.mcp import serve_http

    return serve_http


def _scoped(tool: Tool, caller: Caller) -> Tool:
    """Return the tool, which then refuses a call for which the caller has not the scope."""

    async def act(call: ToolCallRequest, arguments: Arguments) -> ToolResult | str:
        if not caller.may(scope := scope_of(tool, arguments)):
            raise Denied(f"the token does not have the scope {scope}", code="forbidden")
        return await tool.act(call, arguments)

    return replace(tool, act=act)
