"""Sub-agents: their files, tools, limits and ends, and what they cannot reach."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import (
    ANN,
    Desk,
    asked_for,
    body,
    calls,
    decide,
    desk,
    following,
    project,
    say,
    the_rest,
)
from model_server import Asked
from places import short_directory
from sessions_calls import API

from sbx.agent.messages import Response, TokenUsage
from sbx.api.agent_v1 import agents_of
from sbx.errors import Unavailable
from sbx.service.rerun import FRESH

PATIENCE_S = 30.0


@pytest_asyncio.fixture(scope="module")
async def at() -> AsyncIterator[Desk]:
    with short_directory() as place:
        (place / "agents").mkdir()
        (place / "agents" / "helper.toml").write_text(
            '[delegate]\nat_once = 2\nmax_steps = 3\n[approvals]\nlist_files = "deny"\n'
            'execute_command = "ask"\n'
        )
        async with desk(place, agents_dir=place / "agents") as at:
            yield at


@pytest_asyncio.fixture
async def http(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client
        for box in (await client.get("/v1/sandboxes")).json()["items"]:
            await client.delete(f"/v1/sandboxes/{box['id']}")
    at.model.forget()


def code(text: str) -> Response:
    return calls(("run_code", {"code": text}))


async def boxes(http: httpx.AsyncClient) -> int:
    return len((await http.get("/v1/sandboxes")).json()["items"])


def ends(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    ids = [
        event["tool_call_id"]
        for event in events
        if event["type"] == "tool_start" and event["tool_name"] == name
    ]
    return [
        event for event in events if event["type"] == "tool_end" and event["tool_call_id"] in ids
    ]


async def test_files_go_there_and_only_the_named_ones_come_back(
    at: Desk, http: httpx.AsyncClient
) -> None:
    seen: list[Asked] = []

    def sub_agent(request: Asked) -> Response:
        seen.append(request)
        return code(
            "import os\n"
            "text = open('data/in.txt').read()\n"
            "os.makedirs('out', exist_ok=True)\n"
            "open('out/result.txt', 'w').write(text.upper())\n"
            "open('secret.txt', 'w').write('mine')\n"
            "print(sorted(os.listdir('.')))"
        )

    def sub_answer(request: Asked) -> Response:
        seen.append(request)
        return Response("I made it upper case.", usage=TokenUsage(1000, 100))

    arguments = {
        "task": "Make data/in.txt upper case, in out/result.txt",
        "files": ["/workspace/data/in.txt"],
        "returns": ["out/result.txt", "missing.txt"],
    }
    at.model.add(
        calls(("write_file", {"path": "data/in.txt", "content": "hello"})),
        calls(("write_file", {"path": "other.txt", "content": "not for the other"})),
        calls(("delegate", arguments)),
        sub_agent,
        sub_answer,
        code("import os; print(open('out/result.txt').read(), os.path.exists('secret.txt'))"),
        Response("done"),
    )
    events = await say(http, "there-and-back", message="a word of the conversation")
    first, second = seen
    assert "a word of the conversation" not in first.text
    assert "Make data/in.txt upper case" in first.text
    assert "other.txt" not in second.text  # what it lists in its own sandbox
    names = [tool["function"]["name"] for tool in first.body["tools"]]
    assert "delegate" not in names
    assert "run_code" in names
    (end,) = ends(events, "delegate")
    assert not end["is_error"]
    assert end["result"].startswith("I made it upper case.")
    assert "out/result.txt: 5 bytes" in end["result"]
    assert "missing.txt did not come back" in end["result"]
    assert "HELLO False" in ends(events, "run_code")[0]["result"]
    outputs = [event["text"] for event in events if event["type"] == "tool_output"]
    assert "run_code …\n" in outputs
    assert events[-1]["usage"]["input_tokens"] >= 1000
    assert await boxes(http) == 1


async def test_one_of_two_parts_reaches_its_limit(at: Desk, http: httpx.AsyncClient) -> None:
    def sub_agent(request: Asked) -> Response:
        if "part one" in request.text:
            return Response("one is done")
        return code("1 / 0") if request.messages[-1]["role"] == "user" else code("2 / 0")

    parts = [("delegate", {"task": f"part {name}", "max_steps": 2}) for name in ("one", "two")]
    at.model.add(calls(*parts), *[sub_agent] * 3, Response("both"))
    events = await say(http, "parts")
    assert events[-1]["reason"] == "done"
    one, two = sorted(ends(events, "delegate"), key=lambda end: end["result"], reverse=True)
    assert one["result"] == "one is done"
    assert "It ended before it was done: max_steps" in two["result"]
    assert await boxes(http) == 1


async def test_a_sub_agent_has_no_more_rights_and_asks_nobody(
    at: Desk, http: httpx.AsyncClient
) -> None:
    results: list[str] = []

    def last(request: Asked) -> Response:
        results.extend(m["content"] for m in request.messages if m["role"] == "tool")
        return Response("it was denied")

    at.model.add(
        calls(("delegate", {"task": "try"})),
        calls(
            ("list_files", {"path": "."}),
            ("execute_command", {"command": "id"}),
            ("delegate", {"task": "again"}),
        ),
        last,
        Response("done"),
    )
    async with asyncio.timeout(PATIENCE_S):
        await say(http, "rights")
    assert len(results) == 3
    assert "not allowed" in results[0]
    assert "a person must approve" in results[1]
    assert "does not exist" in results[2]
    assert (await http.get(f"{API}/approvals")).json()["items"] == []


async def test_paths_and_tools_outside_are_refused(at: Desk, http: httpx.AsyncClient) -> None:
    at.model.add(
        calls(
            ("delegate", {"task": "a", "files": ["/etc/passwd"]}),
            ("delegate", {"task": "b", "files": ["missing.txt"]}),
            ("delegate", {"task": "c", "returns": ["/workspace"]}),
            ("delegate", {"task": "d", "tools": ["no_such_tool"]}),
            ("delegate", {"task": "e", "max_steps": 4}),
        ),
        Response("done"),
    )
    events = await say(http, "refused")
    results = [event["result"] for event in events if event["type"] == "tool_end"]
    assert len(results) == 5
    assert all(result.startswith("Error") for result in results), results
    assert await boxes(http) == 1


async def test_a_returned_file_stays_in_the_workspace(at: Desk, http: httpx.AsyncClient) -> None:
    def sub_agent(_: Asked) -> Response:
        return code(
            "import os\n"
            "os.symlink('/etc/hostname', 'link.txt')\n"
            "open('up.txt', 'w').write('x' * 10)"
        )

    at.model.add(
        calls(("delegate", {"task": "a", "returns": ["link.txt", "../../up.txt", "/up.txt"]})),
        sub_agent,
        Response("made"),
        Response("done"),
    )
    events = await say(http, "outside")
    (end,) = ends(events, "delegate")
    lines = end["result"].splitlines()
    assert sum("did not come back" in line for line in lines) == 3, lines


async def test_an_abort_deletes_the_sandbox_of_the_sub_agent(
    at: Desk, http: httpx.AsyncClient
) -> None:
    at.model.add(calls(("delegate", {"task": "wait"})), code("import time; time.sleep(600)"))
    async with asyncio.timeout(PATIENCE_S):
        async for event in following(http, body("aborted")):
            if event["type"] == "tool_output":
                assert await boxes(http) == 2
                reply = await http.post(f"{API}/chat/aborted/abort", params=ANN)
                assert reply.is_success, reply.text
        while await boxes(http) > 1:  # noqa: ASYNC110  # it is in a service
            await asyncio.sleep(0.05)


async def test_the_service_starts_though_a_sandbox_of_a_sub_agent_cannot_be_deleted(
    at: Desk, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sandbox that a killed service left, on a disk that cannot take its end, kept the next
    service from its start."""
    sandboxes = at.served.service.sandboxes
    box = await sandboxes.create(at.served.service.access.service_caller(), labels=FRESH)

    async def full(*_: object) -> bool:
        raise Unavailable("there is no space", code="no_space")

    agents = agents_of(at.served.app)
    with monkeypatch.context() as patched:
        patched.setattr(sandboxes, "end", full)
        patched.setattr(agents, "_started", False)
        await agents.start()
    monkeypatch.setattr(agents, "_started", False)
    await agents.start()
    assert box.id not in [each.id for each in sandboxes.every()]


async def test_an_agent_without_the_table_cannot_delegate(
    at: Desk, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    names: list[str] = []

    def answer(request: Asked) -> Response:
        names.extend(tool["function"]["name"] for tool in request.body["tools"])
        return Response("done")

    at.model.add(answer)
    await say(http, "plain", agent_id="plain")
    assert "delegate" not in names


async def test_a_file_that_comes_back_to_a_project_is_approved_as_a_change(
    at: Desk, http: httpx.AsyncClient
) -> None:
    directory = at.directory("delegated")
    (directory / "in.txt").write_text("hello")
    writes = code("open('in.txt', 'w').write('changed'); open('out.txt', 'w').write('HELLO')")
    arguments = {"task": "Make it upper case", "files": ["in.txt"], "returns": ["out.txt"]}
    project_id = await project(http, directory)
    for approved in (False, True):
        at.model.add(calls(("delegate", arguments)), writes, Response("done"), Response("ok"))
        message = body("delegated", project_id=project_id)
        async with asyncio.timeout(PATIENCE_S), aclosing(following(http, message)) as events:
            start = await asked_for(events)
            assert start["tool_name"] == "delegate"
            (change,) = start["dry_run"]["changes"]
            assert (change["path"], change["kind"]) == ("/workspace/out.txt", "added")
            assert not (directory / "out.txt").exists()
            assert (await decide(http, start["tool_call_id"], approved)).status_code == 200
            await the_rest(events)
        assert (directory / "out.txt").exists() == approved
        assert (directory / "in.txt").read_text() == "hello"  # the other has its own copy


def two_parts() -> Response:
    return calls(
        *[
            ("delegate", {"task": f"part {name}", "returns": [f"{name}.txt", "x.txt"]})
            for name in ("one", "two")
        ]
    )


async def test_sub_agents_in_a_project_work_at_once(at: Desk, http: httpx.AsyncClient) -> None:
    """They worked one after another if they returned files."""
    at.model.add(two_parts(), *[code("import time; time.sleep(600)")] * 2)
    directory = at.directory("at-once")
    request = body("at-once", project_id=await project(http, directory))
    async with asyncio.timeout(PATIENCE_S * 4), aclosing(following(http, request)) as events:
        running: set[str] = set()
        while len(running) < 2:
            event = await anext(events)
            if event["type"] == "tool_output":
                running.add(event["tool_call_id"])
        assert await boxes(http) == 3
        await http.post(f"{API}/chat/at-once/abort", params=ANN)
        rest = await the_rest(events)
    for end in (event for event in rest if event["type"] == "tool_end"):
        assert "changes of files were dropped" in end["result"]
    assert await boxes(http) == 1
    assert list(directory.iterdir()) == []


async def test_files_of_two_sub_agents_come_in_the_order_of_their_calls(
    at: Desk, http: httpx.AsyncClient
) -> None:
    def sub_agent(request: Asked) -> Response:
        name = "one" if "part one" in request.text else "two"
        if request.messages[-1]["role"] != "user":
            return Response(f"{name} is done")
        return code(f"for n in ('{name}', 'x'): open(n + '.txt', 'w').write('{name}')")

    at.model.add(two_parts(), *[sub_agent] * 4, Response("both"))
    directory = at.directory("in-order")
    request = body("in-order", project_id=await project(http, directory))
    events = []
    async with aclosing(following(http, request)) as stream:
        async for event in stream:
            events.append(event)
            if event["type"] == "tool_pending":
                await decide(http, event["tool_call_id"], True)
    first, second = ends(events, "delegate")
    assert not first["is_error"], first["result"]
    assert second["error"]["code"] == "workspace_changed"  # a sub-agent is not started again
    assert sorted(path.name for path in directory.iterdir()) == ["one.txt", "x.txt"]
    assert (directory / "x.txt").read_text() == "one"
