"""Active runs of agents with their plans and costs, the report on ended runs, and `sbx runs`."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from agent_calls import ANN, Desk, asked_for, at, body, calls, client, decide, following, one, say
from agent_calls import project as new_project
from command import sbx
from model_server import Asked
from sessions_calls import API

from sbx.agent.agent import Agent
from sbx.agent.messages import Response, TokenUsage
from sbx.agent.models.replay import ReplayModel
from sbx.agent.profile import parse_profile
from sbx.agent.tools.registry import Tools
from sbx.client import Client
from sbx.errors import BadRequest
from tests.fake_sandbox import FakeSandbox

__all__ = ["at", "client"]
PLAN = {
    "steps": [
        {"text": "read the file", "state": "done"},
        {"text": "draw\x1b[2J a chart", "state": "active"},
    ]
}
PROFILE = {
    "tools": ["plan", "run_code", "execute_command"],
    "price": {"input": 1.0, "output": 2.0},
}


def socket_of(at: Desk) -> dict[str, str]:
    return {"SBX_SOCKET": str(at.served.socket)}


@pytest_asyncio.fixture
async def planner(client: Client) -> AsyncIterator[str]:
    """An agent that plans, and has prices."""
    await client.create_agent("planner", PROFILE)
    yield "planner"
    await client.delete_agent("planner")


async def test_an_active_run_has_its_step_plan_calls_tokens_and_cost(
    at: Desk, client: Client, planner: str
) -> None:
    loop, waits, may_end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def ends(_: Asked) -> Response:
        loop.call_soon_threadsafe(waits.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(20)
        return Response("done")

    call = calls(("plan", PLAN))
    at.model.add(Response("", call.tool_calls, stop="tools", usage=TokenUsage(1000, 500)), ends)
    started = await client.start_chat("plan it", user_id="ann", agent_id=planner)
    async with asyncio.timeout(20):
        await waits.wait()
    (run,) = await client.active_runs()
    assert run["run_id"] == started["run_id"]
    assert (run["agent_id"], run["agent_version"], run["title"]) == ("planner", 1, "plan it")
    assert (run["step"], run["max_steps"], run["model"]) == (2, 10, "scripted")
    assert run["plan"] == PLAN["steps"]
    assert run["usage"] == {"input_tokens": 1000, "output_tokens": 500}
    assert run["cost"] == pytest.approx(0.002)
    table = await asyncio.to_thread(sbx, "runs", env=socket_of(at))
    assert "1 of 2" in table.stdout
    assert "2 of 10" in table.stdout
    assert "0.0020" in table.stdout
    may_end.set()
    events = [event async for event in client.follow_chat(started["conversation_id"])]
    assert [event.event.type for event in events][-1] == "run_end"
    assert await client.active_runs() == []
    async with at.served.client() as http:
        path = f"/api/v1/conversations/{started['conversation_id']}/runs/{run['run_id']}"
        ended = (await http.get(path)).json()
    assert (ended["status"], ended["plan"]) == ("ended", PLAN["steps"])
    assert ended["cost"] == pytest.approx(0.002)
    empty = await asyncio.to_thread(sbx, "runs", env=socket_of(at))
    assert "no agent is at work" in empty.stderr


async def test_a_call_that_waits_is_named(at: Desk, client: Client) -> None:
    async with at.served.client() as http:
        name = await new_project(http, at.directory("waits"))
        at.model.add(calls(("execute_command", {"command": "touch a"})), Response("done"))
        events = following(http, body("waits", project_id=name))
        start = await asked_for(events)
        (run,) = await client.active_runs()
        (call,) = run["pending_calls"]
        assert (call["tool_name"], call["approval_required"]) == ("execute_command", True)
        assert run["cost"] is None
        table = await asyncio.to_thread(sbx, "runs", env=socket_of(at))
        assert "execute_command waits for an approval" in " ".join(table.stdout.split())
        key = await at.served.key_of("eve")
        async with Client(at.served.socket, key=key) as eve:
            assert await eve.active_runs() == []
        await decide(http, start["tool_call_id"], False)
        assert [event async for event in events]


async def test_a_report_counts_tools_failures_and_steps(
    at: Desk, client: Client, planner: str
) -> None:
    before = await client.run_report(agent_id=planner)
    usage = TokenUsage(100, 10)
    wrong = calls(("run_code", {"code": "1/0"}), ("no_such", {}), ("plan", {"steps": []}))
    at.model.add(
        Response("", wrong.tool_calls, stop="tools", usage=usage),
        Response("done", usage=TokenUsage(300, 30)),
        Response("again", usage=usage),
    )
    async with at.served.client() as http:
        await say(http, "reported", agent_id=planner)
        await say(http, "reported-2", agent_id=planner)
    report = await client.run_report(agent_id=planner)
    assert report["runs"] - before["runs"] == 2
    assert report["cost"] - before["cost"] == pytest.approx((500 + 50 * 2) / 1e6)
    tools = {tool["name"]: tool for tool in report["tools"]}
    assert (tools["run_code"]["calls"], tools["run_code"]["failed"]) == (1, 1)
    assert (tools["no_such"]["calls"], tools["no_such"]["failed"]) == (1, 1)
    assert report["failures"]["tool_not_found"] == 1
    assert [step["step"] for step in report["steps"]] == [1, 2]
    assert report["reasons"]["done"] >= 2
    with pytest.raises(BadRequest):
        await client.run_report(since=-1)
    assert (await client.run_report(since=4e9))["runs"] == 0
    env = socket_of(at)
    ended = await asyncio.to_thread(sbx, "runs", "report", "--agent", planner, env=env)
    for word in ("no_such", "tool_not_found", "tokens in"):
        assert word in ended.stdout
    words = ("runs", "report", "--days", "1", "--json")
    ended = await asyncio.to_thread(sbx, *words, env=env)
    assert json.loads(ended.stdout)["runs"] >= 2


async def test_a_token_sees_the_runs_of_its_user(at: Desk, client: Client) -> None:
    at.model.add(Response("done"))
    async with at.served.client() as http:
        assert one(await say(http, "of-ann"), "run_end")["reason"] == "done"
    of_ann: dict[str, Any] = await client.make_token(**ANN)
    of_bob = await client.make_token(user_id="bob")
    async with Client(at.served.socket, key=of_ann["token"]) as ann:
        assert (await ann.run_report())["runs"] >= 1
        assert (await ann.run_report(agent_id="other"))["runs"] == 0
    async with Client(at.served.socket, key=of_bob["token"]) as bob:
        assert (await bob.run_report())["runs"] == 0
        assert await bob.active_runs() == []


async def test_one_run_has_its_plan(at: Desk, client: Client, planner: str) -> None:
    at.model.add(calls(("plan", PLAN)), Response("done"))
    async with at.served.client() as http:
        events = await say(http, "planned", agent_id=planner)
        result = one(events, "tool_end")
        assert (result["result"], result["is_error"]) == ("1 of 2 steps are done", False)
        reply = await http.get(f"{API}/conversations/planned/runs/{events[0]['run_id']}")
    assert reply.json()["plan"] == PLAN["steps"]  # also when it has ended


# -- the check of a task --------------------------------------------------------------------------


async def test_a_check_decides_about_the_end(at: Desk, client: Client) -> None:
    asked: list[str] = []

    def mends(request: Asked) -> Response:
        asked.append(request.text)
        return calls(("write_file", {"path": "total.txt", "content": "6"}))

    at.model.add(Response("It is done."), mends, Response("Now it is."))
    check = "echo looked; grep -q 6 total.txt"
    async with at.served.client() as http:
        events = await say(http, "checked", completion_check=check)
        kept = (await http.get(f"{API}/conversations/checked/messages")).json()["items"]
    ends = [event for event in events if event["type"] == "tool_end"]
    assert [end["is_error"] for end in ends] == [True, False, False]
    starts = [event["tool_name"] for event in events if event["type"] == "tool_start"]
    assert starts == ["completion_check", "write_file", "completion_check"]
    assert "this check failed: echo looked" in asked[0]
    assert "No such file" in asked[0]
    end = one(events, "run_end")
    assert (end["reason"], end["content"]) == ("done", "Now it is.")
    assert [message["role"] for message in kept] == [
        "user", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


async def test_a_check_that_never_succeeds_ends_at_the_limit(at: Desk, client: Client) -> None:
    at.model.add(*(Response("It is done.") for _ in range(3)))
    async with at.served.client() as http:
        events = await say(http, "never", completion_check="exit 3", max_steps=3)
    assert one(events, "run_end")["reason"] == "max_steps"
    assert sum(event["type"] == "tool_end" for event in events) == 3


async def test_a_check_is_interrupted_with_its_run(at: Desk, client: Client) -> None:
    at.model.add(Response("It is done."))
    started = await client.start_chat(
        "do it", completion_check="echo begun; sleep 60", conversation_id="long", **ANN
    )
    async with asyncio.timeout(30):
        async for event in client.follow_chat("long", run_id=started["run_id"]):
            if event.event.type == "tool_output":
                assert await client.abort_chat("long")
    (run,) = (await client.agent_runs("long")).items
    assert run["reason"] == "aborted"


async def test_a_policy_without_a_shell_refuses_a_check(at: Desk, client: Client) -> None:
    await client.create_agent("shut", {"policy": "strict"})
    at.model.add(Response("It is done."))
    async with at.served.client() as http:
        events = await say(http, "shut", agent_id="shut", completion_check="true")
    end = one(events, "run_end")
    assert end["reason"] == "error"
    assert end["error"]["code"] == "capability_not_supported"
    await client.delete_agent("shut")


async def test_the_state_of_an_embedded_agent_equals_the_run_of_a_service(
    at: Desk, client: Client, planner: str
) -> None:
    """At the same point of the same run, both have the same step, plan, usage and cost."""
    loop, may_end = asyncio.get_running_loop(), asyncio.Event()
    reached = asyncio.Event()

    def ends(_: Asked) -> Response:
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(20)
        return Response("done")

    call = calls(("plan", PLAN))
    first = Response("", call.tool_calls, stop="tools", usage=TokenUsage(1000, 500))
    at.model.add(first, ends)
    started = await client.start_chat("plan it", user_id="ann", agent_id=planner)
    async with asyncio.timeout(20):
        await reached.wait()
    path = f"{API}/conversations/{started['conversation_id']}/runs/{started['run_id']}"
    run = (await client.request("GET", path)) | {"run_id": "run-1"}
    may_end.set()
    async for _ in client.follow_chat(started["conversation_id"]):
        pass

    profile = parse_profile('tools = ["plan"]\nprice = {input = 1.0, output = 2.0}', "planner")
    model = ReplayModel([first, "done"], name="scripted")
    agent = Agent(FakeSandbox(), model, tools=profile.select(Tools()), budget=profile.budget)
    states = []
    await agent.run("plan it", run_id="run-1", on_step=lambda _: states.append(agent.state))
    state = states[0]
    embedded = {
        "run_id": state.run_id,
        "status": state.status,
        "model": state.model,
        "max_steps": state.max_steps,
        "step": state.current_step,
        "plan": list(state.plan),
        "usage": state.usage,
        "cost": state.cost,
        "pending_calls": list(state.pending_calls),
        "reason": state.reason,
    }
    assert embedded == {name: run[name] for name in embedded}
