"""Over HTTP: an agent's code is refused, a person grants the access, and nobody else gets it."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest_asyncio
from agent_calls import (
    Desk,
    asked_for,
    body,
    calls,
    decide,
    desk,
    following,
    messages,
    pending,
    project,
    say,
    the_rest,
)
from places import short_directory
from sessions_calls import code_of
from web import Web, granting

from sbx.agent.messages import Response


@pytest_asyncio.fixture(scope="module")
async def at(site: Web) -> AsyncIterator[Desk]:
    with short_directory() as top:
        (top / "policies").mkdir()
        (top / "policies" / "granting.toml").write_text(
            granting(site) + '[[grant]]\nrun_time = "2h"\n'
        )
        directories = (top / "policies",)
        async with desk(top, policy_dirs=directories, sessions_policy="granting") as at:
            yield at


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client
    at.model.forget()


def fetch(site: Web, path: str) -> Response:
    code = "import urllib.request\n"
    code += f"print(urllib.request.urlopen('{site.url}{path}', timeout=50).read().decode())"
    return calls(("run_code", {"code": code}))


async def results(client: httpx.AsyncClient, conversation: str) -> list[str]:
    return [
        each["content"] for each in await messages(client, conversation) if each["role"] == "tool"
    ]


async def test_a_person_grants_access_for_an_hour_to_one_conversation(
    at: Desk, client: httpx.AsyncClient, site: Web
) -> None:
    at.model.add(fetch(site, "/first"), fetch(site, "/second"), Response("done"))
    async with aclosing(following(client, body("here"))) as events:
        question = await asked_for(events)
        access = {"kind": "network", "target": site.host, "longest": "hour"}
        assert (question["tool_name"], question["tool_args"]) == ("request_access", access)
        (waiting,) = await pending(client)
        assert (waiting["tool_name"], waiting["tool_args"]) == ("request_access", access)
        call = waiting["tool_call_id"]

        too_long = await decide(client, call, True, remember="exact")
        assert code_of(too_long) == (400, "not_remembered")
        reply = await decide(client, call, True, remember="hour")
        assert reply.json()["remembered"] == "hour"
        again = await decide(client, call, True, remember="hour")
        assert code_of(again) == (409, "already_decided")
        rest = await the_rest(events)
    assert rest[-1]["reason"] == "done"
    first, second = await results(client, "here")
    assert "granted connections to" in first
    assert "hello from /second" in second
    assert [path for path, _ in site.asked] == ["/second"]
    assert (await client.get("/api/v1/approvals/rules")).json()["items"] == []

    # The other conversation of the same session has another kernel, in the same sandbox.
    at.model.add(fetch(site, "/third"), Response("done"))
    async with aclosing(following(client, body("there"))) as events:
        question = await asked_for(events)
        assert question["tool_args"] == access
        assert (await decide(client, question["tool_call_id"], False)).status_code == 200
        await the_rest(events)
    (refused,) = await results(client, "there")
    assert "HTTPError" in refused
    assert "hello" not in refused
    assert [path for path, _ in site.asked] == ["/second"]


async def test_a_person_grants_access_in_a_project(at: Desk, client: httpx.AsyncClient) -> None:
    made = await project(client, at.directory("granting"))
    long = calls(("execute_command", {"command": "echo ran", "timeout": 5000}))
    at.model.add(long, long, Response("done"))
    async with aclosing(following(client, body("within", project_id=made))) as events:
        question = await asked_for(events)
        asked = {"kind": "run_time", "target": "5000", "longest": "conversation"}
        assert question["tool_args"] == asked
        reply = await decide(client, question["tool_call_id"], True, remember="hour")
        assert reply.status_code == 200
        await the_rest(events)
    refused, ran = await results(client, "within")
    assert "granted runs of up to 5000 s for an hour" in refused
    assert "ran" in ran
    await at.served.service.audit.record("test", "end", "test")  # then the notes are written
    lines = (at.served.service.data_dir / "audit.jsonl").read_text().splitlines()
    entries = [line for line in map(json.loads, lines) if line["what"] == "grant.added"]
    details = entries[-1]["details"]
    assert (details["project"], details["grant"]["target"]) == (made, "5000")


async def test_the_model_gets_the_tool_with_the_permitted_access(
    at: Desk, client: httpx.AsyncClient, site: Web
) -> None:
    at.model.add(Response("done"))
    await say(client, "tools")
    tools = [each["function"] for each in at.model.requests[-1].body["tools"]]
    (tool,) = (each for each in tools if each["name"] == "request_access")
    assert site.host in tool["description"]
