"""Agents of a service: chats, approvals, projects, tools."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from sbx import errors
from sbx.client import records
from sbx.client.errors import failure
from sbx.client.http import HttpClient, connection_lost, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.records import ProjectInfo
from sbx.client.requests import Json, ServiceRequests
from sbx.protocol.agent import AgentEvent, AgentRunEnd, from_json
from sbx.protocol.pages import Page

_REATTACH_S = 55.0  # the service tells what was missed for 60 s after the end of a run
_REATTACH_PAUSE_S = 0.25
_APPROVALS = target("api", "v1", "approvals")
_PROJECTS = target("api", "v1", "projects")


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """An event of an agent's run, and which one: `seq` rises by one within a run."""

    seq: int
    run_id: str
    conversation_id: str
    event: AgentEvent


class AgentCalls(ServiceRequests):
    """A part of `Client`."""

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
        business_domain_id: str | None = None,
    ) -> AsyncGenerator[ChatEvent, None]:
        """Ask the agent of a conversation, and follow what it does until its `run_end`. It goes on
        when this is left; `abort_chat` ends it. Cut off, it is followed again from where that was.
        Without a message it goes on where an earlier run broke off.

        Raises Conflict `run_in_progress`, NotFound, Unavailable `model_not_configured`.
        """
        name = conversation_id or f"conversation-{secrets.token_hex(8)}"
        asked = {
            "user_id": user_id,
            "agent_id": agent_id,
            "conversation_id": name,
            "project_id": project_id,
            "message": message,
            "resume": True if message is None else None,
            "max_steps": max_steps,
            "model": model,
            "business_domain_id": business_domain_id,
        }
        given = {key: value for key, value in asked.items() if value is not None}
        body = json.dumps(given).encode("ascii")
        async with aclosing(_Following(self._wire, name).begun(body)) as events:
            async for event in events:
                yield event

    async def follow_chat(
        self, conversation_id: str, *, after: int = 0, run_id: str | None = None
    ) -> AsyncGenerator[ChatEvent, None]:
        """The events of what goes on in a conversation, or ended there within the last minute, with
        numbers above `after`. Raises NotFound `no_chat`."""
        following = _Following(self._wire, conversation_id, after, run_id)
        async with aclosing(following.events()) as events:
            async for event in events:
                yield event

    async def abort_chat(self, conversation_id: str) -> bool:
        """End what goes on in a conversation: what waits for approval is denied, what runs is
        interrupted; False where nothing does."""
        path = target("api", "v1", "chat", conversation_id, "abort")
        reply = await self._wire.call("POST", path, again=True)
        return bool(reply.json()["aborted"])

    async def messages(
        self, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """What was said, the oldest first."""
        path = target("api", "v1", "conversations", conversation_id, "messages")
        told = await self.request("GET", path, params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)

    async def agent_runs(
        self, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """How the runs of its agent ended, the newest first."""
        path = target("api", "v1", "conversations", conversation_id, "runs")
        told = await self.request("GET", path, params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)

    # -- approvals ---------------------------------------------------------------------------------

    async def approvals(self, *, limit: int = 50, cursor: str | None = None) -> Page[Json]:
        """The calls that wait for an answer, the oldest first."""
        told = await self.request("GET", _APPROVALS, params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)

    async def decide(
        self,
        tool_call_id: str,
        approved: bool,
        *,
        remember: Literal["exact", "prefix"] | None = None,
        prefix: str | None = None,
    ) -> Json:
        """Say yes or no to one call. `remember`: allow this exact command from now on, or with
        `prefix` every one that begins so. Raises NotFound, Conflict `already_decided`."""
        body = {"approved": approved, "remember": remember, "prefix": prefix}
        told: Json = await self.request("POST", f"{_APPROVALS}{target(tool_call_id)}", json=body)
        return told

    async def approval_rules(
        self,
        *,
        conversation_id: str | None = None,
        project_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Json]:
        """What is allowed without asking again."""
        params = {
            "conversation_id": conversation_id,
            "project_id": project_id,
            "limit": limit,
            "cursor": cursor,
        }
        told = await self.request("GET", f"{_APPROVALS}/rules", params=params)
        return records.page(told, dict)

    async def revoke_rule(self, rule_id: str) -> None:
        """From now on it is asked again."""
        await self.request("DELETE", f"{_APPROVALS}{target('rules', rule_id)}")

    # -- projects ----------------------------------------------------------------------------------

    async def projects(self, *, limit: int = 50, cursor: str | None = None) -> Page[ProjectInfo]:
        """Your projects, by id."""
        told = await self.request("GET", _PROJECTS, params={"limit": limit, "cursor": cursor})
        return records.page(told, records.project)

    async def create_project(
        self, name: str, working_directory: str, *, sandbox_enabled: bool = True
    ) -> ProjectInfo:
        """Raises BadRequest, and Denied where the operator does not allow this directory."""
        body = {
            "name": name,
            "working_directory": working_directory,
            "sandbox_enabled": sandbox_enabled,
        }
        return records.project(await self.request("POST", _PROJECTS, json=body))

    async def project(self, project_id: str) -> ProjectInfo:
        """Raises NotFound."""
        return records.project(await self.request("GET", f"{_PROJECTS}{target(project_id)}"))

    async def change_project(
        self,
        project_id: str,
        *,
        name: str | None = None,
        working_directory: str | None = None,
        sandbox_enabled: bool | None = None,
    ) -> ProjectInfo:
        """What is None stays as it is."""
        asked = {
            "name": name,
            "working_directory": working_directory,
            "sandbox_enabled": sandbox_enabled,
        }
        body = {key: value for key, value in asked.items() if value is not None}
        return records.project(
            await self.request("PATCH", f"{_PROJECTS}{target(project_id)}", json=body)
        )

    async def delete_project(self, project_id: str) -> None:
        """Forget it, with its conversations; the directory stays as it is."""
        await self.request("DELETE", f"{_PROJECTS}{target(project_id)}")

    # -- tools -------------------------------------------------------------------------------------

    async def tools(self, format: Literal["openai", "anthropic", "mcp"] = "openai") -> list[Json]:
        """Their definitions, in the words of one provider."""
        told = await self.request("GET", "/api/v1/tools", params={"format": format})
        items: list[Json] = told["items"]
        return items

    async def invoke(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        session_id: str,
        conversation_id: str,
    ) -> Json:
        """Call a tool as a model would, and wait for its result, which may take a person's yes:
        `tool_call_id`, `result`, `is_error`. Raises NotFound, BadRequest, Denied."""
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
                    if kind == "failure":
                        raise failure(data)
                    if kind == "tool_end":
                        told = json.loads(data)
                        return {key: told[key] for key in ("tool_call_id", "result", "is_error")}
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, str(lost)) from lost
        raise errors.Broken("the call has no result", code="foreign_reply")


class _Following:
    """One run, followed."""

    def __init__(
        self, wire: HttpClient, conversation_id: str, after: int = 0, run_id: str | None = None
    ) -> None:
        self._wire = wire
        self._conversation_id = conversation_id
        self._after = after
        self._run_id = run_id
        self._over = False

    async def begun(self, body: bytes) -> AsyncGenerator[ChatEvent, None]:
        """Of a run that this begins. Where nothing came of it before the connection was lost, it is
        not asked for again: it may have begun."""
        try:
            async with aclosing(self._read("POST", target("api", "v1", "chat"), body)) as events:
                async for event in events:
                    yield event
        except (ConnectionLost, errors.Unavailable) as error:
            if self._run_id is None:
                raise _told(self._wire, error) from error
        if not self._over:
            async with aclosing(self.events()) as events:
                async for event in events:
                    yield event

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """What comes, taken up again when it breaks off."""
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
                raise _told(self._wire, lost) from lost
            if not self._over:
                await asyncio.sleep(_REATTACH_PAUSE_S)

    @property
    def _path(self) -> str:
        params = {"run_id": self._run_id}
        return target("api", "v1", "chat", self._conversation_id, "events", params=params)

    async def _read(self, method: str, path: str, body: bytes) -> AsyncGenerator[ChatEvent, None]:
        events = self._wire.events(method, path, body=body, after=self._after)
        async with aclosing(events):
            async for number, kind, data in events:
                if kind == "failure":
                    raise failure(data)
                if number > self._after:
                    event = _event(data)
                    self._after, self._run_id = number, event.run_id
                    self._over = isinstance(event.event, AgentRunEnd)
                    yield event


def _told(wire: HttpClient, error: ConnectionLost | errors.Unavailable) -> errors.Unavailable:
    return connection_lost(wire.address, str(error)) if isinstance(error, ConnectionLost) else error


def _event(data: str) -> ChatEvent:
    """Raises Broken `foreign_reply`."""
    try:
        told = json.loads(data)
        return ChatEvent(told["seq"], told["run_id"], told["conversation_id"], from_json(told))
    except (ValueError, KeyError, TypeError) as error:
        raise errors.Broken(
            f"the service told of an event that is none: {error}",
            code="foreign_reply",
            hint="the client and the service may be of different versions",
        ) from error
