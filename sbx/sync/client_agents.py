"""What the blocking client asks of agents; see chat.py, approvals.py, projects.py, tools.py."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from sbx.aio import Loop
from sbx.client.chat import ChatEvent
from sbx.client.client import Client, Json
from sbx.client.records import ProjectInfo
from sbx.protocol.pages import Page


class Owned(Protocol):
    """What is needed of a blocking client."""

    loop: Loop
    _client: Client


class BlockingAgentCalls:
    """A part of BlockingClient."""

    # -- chat -------------------------------------------------------------------------------------

    def chat(
        self: Owned,
        message: str | None,
        *,
        user_id: str,
        agent_id: str,
        conversation_id: str | None = None,
        project_id: str | None = None,
        max_steps: int | None = None,
        model: str | None = None,
        business_domain_id: str | None = None,
    ) -> Iterator[ChatEvent]:
        """Ask the agent of a conversation, and follow what it does until its `run_end`. It goes on
        when this is left; `abort_chat` ends it."""
        return self.loop.each(
            self._client.chat(
                message,
                user_id=user_id,
                agent_id=agent_id,
                conversation_id=conversation_id,
                project_id=project_id,
                max_steps=max_steps,
                model=model,
                business_domain_id=business_domain_id,
            )
        )

    def follow_chat(
        self: Owned, conversation_id: str, *, after: int = 0, run_id: str | None = None
    ) -> Iterator[ChatEvent]:
        """The events of what goes on in a conversation, or ended there within the last minute."""
        return self.loop.each(self._client.follow_chat(conversation_id, after=after, run_id=run_id))

    def abort_chat(self: Owned, conversation_id: str) -> bool:
        """End what goes on in a conversation; False where nothing does."""
        return self.loop.call(self._client.abort_chat(conversation_id))

    def messages(
        self: Owned, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """What was said, the oldest first."""
        return self.loop.call(self._client.messages(conversation_id, limit=limit, cursor=cursor))

    def agent_runs(
        self: Owned, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """How the runs of its agent ended, the newest first."""
        return self.loop.call(self._client.agent_runs(conversation_id, limit=limit, cursor=cursor))

    # -- approvals --------------------------------------------------------------------------------

    def approvals(self: Owned, *, limit: int = 50, cursor: str | None = None) -> Page[Json]:
        """The calls that wait for an answer, the oldest first."""
        return self.loop.call(self._client.approvals(limit=limit, cursor=cursor))

    def decide(
        self: Owned,
        tool_call_id: str,
        approved: bool,
        *,
        remember: Literal["exact", "prefix"] | None = None,
        prefix: str | None = None,
    ) -> Json:
        """Say yes or no to one call; see `Client.decide`."""
        return self.loop.call(
            self._client.decide(tool_call_id, approved, remember=remember, prefix=prefix)
        )

    def approval_rules(
        self: Owned,
        *,
        conversation_id: str | None = None,
        project_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Json]:
        """What is allowed without asking again."""
        return self.loop.call(
            self._client.approval_rules(
                conversation_id=conversation_id, project_id=project_id, limit=limit, cursor=cursor
            )
        )

    def revoke_rule(self: Owned, rule_id: str) -> None:
        """From now on it is asked again."""
        self.loop.call(self._client.revoke_rule(rule_id))

    # -- projects ---------------------------------------------------------------------------------

    def projects(self: Owned, *, limit: int = 50, cursor: str | None = None) -> Page[ProjectInfo]:
        """Your projects, by id."""
        return self.loop.call(self._client.projects(limit=limit, cursor=cursor))

    def create_project(
        self: Owned, name: str, working_directory: str, *, sandbox_enabled: bool = True
    ) -> ProjectInfo:
        """A directory of the service's host, for agents to work in."""
        return self.loop.call(
            self._client.create_project(name, working_directory, sandbox_enabled=sandbox_enabled)
        )

    def project(self: Owned, project_id: str) -> ProjectInfo:
        """Raises NotFound."""
        return self.loop.call(self._client.project(project_id))

    def change_project(
        self: Owned,
        project_id: str,
        *,
        name: str | None = None,
        working_directory: str | None = None,
        sandbox_enabled: bool | None = None,
    ) -> ProjectInfo:
        """What is None stays as it is."""
        return self.loop.call(
            self._client.change_project(
                project_id,
                name=name,
                working_directory=working_directory,
                sandbox_enabled=sandbox_enabled,
            )
        )

    def delete_project(self: Owned, project_id: str) -> None:
        """Forget it, with its conversations; the directory stays as it is."""
        self.loop.call(self._client.delete_project(project_id))

    # -- tools ------------------------------------------------------------------------------------

    def tools(self: Owned, format: Literal["openai", "anthropic", "mcp"] = "openai") -> list[Json]:
        """The definitions of the agents' tools, in the words of one provider."""
        return self.loop.call(self._client.tools(format))

    def invoke(
        self: Owned,
        name: str,
        arguments: Mapping[str, Any],
        *,
        session_id: str,
        conversation_id: str,
    ) -> Json:
        """Call a tool as a model would; see `Client.invoke`."""
        return self.loop.call(
            self._client.invoke(
                name, arguments, session_id=session_id, conversation_id=conversation_id
            )
        )
