"""What one run of an agent in the service is for."""

from dataclasses import dataclass

from sbx.agent.chats import ChatAsk, Key
from sbx.agent.messages import ToolCall
from sbx.service.auth import Caller
from sbx.service.models import SandboxView
from sbx.service.projects.projects import Project
from sbx.store.chats import ChatRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest(ChatAsk):
    """A message to the agent of a conversation. `session` and `chat` are ensured; what the agent
    does is done for `caller`, within their bounds. `scope` is what opening the sandbox takes."""

    caller: Caller
    session: SandboxView
    chat: ChatRow
    project: Project | None = None
    scope: str = "execute"

    @property
    def key(self) -> Key:
        return self.chat.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoke(AgentRequest):
    """One call of a tool by a program, without a model. Many may go on in a conversation."""

    call: ToolCall

    @property
    def key(self) -> Key:
        return self.owner, self.call.id
