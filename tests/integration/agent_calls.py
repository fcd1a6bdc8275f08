"""The calls of the agent's routes that its tests share, and a service whose model is scripted.

at, client    fixtures: such a service for a module, and a client of it for each test
"""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from live_app import Served, live
from model_server import KEY, ModelServer, Script, model_server
from places import short_directory
from pydantic import SecretStr
from sessions_calls import API

from sbx.agent.messages import Response, ToolCall
from sbx.agent.settings import AgentSettings
from sbx.client import Client

PERSON = 4242  # whose directories projects are, where the tests run as root
ANN: dict[str, Any] = {"user_id": "ann", "agent_id": "helper"}
Event = dict[str, Any]


@dataclass(frozen=True)
class Desk:
    """A service, the model that its agents ask, and a directory below which projects may lie."""

    served: Served
    model: ModelServer
    projects: Path

    def directory(self, name: str) -> Path:
        """One of a person's own."""
        made = self.projects / name
        made.mkdir()
        if os.geteuid() == 0:
            os.chown(made, PERSON, PERSON)
        return made


@asynccontextmanager
async def desk(
    directory: Path,
    *answers: Script,
    key: str = KEY,
    known_key: str | None = None,
    **settings: Any,
) -> AsyncIterator[Desk]:
    """`key` is what the agents have, `known_key` the one that the model's server knows, where that
    is another."""
    projects = directory / "projects"
    projects.mkdir(exist_ok=True)
    with model_server(*answers, key=known_key or key) as model:
        chosen = AgentSettings(
            base_url=model.openai_url, api_key=SecretStr(key), model_name="scripted"
        )
        served = live(directory, agent=chosen, project_dirs=(projects,), **settings)
        async with served as serves:
            yield Desk(serves, model, projects)


@pytest_asyncio.fixture(scope="module")
async def at() -> AsyncIterator[Desk]:
    with short_directory() as directory:
        async with desk(directory) as at:
            yield at


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[Client]:
    async with Client(at.served.socket) as client:
        yield client
    at.model.forget()


def calls(*made: tuple[str, dict[str, Any]], text: str = "") -> Response:
    """An answer that calls these tools."""
    return Response(
        text,
        tuple(
            ToolCall(f"theirs-{number}", name, json.dumps(arguments))
            for number, (name, arguments) in enumerate(made)
        ),
        stop="tools",
    )


def runs(command: str) -> Response:
    """An answer that wants a command run."""
    return calls(("execute_command", {"command": command}))


def body(conversation: str, message: str = "do it", **more: Any) -> dict[str, Any]:
    return {
        "user_id": "ann",
        "agent_id": "helper",
        "conversation_id": conversation,
        "message": message,
        **more,
    }


async def say(client: httpx.AsyncClient, conversation: str, **more: Any) -> list[Event]:
    """Ask, and follow to the end: every event."""
    return [event async for event in following(client, body(conversation, **more))]


async def following(
    client: httpx.AsyncClient, asked: dict[str, Any], after: int | None = None
) -> AsyncGenerator[Event, None]:
    """Ask, and follow; to be closed by whoever leaves early."""
    headers = {} if after is None else {"last-event-id": str(after)}
    async with client.stream("POST", f"{API}/chat", json=asked, headers=headers) as reply:
        async for event in read(reply):
            yield event


async def replayed(
    client: httpx.AsyncClient, conversation: str, after: int = 0, **params: str
) -> list[Event]:
    url, headers = f"{API}/chat/{conversation}/events", {"last-event-id": str(after)}
    async with client.stream("GET", url, headers=headers, params=params) as reply:
        return [event async for event in read(reply)]


async def read(reply: httpx.Response) -> AsyncIterator[Event]:
    """The events of a stream; its ids must be their numbers."""
    if reply.status_code != 200:
        await reply.aread()
        raise AssertionError(f"{reply.status_code}: {reply.text}")
    number = ""
    async for line in reply.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            number = value
        elif name == "data":
            event = json.loads(value)
            assert event.get("seq", number) in (int(number), number)
            yield event


async def asked_for(events: AsyncIterator[Event]) -> Event:
    """Wait until a call waits for approval: its tool_pending, or tool_start without a trial."""
    async for event in events:
        if event["type"] == "tool_pending" or event.get("approval_required"):
            return event
    raise AssertionError("nothing was asked")


async def the_rest(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def one(events: list[Event], kind: str) -> Event:
    """The only event of this type."""
    (found,) = [event for event in events if event["type"] == kind]
    return found


def kinds(events: list[Event]) -> list[str]:
    """Their types, without the live output, whose pieces are no promise."""
    live = ("text_delta", "tool_output")
    return [event["type"] for event in events if event["type"] not in live]


async def decide(
    client: httpx.AsyncClient, tool_call_id: str, approved: bool, **more: str
) -> httpx.Response:
    asked = {"approved": approved, **more}
    return await client.post(f"{API}/approvals/{tool_call_id}", json=asked)


async def pending(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await client.get(f"{API}/approvals")).json()["items"]
    return items


async def messages(client: httpx.AsyncClient, conversation: str) -> list[dict[str, Any]]:
    reply = await client.get(f"{API}/conversations/{conversation}/messages", params={"limit": 200})
    assert reply.status_code == 200, reply.text
    items: list[dict[str, Any]] = reply.json()["items"]
    return items


async def project(client: httpx.AsyncClient, directory: Path, **more: Any) -> str:
    """The id of a new project there."""
    asked = {"name": directory.name, "working_directory": str(directory), **more}
    reply = await client.post(f"{API}/projects", json=asked)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])
