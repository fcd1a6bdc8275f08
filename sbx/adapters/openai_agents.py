"""Function tools of the OpenAI Agents SDK that act in a sandbox.

    with Sandbox() as box:
        agent = Agent(name="analyst", tools=function_tools(box))
        result = await Runner.run(agent, "How many rows has data.csv?")

They are the tools of sbx.agent, with the same schemas, results and errors.
"""

from typing import Any

from sbx.adapters.calling import AnySandbox, ToolCaller
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolDefinition, ToolResult
from sbx.errors import needs_extra

with needs_extra("sbx.adapters.openai_agents", "openai-agents"):
    from agents import FunctionTool, Tool, ToolOutputImage, ToolOutputText
    from agents.tool_context import ToolContext

Output = str | list[ToolOutputText | ToolOutputImage]


def function_tools(sandbox: AnySandbox, tools: Tools | None = None) -> list[Tool]:
    """Return run_code, execute_command, read_file, write_file, edit_file and list_files, or
    `tools`. Figures are returned as images."""
    calls = ToolCaller(sandbox, tools)
    return [_function_tool(calls, definition) for definition in calls.definitions()]


def _function_tool(calls: ToolCaller, definition: ToolDefinition) -> FunctionTool:
    async def invoked(_context: ToolContext[Any], arguments: str) -> Output:
        return _output(await calls.call_async(definition.name, arguments))

    return FunctionTool(
        name=definition.name,
        description=definition.description,
        params_json_schema=dict(definition.parameters),
        on_invoke_tool=invoked,
        strict_json_schema=False,  # strict schemas have no optional arguments
    )


def _output(result: ToolResult) -> Output:
    if not result.images:
        return result.text
    urls = [f"data:{image.media_type};base64,{image.data}" for image in result.images]
    return [ToolOutputText(text=result.text), *(ToolOutputImage(image_url=url) for url in urls)]
