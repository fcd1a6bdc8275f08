"""Agents of a service: asked, followed, ended; and what was said."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from sbx import errors
from sbx.client import records
from sbx.client.errors import failure
from sbx.client.http import HttpClient, Params, connection_lost, target
from sbx.client.http_connection import ConnectionLost
from sbx.protocol.agent import AgentEvent, AgentRunEnd, from_json
from sbx.protocol.pages import Page

_REATTACH_S = 55.0  # the service tells what was missed for 60 s after the end of a run
_REATTACH_PAUSE_S = 0.25
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """An event of an agent's run, and which one: `seq` rises by one within a run."""

    seq: int
    run_id: str
    conversation_id: str
    event: AgentEvent


class Requests(Protocol):
    """What is needed of a client."""

    _wire: HttpClient

    async def request(
        self, method: str, path: str, *, params: Params | None = None, json: Any = None
    ) -> Any: ...


class ChatCalls:
    """A part of Client."""

    async def chat(
        self: Requests,
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
        self: Requests, conversation_id: str, *, after: int = 0, run_id: str | None = None
    ) -> AsyncGenerator[ChatEvent, None]:
        """The events of what goes on in a conversation, or ended there within the last minute, with
        numbers above `after`. Raises NotFound `no_chat`."""
        following = _Following(self._wire, conversation_id, after, run_id)
        async with aclosing(following.events()) as events:
            async for event in events:
                yield event

    async def abort_chat(self: Requests, conversation_id: str) -> bool:
        """End what goes on in a conversation: what waits for approval is denied, what runs is
        interrupted; False where nothing does."""
        path = target("api", "v1", "chat", conversation_id, "abort")
        reply = await self._wire.call("POST", path, again=True)
        return bool(reply.json()["aborted"])

    async def messages(
        self: Requests, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """What was said, the oldest first."""
        path = target("api", "v1", "conversations", conversation_id, "messages")
        told = await self.request("GET", path, params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)

    async def agent_runs(
        self: Requests, conversation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Json]:
        """How the runs of its agent ended, the newest first."""
        path = target("api", "v1", "conversations", conversation_id, "runs")
        told = await self.request("GET", path, params={"limit": limit, "cursor": cursor})
        return records.page(told, dict)


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
