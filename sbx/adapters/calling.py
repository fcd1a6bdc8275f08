"""The tools of sbx.agent over one sandbox, for callers with and without asyncio."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from sbx.agent.messages import ToolCall
from sbx.agent.prompt import surroundings_of
from sbx.agent.sandbox import Conversations, ToolSandbox, one_of
from sbx.agent.tools.execution import unheard
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolDefinition, ToolResult
from sbx.errors import BadRequest
from sbx.sync.blocking import BlockingConversation, beneath

AnySandbox = BlockingConversation | ToolSandbox | Conversations


class ToolCaller:
    """Calls of tools by their names, with arguments as JSON text or as an object.

    `sandbox` is a `ToolSandbox`, an `AsyncSandbox` or a conversation of either, local or remote.
    `tools` defaults to the built-in ones. A failed call returns an error as its result. Cancelling
    a call interrupts its run.
    """

    def __init__(self, sandbox: AnySandbox, tools: Tools | None = None) -> None:
        self._sandbox: BlockingConversation | ToolSandbox = (
            sandbox if isinstance(sandbox, BlockingConversation) else one_of(sandbox)
        )
        self._tools = tools or Tools()

    def definitions(self) -> tuple[ToolDefinition, ...]:
        """Return the tools that exist in the sandbox. A sandbox for asyncio cannot be asked here:
        return all of them."""
        if not isinstance(self._sandbox, BlockingConversation):
            return self._tools.definitions()
        loop, inner = beneath(self._sandbox)
        return self._tools.definitions(loop.call(surroundings_of(inner)))

    def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Call a tool and wait. Raise BadRequest `needs_asyncio` for a sandbox for asyncio."""
        if not isinstance(self._sandbox, BlockingConversation):
            raise BadRequest(
                "a sandbox for asyncio cannot be called without it",
                code="needs_asyncio",
                hint="await the tool (ainvoke), or give it an sbx.Sandbox",
            )
        loop, inner = beneath(self._sandbox)
        return loop.call(self._tools.call(_call(name, arguments), inner, unheard))

    async def call_async(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        call = _call(name, arguments)
        if not isinstance(self._sandbox, BlockingConversation):
            return await self._tools.call(call, self._sandbox, unheard)
        loop, inner = beneath(self._sandbox)
        return await loop.awaited(self._tools.call(call, inner, unheard))


def _call(name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments))
    return ToolCall(f"call-{secrets.token_hex(8)}", name, text)
