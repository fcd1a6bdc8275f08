"""The tools of a conversation as an MCP server, over streamable HTTP.

Each request is served by itself: the variables and files that one call leaves for the next are in
the conversation. A client that disconnects interrupts its call. A call that needs an approval waits
here for the next request of its client, which has the answer of the user.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, FastAPI, Request, Response
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from sbx.agent.approvals import Approvals
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolResult
from sbx.api.agent_v1.dependencies import AgentsDep
from sbx.api.ports import while_allowed
from sbx.api.v1.dependencies import PREFIX, Target, TargetDep
from sbx.errors import Denied
from sbx.imports import import_in_thread
from sbx.service.agent_runs import AgentSandbox
from sbx.service.agents import Agents
from sbx.service.caller import Caller
from sbx.service.external_tools import scope_of

router = APIRouter(prefix=PREFIX, tags=["tools"])


# Not in the OpenAPI document: MCP defines the bodies, and the SDK also replies with plain text.
@router.post("/mcp", include_in_schema=False)
async def mcp(request: Request, target: TargetDep, agents: AgentsDep) -> Response:
    """Serve one message of the Model Context Protocol, whose SDK reads the body and writes the
    reply: JSON, or a stream of events. A token needs the scope of each tool that it calls."""
    return _McpReply(target, agents, _clients_of(request.app))


class _McpReply(Response):
    """The reply to one message. It holds the lease of the conversation until its end."""

    def __init__(
        self,
        target: Target,
        agents: Agents,
        clients: "_Clients",
    ) -> None:
        super().__init__()
        self._target = target
        self._agents = agents
        self._clients = clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The import of the SDK takes long.
        sdk = await import_in_thread("sbx.agent.mcp")
        target, caller = self._target, self._target.caller
        tools = Tools(_scoped(tool, caller) for tool in self._agents.tools)
        async with _opened(target) as sandbox:
            calls = self._clients.calls_of(sdk, target, tools)
            serving = sdk.serve_http(
                sandbox, tools, self._agents.tasks.valid_templates, calls, scope, receive, send
            )
            await while_allowed(Request(scope), serving)


class _Clients:
    """The calls that wait for an answer of a user, by their client: another one cannot answer. A
    call keeps its entry here."""

    def __init__(self) -> None:
        self._calls: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()

    def calls_of(self, sdk: Any, target: Target, tools: Tools) -> Any:
        caller = target.caller
        client = (target.sandbox_id, target.name, caller.space, caller.via_id)
        if (calls := self._calls.get(client)) is None:
            asks = sdk.McpApprovals(Approvals())
            calls = sdk.McpCalls(partial(_opened, target), tools, asks)
            self._calls[client] = calls
        return calls

    async def close(self) -> None:
        for calls in list(self._calls.values()):
            await calls.close()


def _clients_of(app: FastAPI) -> _Clients:
    """Return the clients of an app, created at the first request."""
    state = app.state
    if not hasattr(state, "mcp_clients"):
        state.mcp_clients = _Clients()
        state.service.on_close(state.mcp_clients.close)
    clients: _Clients = state.mcp_clients
    return clients


@asynccontextmanager
async def _opened(target: Target) -> AsyncIterator[AgentSandbox]:
    """Yield the sandbox of a conversation, and hold its lease meanwhile."""
    async with target.use("execute", creates=True) as conversation:
        runs, caller = target.service.runs, target.caller
        sandbox = AgentSandbox(runs, caller, target.view.id, conversation)
        try:
            yield sandbox
        finally:
            await sandbox.close()


def _scoped(tool: Tool, caller: Caller) -> Tool:
    """Return the tool, which then refuses a call for which the caller has not the scope."""

    async def act(call: ToolCallRequest, arguments: Arguments) -> ToolResult | str:
        if not caller.may(scope := scope_of(tool, arguments)):
            raise Denied(f"the token does not have the scope {scope}", code="forbidden")
        return await tool.act(call, arguments)

    return replace(tool, act=act)
