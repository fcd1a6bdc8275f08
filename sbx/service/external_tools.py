"""The external tools that a session may use, and the scope that a call needs."""

from collections.abc import Mapping
from functools import partial

from sbx.agent.external.registry import ExternalTools
from sbx.agent.external.source import ToolSource
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Arguments, Effect, Tool
from sbx.service.caller import Caller
from sbx.service.models import SandboxView

SCOPE_OF: Mapping[Effect, str] = {
    "read": "files:read",
    "write": "files:write",
    "code": "execute",
    "command": "execute",
}


def is_allowed_in(session: SandboxView, source: ToolSource) -> bool:
    """Return whether the owner, user and agent of a session may call the tools of a source."""
    return source.allows(session.owner, session.user_id, session.agent_id)


def scope_of(tool: Tool, arguments: Arguments) -> str:
    """Return the scope that this call needs."""
    return tool.scope or SCOPE_OF[tool.effect(arguments)]


async def find_tool(
    name: str, tools: Tools, external: ExternalTools, caller: Caller, session: SandboxView
) -> Tool:
    """Return one of `tools`, or an external one that a session may use. Raise NotFound
    `tool_not_found`."""
    if name not in tools.names:
        user = caller.owner, session.user_id
        tool = await external.tool(name, user, partial(is_allowed_in, session))
        if tool is not None:
            return tool
    return tools.get(name)
