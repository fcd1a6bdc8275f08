"""Tool definitions in the formats of the providers. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sbx.agent.tools.tool import ToolDefinition

Json = dict[str, Any]


def openai(definitions: Iterable[ToolDefinition]) -> list[Json]:
    """Return functions of the chat completions API."""
    return [
        {
            "type": "function",
            "function": {
                "name": definition.name,
                "description": definition.description,
                "parameters": dict(definition.parameters),
            },
        }
        for definition in definitions
    ]


def anthropic(definitions: Iterable[ToolDefinition]) -> list[Json]:
    """Return tools of the messages API."""
    return _with_schema(definitions, "input_schema")


def mcp(definitions: Iterable[ToolDefinition]) -> list[Json]:
    """Return tools of the Model Context Protocol."""
    return _with_schema(definitions, "inputSchema")


def _with_schema(definitions: Iterable[ToolDefinition], key: str) -> list[Json]:
    return [
        {
            "name": definition.name,
            "description": definition.description,
            key: dict(definition.parameters),
        }
        for definition in definitions
    ]


DIALECTS: Mapping[str, Callable[[Iterable[ToolDefinition]], list[Json]]] = {
    "openai": openai,
    "anthropic": anthropic,
    "mcp": mcp,
}
