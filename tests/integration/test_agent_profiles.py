"""Profiles of agents: files of the operator, stored ones, their versions, and what they limit."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import Desk, asked_for, body, calls, decide, desk, following, kinds, one, runs, say
from agent_calls import project as new_project
from model_server import Asked
from places import short_directory
from sessions_calls import API

from sbx.agent.messages import Response, TokenUsage
from sbx.client import Client
from sbx.errors import BadRequest, Conflict, Denied, NotFound, Unavailable

HELPER = """
description = "Looks at tables"
instructions = "Answer in German."
welcome = "Upload a table."
starters = ["Describe data.csv"]
tools = ["run_code", "execute_command", "read_file"]

[model]
temperature = 0.25
max_tokens = 321

[approvals]
execute_command = "ask"
read_file = "deny"

[limits]
max_steps = 3
"""


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest_asyncio.fixture
async def at(place: Path) -> AsyncIterator[Desk]:
    (place / "agents").mkdir()
    async with desk(place, agents_dir=place / "agents") as at:
        yield at


@pytest_asyncio.fixture
async def http(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[Client]:
    async with Client(at.served.socket) as client:
        yield client


async def asked(at: Desk, http: httpx.AsyncClient, conversation: str, **more: Any) -> Asked:
    """The request to the model that this message leads to."""
    found: list[Asked] = []

    def answer(request: Asked) -> Response:
        found.append(request)
        return Response("done")

    at.model.add(answer)
    await say(http, conversation, **more)
    return found[0]


# -- what a profile does --------------------------------------------------------------------------


async def test_a_file_decides_about_the_prompt_the_model_the_tools_and_the_policy(
    at: Desk, http: httpx.AsyncClient, place: Path
) -> None:
    text = f'policy = "strict"\n{HELPER}'
    (place / "agents" / "helper.toml").write_text(text)
    request = await asked(at, http, "one")
    assert "Answer in German." in request.messages[0]["content"]
    assert (request.body["temperature"], request.body["max_tokens"]) == (0.25, 321)
    names = [tool["function"]["name"] for tool in request.body["tools"]]
    assert names == ["run_code", "read_file"]  # strict starts no commands
    (session,) = (await http.get(f"{API}/conversations")).json()["items"]
    box = (await http.get(f"/v1/sandboxes/{session['sandbox_id']}")).json()
    assert box["profile"] == "strict"
    plain = await asked(at, http, "two", agent_id="plain")
    assert "German" not in plain.text
    assert "temperature" not in plain.body
    assert len(plain.body["tools"]) > 3


async def test_calls_outside_of_the_tools_are_refused_and_others_are_asked_about(
    at: Desk, http: httpx.AsyncClient, place: Path
) -> None:
    (place / "agents" / "helper.toml").write_text(HELPER)
    at.model.add(
        calls(
            ("write_file", {"path": "a.txt", "content": "x"}),
            ("read_file", {"path": "a.txt"}),
        ),
        runs("echo hello"),
        Response("done"),
    )
    events = following(http, body("asked"))
    start = await asked_for(events)
    assert start["tool_name"] == "execute_command"
    await decide(http, start["tool_call_id"], True)
    rest = [event async for event in events]
    assert "hello" in one(rest, "tool_end")["result"]
    replies = (await http.get(f"{API}/conversations/asked/messages")).json()["items"]
    first, second = [reply for reply in replies if reply["role"] == "tool"][:2]
    assert first["is_error"]
    assert "tool_not_found" in first["content"]
    assert second["is_error"]


async def test_a_project_keeps_its_own_approvals(
    at: Desk, http: httpx.AsyncClient, place: Path
) -> None:
    (place / "agents" / "helper.toml").write_text(HELPER)
    directory = at.directory("shop")
    name = await new_project(http, directory)
    at.model.add(runs("echo new > a.txt"), Response("done"))
    events = following(http, body("in-project", project_id=name))
    start = await asked_for(events)
    assert [change["path"] for change in start["dry_run"]["changes"]] == ["/workspace/a.txt"]
    await decide(http, start["tool_call_id"], True)
    assert kinds([event async for event in events])[-1] == "run_end"
    assert (directory / "a.txt").read_text() == "new\n"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("[limits]\nmax_steps = 2", "max_steps"),
        ("[limits]\nmax_tokens = 100", "budget"),
        ("[limits]\nmax_seconds = 0.5", "budget"),
        ("[limits]\nmax_cost = 0.01\n[price]\ninput = 100.0\noutput = 1000.0", "budget"),
    ],
)
async def test_the_limits_end_a_run(
    at: Desk, http: httpx.AsyncClient, place: Path, limits: str, reason: str
) -> None:
    """Each answer is of 60 and 40 tokens, and costs 0.046."""
    (place / "agents" / "helper.toml").write_text(limits)
    code = "import time; time.sleep(30)" if "seconds" in limits else "1"
    call = calls(("run_code", {"code": code}))
    usage = TokenUsage(60, 40)
    answers = [Response("", call.tool_calls, stop="tools", usage=usage) for _ in range(5)]
    at.model.add(*answers)
    end = one(await say(http, "limited", max_steps=50), "run_end")
    assert end["reason"] == reason
    at.model.forget()


async def test_a_message_may_lower_the_steps_and_not_choose_another_model(
    at: Desk, http: httpx.AsyncClient, client: Client
) -> None:
    await client.create_agent("helper", {"model": {"name": "small"}, "limits": {"max_steps": 4}})
    at.model.add(Response("1"), Response("2"), Response("3"))
    starts = [one(await say(http, "one", **more), "run_start") for more in (
        {}, {"max_steps": 2, "model": "small"}, {"max_steps": 9},
    )]  # fmt: skip
    assert [start["max_steps"] for start in starts] == [4, 2, 4]
    assert {start["model"] for start in starts} == {"small"}
    with pytest.raises(Denied) as refused:
        await client.start_chat("hi", user_id="ann", agent_id="helper", model="large")
    assert refused.value.code == "model_fixed"


# -- versions -------------------------------------------------------------------------------------


async def test_a_conversation_keeps_the_version_that_it_began_with(
    at: Desk, http: httpx.AsyncClient, client: Client, place: Path
) -> None:
    before = await asked(at, http, "before")
    assert "rule one" not in before.text
    await client.create_agent("helper", {"instructions": "rule one"})
    assert "rule one" in (await asked(at, http, "old")).text
    replaced = await client.replace_agent("helper", {"instructions": "rule two"})
    assert replaced["version"] == 2
    assert (await client.replace_agent("helper", {"instructions": "rule two"}))["version"] == 2
    assert "rule one" in (await asked(at, http, "old")).text
    assert "rule two" in (await asked(at, http, "new")).text
    assert "rule" not in (await asked(at, http, "before")).text
    await client.delete_agent("helper")
    await client.delete_agent("helper")
    assert "rule two" in (await asked(at, http, "new")).text
    assert "rule" not in (await asked(at, http, "after")).text
    assert (await client.create_agent("helper", {"instructions": "three"}))["version"] == 3
    (place / "agents" / "helper.toml").write_text('instructions = "from a file"')
    at.model.add(Response("done"))
    start = one(await say(http, "by file"), "run_start")
    assert start["agent_version"] == 1
    (place / "agents" / "helper.toml").unlink()
    assert "from a file" in (await asked(at, http, "by file")).text


async def test_versions_survive_a_restart(place: Path) -> None:
    (place / "agents").mkdir()
    settings: dict[str, Any] = {"agents_dir": place / "agents"}
    async with desk(place, **settings) as at, at.served.client() as http:
        async with Client(at.served.socket) as client:
            await client.create_agent("helper", {"instructions": "rule one"})
        await asked(at, http, "old")
    async with desk(place, **settings) as at, at.served.client() as http:
        async with Client(at.served.socket) as client:
            await client.replace_agent("helper", {"instructions": "rule two"})
        assert "rule one" in (await asked(at, http, "old")).text


async def test_versions_made_at_once_count_one_by_one(client: Client) -> None:
    await client.create_agent("busy", {})
    texts = [{"instructions": f"rule {number}"} for number in range(10)]
    made = await asyncio.gather(*(client.replace_agent("busy", text) for text in texts))
    assert sorted(each["version"] for each in made) == list(range(2, 12))
    ends = await asyncio.gather(
        *(client.create_agent("new", {}) for _ in range(5)), return_exceptions=True
    )
    assert sum(isinstance(end, Conflict) for end in ends) == 4


# -- the routes -----------------------------------------------------------------------------------


async def test_profiles_are_listed_with_those_of_files(client: Client, place: Path) -> None:
    (place / "agents" / "helper.toml").write_text(HELPER)
    (place / "agents" / "broken.toml").write_text('tools = ["run_cod"]\nsteps = 1')
    (place / "agents" / "notes.txt").write_text("")
    await client.create_agent("mine", {"description": "Mine"})
    broken, helper, mine = await client.agents()
    assert [broken["agent_id"], helper["agent_id"], mine["agent_id"]] == [
        "broken", "helper", "mine",
    ]  # fmt: skip
    assert broken["problem"]["code"] == "invalid_profile"
    assert "no tool has the name run_cod; run_code has" in broken["problem"]["message"]
    assert (helper["is_file"], helper["version"]) == (True, 0)
    assert helper["profile"]["limits"]["max_steps"] == 3
    assert (mine["is_file"], mine["version"], mine["profile"]["description"]) == (False, 1, "Mine")
    with pytest.raises(Conflict) as conflict:
        await client.replace_agent("helper", {})
    assert conflict.value.code == "agent_is_file"
    with pytest.raises(Conflict):
        await client.delete_agent("helper")
    with pytest.raises(Conflict) as conflict:
        await client.create_agent("helper", {})
    assert conflict.value.code == "agent_exists"
    with pytest.raises(NotFound) as missing:
        await client.replace_agent("nobody", {})
    assert missing.value.code == "agent_not_found"


@pytest.mark.parametrize(
    "profile",
    [
        {"instruction": "x"},
        {"tools": ["rm_rf"]},
        {"approvals": {"run_code": "allow"}},
        {"limits": {"max_steps": 0}},
        {"limits": {"max_cost": 1}},
        {"model": {"temperature": 3}},
        {"starters": ["x"] * 21},
        {"instructions": "x" * 100_001},
    ],
)
async def test_a_wrong_profile_is_refused(client: Client, profile: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await client.create_agent("wrong", profile)
    with pytest.raises(NotFound):
        await client.agent("wrong")


async def test_an_agent_with_a_broken_file_does_not_run(
    at: Desk, http: httpx.AsyncClient, client: Client, place: Path
) -> None:
    await client.create_agent("helper", {"instructions": "stored"})
    (place / "agents" / "helper.toml").write_text("[limits]\nmax_step = 1")
    reply = await http.post(f"{API}/chat", json=body("one"))
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "invalid_profile"
    with pytest.raises(Unavailable):
        await client.agent("helper")


@pytest.mark.parametrize("name", ["../helper", "a/b", "..", "\x00", "x" * 401])
async def test_a_hostile_id_reaches_no_file(
    client: Client, http: httpx.AsyncClient, place: Path, name: str
) -> None:
    (place / "helper.toml").write_text('description = "outside"')
    with pytest.raises(BadRequest):
        await client.create_agent(name, {})
    listed = await client.agents()
    assert listed == []


async def test_another_owner_and_a_token_see_their_own(
    at: Desk, client: Client, http: httpx.AsyncClient, place: Path
) -> None:
    (place / "agents" / "helper.toml").write_text(HELPER)
    await client.create_agent("mine", {"instructions": "secret"})
    key = await at.served.key_of("eve")
    async with Client(at.served.socket, key=key) as eve:
        assert [each["agent_id"] for each in await eve.agents()] == ["helper"]
        with pytest.raises(NotFound):
            await eve.agent("mine")
        await eve.delete_agent("mine")
        await eve.create_agent("mine", {"instructions": "of eve"})
    assert (await client.agent("mine"))["profile"]["instructions"] == "secret"
    token = (await client.make_token(user_id="ann", agent_id="helper"))["token"]
    async with Client(at.served.socket, key=token) as user:
        (seen,) = await user.agents()
        assert seen["profile"]["welcome"] == "Upload a table."
        assert seen["profile"]["starters"] == ["Describe data.csv"]
        assert seen["profile"]["instructions"] == ""
        assert seen["profile"]["policy"] is None
        with pytest.raises(NotFound):
            await user.agent("mine")
        for change in (user.create_agent("other", {}), user.delete_agent("mine")):
            with pytest.raises(Denied):
                await change
