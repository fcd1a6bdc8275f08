"""Agents of a service: chats, approvals, projects, tools, profiles."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from sbx import errors
from sbx.client import records
from sbx.client.errors import decode
from sbx.client.http import HttpClient, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.records import ProjectInfo
from sbx.client.replies import connection_lost
from sbx.client.requests import Json, ServiceRequests, without_none
from sbx.protocol.agent import AgentEvent, AgentRunEnd, from_json
from sbx.protocol.approvals import Remember
from sbx.protocol.pages import Page

_REATTACH_S = 55.0  # the service repeats missed events until 60 s after the end of a run
_REATTACH_PAUSE_S = 0.25
_APPROVALS = target("api", "v1", "approvals")
_PROJECTS = target("api", "v1", "projects")
_AGENTS = target("api", "v1", "agents")


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """An event of a run of an agent. `seq` increases by one within a run."""

    seq: int
    run_id: str
    conversation_id: str
    event: AgentEvent


class AgentCalls(ServiceRequests):
    """The calls of `Client` to agents: chats, approvals, projects, tools and profiles."""

    # -- chats ------------------------------------------------------------------------------------

    async def chat(
        self,
        message: str | None,
        *,
        user_id: str,
        agent_id: str,
        conversation_id: str | None = None,
        project_id: str | None = None,
        max_steps: int | None = None,
        model: str | None = None,
        completion_check: str | None = None,
        business_domain_id: str | None = None,
    ) -> AsyncGenerator[ChatEvent, None]:
        """Send a message to the agent of a conversation, and yield the events of its run until its
        `run_end`. The run continues if the caller stops to follow it; `abort_chat` ends it. If the
        connection is lost, continue after the last event. Without a message, resume an earlier run
        that was interrupted.

        Raise Conflict `run_in_progress`, NotFound, Unavailable `model_not_configured`.
        """
        name = conversation_id or f"conversation-{secrets.token_hex(8)}"
        fields = without_none(
            user_id=user_id,
            agent_id=agent_id,
            conversation_id=name,
            project_id=project_id,
            message=message,
            resume=True if message is None else None,
            max_steps=max_steps,
            model=model,
            completion_check=completion_check,
            business_domain_id=business_domain_id,
        )
        body = json.dumps(fields).encode("ascii")
        async with aclosing(_ChatFollower(self._wire, name).start(body)) as events:
            async for event in events:
                yield event

    async def start_chat(
        self,
        message: str,
        *,
        user_id: str,
        agent_id: str,
        conversation_id: str | None = None,
        project_id: str | None = None,
        max_steps: int | None = None,
        model: str | None = None,
        completion_check: str | None = None,
    ) -> Json:
        """Send a message to the agent of a conversation, and return at once: `run_id`,
        `conversation_id`, `session_id`, `sandbox_id`. `follow_chat` has the events. Raise as
        `chat`."""
        body = without_none(
            user_id=user_id,
            agent_id=agent_id,
            conversation_id=conversation_id or f"conversation-{secrets.token_hex(8)}",
            project_id=project_id,
            message=message,
            max_steps=max_steps,
            model=model,
            completion_check=completion_check,
            detach=True,
        )
        return await self._json("POST", target("api", "v1", "chat"), body)

    async def follow_chat(
        self, conversation_id: str, *, after: int = 0, run_id: str | None = None
    ) -> AsyncGenerator[ChatEvent, None]:
        """Yield the events with numbers above `after` of the run in a conversation, also if it has
        ended within the last minute. Raise NotFound `no_chat`."""
        follower = _ChatFollower(self._wire, conversation_id, after, run_id)
        async with aclosing(follower.events()) as events:
            async for event in events:
                yield event

    async def abort_chat(self, conversation_id: str) -> bool:
        """End the run in a conversation: deny its pending approvals and interrupt its code. Return
        False if no run was active."""
        path = target("api", "v1", "chat", conversation_id, "abort")
        reply = await self._wire.call("POST", path, again=True)
        return bool(reply.json()["aborted"])

    async def messages(
        self, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """Return the messages of a conversation, the oldest first."""
        path = target("api", "v1", "conversations", conversation_id, "messages")
        reply = await self.request("GET", path, params={"limit": limit, "cursor": cursor})
        return records.page(reply, dict)

    async def agent_runs(
        self, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """Return the runs of its agent with their results, the newest first."""
        path = target("api", "v1", "conversations", conversation_id, "runs")
        reply = await self.request("GET", path, params={"limit": limit, "cursor": cursor})
        return records.page(reply, dict)

    async def active_runs(self) -> list[Json]:
        """Return the runs that are active now: step, plan, pending calls, usage, cost."""
        return await self._items(target("api", "v1", "runs"))

    async def run_report(self, *, since: float = 0.0, agent_id: str | None = None) -> Json:
        """Return a report on the last 10,000 runs that have ended: their ends, tools, failures, and
        time and tokens by step. `since` in seconds of the epoch."""
        path = target("api", "v1", "runs", "report")
        params = {"since": since, "agent_id": agent_id}
        reply: Json = await self.request("GET", path, params=params)
        return reply

    # -- approvals ---------------------------------------------------------------------------------

    async def approvals(self, *, limit: int = 50, cursor: str | None = None) -> Page[Json]:
        """Return the pending calls, the oldest first."""
        reply = await self.request("GET", _APPROVALS, params={"limit": limit, "cursor": cursor})
        return records.page(reply, dict)

    async def approval(self, tool_call_id: str) -> Json:
        """Return one call that waits or waited for a decision, with its `decision`. Raise
        NotFound."""
        return await self._json("GET", f"{_APPROVALS}{target(tool_call_id)}")

    async def decide(
        self,
        tool_call_id: str,
        approved: bool,
        *,
        remember: Remember | None = None,
        prefix: str | None = None,
    ) -> Json:
        """Approve or deny one call. `remember` allows this exact command from now on, or with
        `prefix` each command that begins with it, or grants requested access for an `hour` or the
        `conversation`. Raise NotFound, Conflict `already_decided`."""
        body = {"approved": approved, "remember": remember, "prefix": prefix}
        path = f"{_APPROVALS}{target(tool_call_id)}"
        reply: Json = await self.request("POST", path, json=body)
        return reply

    async def approval_rules(
        self,
        *,
        conversation_id: str | None = None,
        project_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Json]:
        """Return the rules that allow calls without an approval."""
        params = {
            "conversation_id": conversation_id,
            "project_id": project_id,
            "limit": limit,
            "cursor": cursor,
        }
        reply = await self.request("GET", f"{_APPROVALS}/rules", params=params)
        return records.page(reply, dict)

    async def revoke_rule(self, rule_id: str) -> None:
        """Delete a rule: its calls need an approval again."""
        await self.request("DELETE", f"{_APPROVALS}{target('rules', rule_id)}")

    # -- projects ----------------------------------------------------------------------------------

    async def projects(self, *, limit: int = 50, cursor: str | None = None) -> Page[ProjectInfo]:
        """Return your projects, by id."""
        reply = await self.request("GET", _PROJECTS, params={"limit": limit, "cursor": cursor})
        return records.page(reply, records.project)

    async def create_project(
        self,
        name: str,
        working_directory: str,
        *,
        sandbox_enabled: bool = True,
        ask_commands: bool = False,
    ) -> ProjectInfo:
        """Create a project. Raise BadRequest, and Denied if the operator does not allow this
        directory."""
        body = {
            "name": name,
            "working_directory": working_directory,
            "sandbox_enabled": sandbox_enabled,
            "ask_commands": ask_commands,
        }
        return records.project(await self.request("POST", _PROJECTS, json=body))

    async def project(self, project_id: str) -> ProjectInfo:
        """Return one project. Raise NotFound."""
        return records.project(await self.request("GET", f"{_PROJECTS}{target(project_id)}"))

    async def change_project(
        self,
        project_id: str,
        *,
        name: str | None = None,
        working_directory: str | None = None,
        sandbox_enabled: bool | None = None,
        ask_commands: bool | None = None,
    ) -> ProjectInfo:
        """Change the fields that are not None."""
        body = without_none(
            name=name,
            working_directory=working_directory,
            sandbox_enabled=sandbox_enabled,
            ask_commands=ask_commands,
        )
        return records.project(
            await self.request("PATCH", f"{_PROJECTS}{target(project_id)}", json=body)
        )

    async def delete_project(self, project_id: str) -> None:
        """Delete a project and its conversations. The directory does not change."""
        await self.request("DELETE", f"{_PROJECTS}{target(project_id)}")

    # -- tools -------------------------------------------------------------------------------------

    async def tools(self, format: Literal["openai", "anthropic", "mcp"] = "openai") -> list[Json]:
        """Return the definitions of the tools in the format of one provider."""
        reply = await self.request("GET", "/api/v1/tools", params={"format": format})
        items: list[Json] = reply["items"]
        return items

    async def invoke(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        session_id: str,
        conversation_id: str,
    ) -> Json:
        """Call a tool as a model does, and wait for its result and, if needed, for an approval.
        Return `tool_call_id`, `result`, `is_error`. Raise NotFound, BadRequest, Denied."""
        body = {
            "sandbox_session_id": session_id,
            "conversation_id": conversation_id,
            "arguments": dict(arguments),
        }
        path = target("api", "v1", "tools", name, "invoke")
        events = self._wire.events("POST", path, body=json.dumps(body).encode("ascii"))
        try:
            async with aclosing(events):
                async for _, kind, data in events:
                    if kind == "tool_end":
                        end = json.loads(data)
                        return {key: end[key] for key in ("tool_call_id", "result", "is_error")}
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, lost) from lost
        raise errors.Broken("the service sent no result of the call", code="foreign_reply")

    # -- profiles of agents -----------------------------------------------------------------------

    async def agents(self) -> list[Json]:
        """Return the agents that have a profile, also those with a `problem`."""
        return await self._items(_AGENTS)

    async def create_agent(self, agent_id: str, profile: Mapping[str, Any]) -> Json:
        """Give an agent a profile. Raise BadRequest, Conflict `agent_exists`."""
        return await self._json("POST", _AGENTS, {"agent_id": agent_id, "profile": dict(profile)})

    async def agent(self, agent_id: str) -> Json:
        """Return the profile of an agent and its version. Raise NotFound `agent_not_found`,
        Unavailable `invalid_profile` for a file of the operator."""
        return await self._json("GET", f"{_AGENTS}{target(agent_id)}")

    async def replace_agent(self, agent_id: str, profile: Mapping[str, Any]) -> Json:
        """Replace the whole profile. Conversations keep the version that they began with. Raise
        NotFound, BadRequest, Conflict `agent_is_file`."""
        return await self._json("PUT", f"{_AGENTS}{target(agent_id)}", dict(profile))

    async def delete_agent(self, agent_id: str) -> None:
        """Delete a profile. A second call does nothing. Raise Conflict `agent_is_file`."""
        await self.request("DELETE", f"{_AGENTS}{target(agent_id)}")


class _ChatFollower:
    """Follows one run of an agent."""

    def __init__(
        self, wire: HttpClient, conversation_id: str, after: int = 0, run_id: str | None = None
    ) -> None:
        self._wire = wire
        self._conversation_id = conversation_id
        self._after = after
        self._run_id = run_id
        self._over = False

    async def start(self, body: bytes) -> AsyncGenerator[ChatEvent, None]:
        """Start a run and yield its events. If the connection is lost before the first event, do
        not repeat the request, because the run may have started."""
        try:
            async with aclosing(self._read("POST", target("api", "v1", "chat"), body)) as events:
                async for event in events:
                    yield event
        except (ConnectionLost, errors.Unavailable) as error:
            if self._run_id is None:
                raise _unavailable(self._wire, error) from error
        if not self._over:
            async with aclosing(self.events()) as events:
                async for event in events:
                    yield event

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Yield the events. Connect again if the connection is lost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REATTACH_S
        while not self._over:
            before, lost = self._after, ConnectionLost("the stream ended before the run did")
            try:
                async with aclosing(self._read("GET", self._path, b"")) as events:
                    async for event in events:
                        yield event
            except ConnectionLost as error:
                lost = error
            if self._after > before:
                deadline = loop.time() + _REATTACH_S
            elif loop.time() > deadline:
                raise _unavailable(self._wire, lost) from lost
            if not self._over:
                await asyncio.sleep(_REATTACH_PAUSE_S)

    @property
    def _path(self) -> str:
        params = {"run_id": self._run_id}
        return target("api", "v1", "chat", self._conversation_id, "events", params=params)

    async def _read(self, method: str, path: str, body: bytes) -> AsyncGenerator[ChatEvent, None]:
        events = self._wire.events(method, path, body=body, after=self._after)
        async with aclosing(events):
            async for number, _, data in events:
                if number > self._after:
                    event = decode("event", _read_event, data)
                    self._after, self._run_id = number, event.run_id
                    self._over = isinstance(event.event, AgentRunEnd)
                    yield event


def _unavailable(
    wire: HttpClient, error: ConnectionLost | errors.Unavailable
) -> errors.Unavailable:
    return connection_lost(wire.address, error) if isinstance(error, ConnectionLost) else error


def _read_event(data: str) -> ChatEvent:
    event = json.loads(data)
    return ChatEvent(event["seq"], event["run_id"], event["conversation_id"], from_json(event))
