"""Functions of Python modules on the host, as tools."""

import importlib
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from sbx.agent.external.source import PythonSource
from sbx.agent.tools.function_tool import tool
from sbx.agent.tools.tool import Tool
from sbx.errors import BadRequest


def load_functions(name: str, source: PythonSource) -> list[Tool]:
    """Import the module, and return the tools. A single function has the name of its source. Raise
    BadRequest `invalid_tool`, and the errors of the import."""
    module, _, attribute = source.function.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise BadRequest(f"{module} has no {attribute}", code="invalid_tool")
        value = getattr(value, part)
    if isinstance(value, Sequence):
        return [_tool(None, each) for each in value]
    return [_tool(name, value)]


def _tool(name: str | None, value: Any) -> Tool:
    function = value if isinstance(value, Tool) else tool(name=name)(value)
    if name is None:
        return function
    return replace(function, definition=replace(function.definition, name=name))
