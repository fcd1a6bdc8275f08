"""LangChain tools that act in a sandbox.

    with Sandbox() as box:
        agent = create_agent(model, tools=[python_tool(box)])
        agent.invoke({"messages": [("user", "How many rows has data.csv?")]})

They are the tools of sbx.agent, with the same schemas, results and errors.
"""

from typing import Any

from sbx.adapters.calling import AnySandbox, ToolCaller
from sbx.agent.tools.execution import RUN_CODE
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolResult
from sbx.errors import needs_extra

with needs_extra("sbx.adapters.langchain", "langchain"):
    from langchain_core.tools import BaseTool, ToolException
    from pydantic import PrivateAttr

Content = str | list[dict[str, Any]]


class SandboxTool(BaseTool):
    """One tool of sbx. The content of its message is the text for the model, with figures as
    images. Its artifact is the ToolResult. A failed call returns a message of status `error`.

    Without asyncio (`invoke`) it needs a sandbox without asyncio.
    """

    _calls: ToolCaller = PrivateAttr()

    def __init__(self, calls: ToolCaller, **fields: Any) -> None:
        super().__init__(response_format="content_and_artifact", handle_tool_error=True, **fields)
        self._calls = calls

    def _run(self, **arguments: Any) -> tuple[Content, ToolResult]:
        return _content(self._calls.call(self.name, arguments))

    async def _arun(self, **arguments: Any) -> tuple[Content, ToolResult]:
        return _content(await self._calls.call_async(self.name, arguments))


def sandbox_tools(sandbox: AnySandbox, tools: Tools | None = None) -> list[BaseTool]:
    """Return run_code, execute_command, read_file, write_file, edit_file and list_files, or
    `tools`."""
    calls = ToolCaller(sandbox, tools)
    return [
        SandboxTool(
            calls,
            name=definition.name,
            description=definition.description,
            args_schema=dict(definition.parameters),
        )
        for definition in calls.definitions()
    ]


def python_tool(sandbox: AnySandbox) -> BaseTool:
    """Return only `run_code`. Variables are kept between calls."""
    (tool,) = sandbox_tools(sandbox, Tools([RUN_CODE]))
    return tool


def _content(result: ToolResult) -> tuple[Content, ToolResult]:
    if result.is_error:
        raise ToolException(result.text)
    if not result.images:
        return result.text, result
    images = [
        {"type": "image", "base64": image.data, "mime_type": image.media_type}
        for image in result.images
    ]
    return [{"type": "text", "text": result.text}, *images], result
