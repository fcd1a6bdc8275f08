"""/api/v1, for agents: chat, messages, approvals, projects, tools.

    models.py        its bodies
    dependencies.py  the conversation, the project and the session that a request names
    chat.py          send a message to an agent, follow it, abort it
    messages.py      the messages of a conversation; the runs of agents, and a report on them
    approvals.py     decisions of a person, remembered rules, the commands of a conversation
    projects.py      directories of the host that agents work in
    agents.py        profiles: the instructions, tools and limits of an agent
    tasks.py         tasks from templates, for one input or for many
    tools.py         the definitions of tools, and calls by a program
    mcp.py           the same tools for MCP clients

`sbx.agent` has the loop, the tools and the approvals. `sbx.service.agents` connects them with the
service.
"""

from sbx.api.agent_v1 import agents, approvals, chat, mcp, messages, projects, tasks, tools
from sbx.api.agent_v1.dependencies import agents_of

routers = (
    *(part.router for part in (chat, messages, approvals, projects, agents, tasks, tools, mcp)),
    approvals.of_conversations,
    messages.of_all,
)

__all__ = ["agents_of", "routers"]
