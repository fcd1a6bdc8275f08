"""The tool `delegate`: a part of a task for another agent, with its own sandbox.

The other agent, a sub-agent, has the same model, and no more tools and permissions than the first.
It sees the files that the call names, and none of the conversation. Its answer comes back, and the
files that the call names. Its sandbox and its history are deleted then. No person is asked for it:
what needs an approval is denied. It cannot delegate.
"""

import asyncio
import posixpath
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing

from msgspec import Struct

from sbx.agent.agent import Agent, Budget
from sbx.agent.messages import Price, TokenUsage, carried
from sbx.agent.models import Model
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools import paths
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.plan import NAME as PLAN
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolDefinition, ToolResult
from sbx.errors import BadRequest, SbxError
from sbx.protocol.agent import AgentRunEnd, ToolEnd, ToolStart

NAME = "delegate"
_FILES_MAX = 50
_TASK_MAX = 100_000  # characters
_PATH = {"type": "string", "minLength": 1, "maxLength": 1000}
_PROMPT = (
    "You work on one part of a larger task, for another agent, which sees only your last answer and"
    " the files that it has named. Nobody can answer questions."
)
OpenSandbox = Callable[[], AbstractAsyncContextManager[ToolSandbox]]


class Delegation(Struct, frozen=True):
    """The means of sub-agents: the first agent's `model` and `tools`, a new sandbox from
    `open_sandbox`, and `permissions` in it. `max_steps` and `max_tokens` limit each of them, and
    `at_once` their number. `price` and `max_cost` are those of the first agent."""

    model: Model
    tools: Tools
    open_sandbox: OpenSandbox
    permissions: Callable[[ToolSandbox], Permissions]
    instructions: str = ""
    max_steps: int = 20
    max_tokens: int | None = None
    at_once: int = 4
    max_cost: float | None = None
    price: Price | None = None


def delegate_tool(delegation: Delegation) -> Tool:
    """Return the tool. Its calls run code, so they need the scope `execute`."""
    names = [tool.name for tool in delegation.tools if tool.name != PLAN]
    steps = {"type": "integer", "minimum": 1, "maximum": delegation.max_steps}
    files = {"type": "array", "maxItems": _FILES_MAX, "items": _PATH}
    parameters = {
        "type": "object",
        "properties": {
            "task": {
                "type": "string",
                "minLength": 1,
                "maxLength": _TASK_MAX,
                "description": "The whole task: the other agent does not see this conversation.",
            },
            "files": {**files, "description": "Files of yours that it gets, at the same paths."},
            "returns": {
                **files,
                "description": "Files that it writes and you get, at the same paths.",
            },
            "tools": {
                "type": "array",
                "items": {"enum": names},
                "description": "Its tools; all of yours by default.",
            },
            "max_steps": {**steps, "description": "The limit of its answers."},
        },
        "required": ["task"],
        "additionalProperties": False,
    }

    turns = asyncio.Semaphore(delegation.at_once)

    async def act(call: ToolCallRequest, arguments: Arguments) -> ToolResult:
        async with turns:
            return await _delegate(delegation, call, arguments)

    return Tool(
        ToolDefinition(
            NAME,
            "Give a part of your task to another agent, which has its own sandbox. Its answer"
            " is the result. Parts that do not depend on each other can be delegated in one answer:"
            " they run at the same time.",
            parameters,
        ),
        act,
        effect=lambda arguments: "write" if arguments.get("returns") else "read",
        independent=True,
        scope="execute",
    )


async def _delegate(
    delegation: Delegation, call: ToolCallRequest, arguments: Arguments
) -> ToolResult:
    """Run a sub-agent. Raise the errors of reading files and of creating a sandbox."""
    files, returns = arguments.get("files", ()), arguments.get("returns", ())
    contents = {_target(path): await paths.read(call.sandbox, path) for path in files}
    chosen = arguments.get("tools")
    tools = Tools(
        tool
        for tool in delegation.tools
        if tool.name != PLAN and (chosen is None or tool.name in chosen)
    )
    async with delegation.open_sandbox() as sandbox:
        for path, content in contents.items():
            await paths.write(sandbox, path, content)
        agent = Agent(
            sandbox,
            delegation.model,
            tools=tools,
            permissions=delegation.permissions(sandbox),
            instructions="\n\n".join(filter(None, (delegation.instructions, _PROMPT))),
            budget=Budget(delegation.max_tokens, cost=delegation.max_cost, price=delegation.price),
        )
        steps = arguments.get("max_steps", delegation.max_steps)
        end = await _followed(
            agent, _message(arguments["task"], list(contents), returns), steps, call
        )
        notes = [await _return(sandbox, call.sandbox, path) for path in returns]
    text = end.content
    if end.reason != "done":
        problem = (end.error or {}).get("message", "")
        notes.insert(0, f"It ended before it was done: {end.reason}. {problem}".strip())
    usage = TokenUsage(end.usage["input_tokens"], end.usage["output_tokens"])
    return ToolResult(
        carried("\n\n".join([text, *notes]).strip()), is_error=end.reason == "error", usage=usage
    )


async def _followed(
    agent: Agent, message: str, max_steps: int, call: ToolCallRequest
) -> AgentRunEnd:
    """Run the agent, and show its calls as live output of the call."""
    async with aclosing(agent.stream(message, max_steps=max_steps)) as events:
        async for event in events:
            match event:
                case ToolStart():
                    call.emit("stdout", f"{event.tool_name} …\n")
                case ToolEnd(is_error=True):
                    call.emit("stderr", f"{event.result[:200]}\n")
                case AgentRunEnd():
                    return event
    raise AssertionError  # a run ends with its end event


async def _return(source: ToolSandbox, target: ToolSandbox, path: str) -> str:
    """Copy a file back. Return a line about it, also about one that is missing."""
    try:
        size = await paths.write(target, path, await paths.read(source, _target(path)))
    except SbxError as error:
        return f"{path} did not come back: {error.message}"
    return f"{path}: {size} bytes"


def _target(path: str) -> str:
    """Return the path in the other sandbox: the same below /workspace, and the name of a file that
    lies elsewhere. Raise BadRequest `invalid_arguments`."""
    below = posixpath.normpath(posixpath.join("/workspace", path))
    inside = below.removeprefix("/workspace/")
    if inside == below or inside.partition("/")[0] == "uploads":
        inside = posixpath.basename(below)
    if inside in ("", ".", "..", "workspace"):
        raise BadRequest(f"{path[:200]!r} is not a file", code="invalid_arguments")
    return inside


def _message(task: str, files: list[str], returns: list[str]) -> str:
    parts = [task]
    if files:
        parts.append(f"Your files, in /workspace: {', '.join(files)}")
    if returns:
        targets = ", ".join(map(_target, returns))
        parts.append(f"Write these files, in /workspace: {targets}")
    return "\n\n".join(parts)
