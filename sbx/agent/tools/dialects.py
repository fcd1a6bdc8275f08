"""Definitions of tools as others write them. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sbx.agent.tools.tool import ToolDefinition

Json = dict[str, Any]


def openai(definitions: Iterable[ToolDefinition]) -> list[Json]:
    """Functions of chat completions."""
    return [
        {
            "type": "function",
            "function": {
                "name": one.name,
                "description": one.description,
                "parameters": dict(one.parameters),
            },
        }
        for one in definitions
    ]


def anthropic(definitions: Iterable[ToolDefinition]) -> list[Json]:
    """Tools of the messages API."""
    return _with_schema(definitions, "input_schema")


def mcp(definitions: Iterable[ToolDefinition]) -> list[Json]:
    """Tools of the Model Context Protocol."""
    return _with_schema(definitions, "inputSchema")


def _with_schema(definitions: Iterable[ToolDefinition], key: str) -> list[Json]:
    return [
        {"name": one.name, "description": one.description, key: dict(one.parameters)}
        for one in definitions
    ]


DIALECTS: Mapping[str, Callable[[Iterable[ToolDefinition]], list[Json]]] = {
    "openai": openai,
    "anthropic": anthropic,
    "mcp": mcp,
}
