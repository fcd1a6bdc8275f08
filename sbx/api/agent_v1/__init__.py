"""/api/v1, for agents: chat, what was said, approvals, projects, tools.

    models.py     its bodies
    asked.py      what a request names, and who may
    chat.py       a message to an agent; following it; ending it
    messages.py   what was said, and how runs ended
    approvals.py  a person's yes or no; what is remembered of it
    commands.py   a yes to all commands of a conversation
    projects.py   directories of the host that agents work in
    tools.py      the definitions, and calls by a program

    agents.py   the agents of a service, from its start to its end
    opening.py  what one run works with
    talk.py     what one run is for
    source.py   the configured model
    held.py     the sandbox of a session, as an agent holds it
    scopes.py   what an agent may do: no more than who asks it

The loop, the tools and the approvals are `sbx.agent`: here they meet the service, and HTTP.
"""

from sbx.api.agent_v1 import approvals, chat, commands, messages, projects, tools
from sbx.api.agent_v1.agents import Agents
from sbx.api.agent_v1.asked import agents_of

routers = tuple(part.router for part in (chat, messages, approvals, commands, projects, tools))

__all__ = ["Agents", "agents_of", "routers"]
