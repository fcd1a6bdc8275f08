"""The agent: a loop over a model and its tools, with a sandbox, approvals and a history.

    agent.py       the loop, its options and its budget
    step.py        one step: the answer of the model, the results of its calls
    calls.py       the calls of one answer: permission, approval, the tool, its events
    changing.py    try a call on a copy, so that a user approves its effect
    compaction.py  summaries of long histories
    messages.py    the messages of a conversation
    models/        one interface of a model with three implementations
    tools/         the tools of a model, and the effect of each call
    external/      tools outside of sbx: MCP servers, HTTP endpoints, Python functions
    delegation.py  sub-agents, each with its own sandbox
    approvals.py   the user's yes or no to a call
    state.py       the state of the current run, or of the last one
    history.py     the messages in memory or in the store, and the rules for a complete history
    export.py      a history as JSON, to move it to another sbx
    sandbox.py     the sandbox that the tools act on
    settings.py    the settings of the model and the sandbox
    chats.py       the agents of a service: one run per conversation, followed by clients
    profile.py     the profile of an agent; task.py: templates of tasks
    mcp.py         the tools as an MCP server; mcp_calls.py: its calls and their approvals

The package imports lower rows and never the runtime. It uses a sandbox in this process, a remote
one and a fake in the same way (sandbox.py).

    from sbx import Runtime
    from sbx.agent import Agent, OpenAIModel
    async with Runtime() as runtime, await runtime.create() as box:
        end = await Agent(box, OpenAIModel("gpt", api_key=key)).run("What is in data.csv?")

The public names of the package are here. Each one is imported when it is first used.
"""

TYPE_CHECKING = False  # type checkers assume True; importing typing would cost 20 ms
if TYPE_CHECKING:
    from sbx.agent.agent import Agent, Budget
    from sbx.agent.approvals import Approvals
    from sbx.agent.history import MemoryHistory
    from sbx.agent.messages import Message
    from sbx.agent.models.anthropic import AnthropicModel
    from sbx.agent.models.factory import make_model
    from sbx.agent.models.openai import OpenAIModel
    from sbx.agent.models.replay import Recorder, ReplayModel
    from sbx.agent.sandbox import copy_file
    from sbx.agent.settings import AgentSettings, read_agent_settings
    from sbx.agent.state import AgentState
    from sbx.agent.tools.approval_rules import Permissions
    from sbx.agent.tools.function_tool import tool
    from sbx.agent.tools.registry import Tools, builtin

__all__ = [
    "Agent",
    "AgentSettings",
    "AgentState",
    "AnthropicModel",
    "Approvals",
    "Budget",
    "MemoryHistory",
    "Message",
    "OpenAIModel",
    "Permissions",
    "Recorder",
    "ReplayModel",
    "Tools",
    "builtin",
    "copy_file",
    "make_model",
    "read_agent_settings",
    "tool",
]

_HOMES = {
    "Agent": "agent",
    "AgentSettings": "settings",
    "AgentState": "state",
    "AnthropicModel": "models.anthropic",
    "Approvals": "approvals",
    "Budget": "agent",
    "MemoryHistory": "history",
    "Message": "messages",
    "OpenAIModel": "models.openai",
    "Permissions": "tools.approval_rules",
    "Recorder": "models.replay",
    "ReplayModel": "models.replay",
    "Tools": "tools.registry",
    "builtin": "tools.registry",
    "copy_file": "sandbox",
    "make_model": "models.factory",
    "read_agent_settings": "settings",
    "tool": "tools.function_tool",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sbx.agent' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sbx.agent.{_HOMES[name]}"), name)
