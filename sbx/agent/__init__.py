"""The agent: a loop over a model and its tools, handed a sandbox, with approvals and memory.

    agent.py         the loop; reads like the contract
    step.py          one step: the answer of the model, the results of its calls
    calls.py         the calls of one answer: permission, approval, the tool, its events
    changing.py      a call tried on a copy, so that its effect is what is approved
    rehearsing.py    the same for the commands of a sandbox that is no project
    prompt.py        what a model is told before anything else
    compaction.py    long histories told shorter
    budget.py        what a run may spend
    events.py        what a run tells, until somebody has followed it
    messages.py      what a conversation consists of
    models/          one small contract, three ways to get an answer
    tools/           what a model may call, and what each call would do
    approvals.py     a person's yes or no, waited for
    history.py       where messages are kept, and when a history is whole
    export.py        a history as JSON: out of one sbx and into another
    handing.py       a file from one sandbox to another
    settings.py      which model, which sandbox
    chats.py         the agents of a service: one run a conversation, followed from afar

It imports rows below, and never the runtime: a sandbox in this process, one in a service and a fake
look the same from here (sandbox.py).

    from sbx import Runtime
    from sbx.agent import Agent, OpenAIModel
    async with Runtime() as runtime, await runtime.create() as box:
        end = await Agent(box, OpenAIModel("gpt", api_key=key)).run("What is in data.csv?")

The names of a program that uses it are here; they are loaded when they are used.
"""

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost 20 ms
if TYPE_CHECKING:
    from sbx.agent.agent import Agent
    from sbx.agent.approvals import Approvals
    from sbx.agent.budget import Budget
    from sbx.agent.handing import hand
    from sbx.agent.history import MemoryHistory
    from sbx.agent.messages import Message
    from sbx.agent.models.anthropic import AnthropicModel
    from sbx.agent.models.made import make_model
    from sbx.agent.models.openai import OpenAIModel
    from sbx.agent.models.replay import Recorder, ReplayModel
    from sbx.agent.settings import AgentSettings, read_agent_settings
    from sbx.agent.tools.own import tool
    from sbx.agent.tools.permissions import Permissions
    from sbx.agent.tools.registry import Tools, builtin

__all__ = [
    "Agent",
    "AgentSettings",
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
    "hand",
    "make_model",
    "read_agent_settings",
    "tool",
]

_HOMES = {
    "Agent": "agent",
    "AgentSettings": "settings",
    "AnthropicModel": "models.anthropic",
    "Approvals": "approvals",
    "Budget": "budget",
    "MemoryHistory": "history",
    "Message": "messages",
    "OpenAIModel": "models.openai",
    "Permissions": "tools.permissions",
    "Recorder": "models.replay",
    "ReplayModel": "models.replay",
    "Tools": "tools.registry",
    "builtin": "tools.registry",
    "hand": "handing",
    "make_model": "models.made",
    "read_agent_settings": "settings",
    "tool": "tools.own",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sbx.agent' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sbx.agent.{_HOMES[name]}"), name)
