"""Tasks of a service: many inputs, their states, limits, ends, and what they cannot reach."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agent_calls import ANN, Desk, calls, desk
from model_server import Asked, Refused
from places import short_directory
from sessions_calls import API

from sbx.agent.messages import Response, TokenUsage
from sbx.client import Client
from sbx.errors import BadRequest, Conflict, NotFound, Unavailable
from sbx.store import Store, tasks

PATIENCE_S = 60.0
TEMPLATE = """
description = "Adds two numbers"
agent = "helper"
prompt = "Add ${a} and ${b}, with notes.txt"
files = ["notes.txt"]
max_steps = 3
[parameters.a]
[parameters.b]
default = "10"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        (directory / "tasks").mkdir()
        (directory / "tasks" / "add.toml").write_text(TEMPLATE)
        (directory / "tasks" / "notes.txt").write_text("the notes")
        yield directory


@pytest_asyncio.fixture
async def at(place: Path) -> AsyncIterator[Desk]:
    async with desk(place, tasks_dir=place / "tasks") as at:
        yield at


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[Client]:
    async with Client(at.served.socket) as client:
        yield client


def adds(request: Asked) -> Response | Refused:
    """The answer of a model that reads the notes, and adds the numbers of its task."""
    last = request.messages[-1]
    if last["role"] != "tool":
        return calls(("read_file", {"path": "/workspace/uploads/temparea/notes.txt"}))
    assert "the notes" in last["content"]
    task = next(m["content"] for m in request.messages if m["role"] == "user")
    words = task.split()
    if words[1] == "x":
        return Refused(400, "no number")
    return Response(str(int(words[1]) + int(words[3].rstrip(","))), usage=TokenUsage(7, 3))


async def ended(client: Client, task_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while (task := await client.task(task_id))["ended_at"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return task


async def test_each_input_has_a_conversation_and_a_result(at: Desk, client: Client) -> None:
    at.model.add(*[adds] * 20)
    inputs = [{"a": str(number)} for number in range(1, 9)]
    started = await client.start_task(
        "add", user_id="ann", parameters={"b": "100"}, inputs=inputs, at_once=3
    )
    assert [each["state"] for each in started["inputs"]] == ["waiting"] * 8
    task = await ended(client, started["task_id"])
    assert [each["answer"] for each in task["inputs"]] == [str(100 + n) for n in range(1, 9)]
    assert {(each["state"], each["error"], each["tokens"]) for each in task["inputs"]} == {
        ("done", None, 10)
    }
    names = [each["conversation_id"] for each in task["inputs"]]
    assert len(set(names)) == 8
    async with at.served.client() as http:
        reply = await http.get(f"{API}/conversations/{names[0]}/messages", params=ANN)
        assert reply.json()["items"][0]["content"] == "Add 1 and 100, with notes.txt"
    (listed,) = await client.tasks()
    assert listed["task_id"] == started["task_id"]
    assert listed["ended_at"] is not None
    assert await client.abort_task(started["task_id"]) is False


async def test_a_failed_input_is_a_result_of_its_own(at: Desk, client: Client) -> None:
    at.model.add(*[adds] * 10)
    started = await client.start_task(
        "add", user_id="ann", inputs=[{"a": "1"}, {"a": "x"}, {"a": "3"}], at_once=1
    )
    task = await ended(client, started["task_id"])
    states = [each["state"] for each in task["inputs"]]
    assert states[0] == states[2] == "done"
    assert states[1] == "error"
    assert [each["answer"] for each in task["inputs"]][::2] == ["11", "13"]


async def test_wrong_requests_start_nothing(at: Desk, client: Client, place: Path) -> None:
    (place / "tasks" / "broken.toml").write_text("prompt = 1")
    (place / "tasks" / "plain.toml").write_text('prompt = "Do it"')
    with pytest.raises(NotFound) as unknown:
        await client.start_task("nothing", user_id="ann")
    assert unknown.value.code == "task_not_found"
    with pytest.raises(Unavailable) as broken:
        await client.start_task("broken", user_id="ann")
    assert broken.value.code == "invalid_task"
    with pytest.raises(BadRequest) as missing:
        await client.start_task("add", user_id="ann", inputs=[{"a": "1"}, {"b": "2"}])
    assert missing.value.code == "invalid_parameters"
    details = missing.value.details or {}
    assert (details["field"], details["input"]) == ("a", 2)
    with pytest.raises(BadRequest):
        await client.start_task("plain", user_id="ann")
    with pytest.raises(Conflict) as another:
        await client.start_task("add", user_id="ann", agent_id="other", parameters={"a": "1"})
    assert another.value.code == "another_agent"
    templates = {each["name"]: each["problem"] for each in await client.task_templates()}
    assert templates["add"] is None
    assert templates["broken"] is not None
    assert await client.tasks() == []
    assert not at.model.requests


async def test_a_parameter_is_no_path_of_the_host(at: Desk, client: Client, place: Path) -> None:
    (place / "tasks" / "look.toml").write_text(
        'agent = "helper"\nprompt = "Look at ${file}"\n[parameters.file]\nkind = "file"\n'
    )
    secret = place / "secret.txt"
    secret.write_text("of the host")
    listed: list[str] = []

    def look(request: Asked) -> Response:
        last = request.messages[-1]
        if last["role"] == "tool":
            listed.append(last["content"])
            return Response("done")
        return calls(("list_files", {"path": "/workspace/uploads", "recursive": True}))

    at.model.add(look, look)
    started = await client.start_task("look", user_id="ann", parameters={"file": str(secret)})
    task = await ended(client, started["task_id"])
    assert task["inputs"][0]["state"] == "done", task
    assert "secret.txt" not in listed[0]


async def test_an_abort_ends_what_runs_and_what_waits(at: Desk, client: Client) -> None:
    at.model.add(*[calls(("run_code", {"code": "import time; time.sleep(600)"}))] * 4)
    inputs = [{"a": str(number)} for number in range(4)]
    started = await client.start_task("add", user_id="ann", inputs=inputs, at_once=2)
    task_id = started["task_id"]
    async with asyncio.timeout(PATIENCE_S):
        while (await client.task(task_id))["inputs"][1]["state"] != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await client.abort_task(task_id) is True
    task = await ended(client, task_id)
    assert {each["state"] for each in task["inputs"]} == {"interrupted"}
    assert await client.active_runs() == []
    with pytest.raises(NotFound):
        await client.abort_task("task-unknown")


async def test_an_abort_while_the_store_takes_the_start_of_a_run_ends_the_run(
    at: Desk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may have the start before its writer runs again. The agent ran on then."""
    put = tasks.put_input

    async def put_and_wait(store: Store, task_id: str, row: tasks.TaskInputRow) -> None:
        await put(store, task_id, row)
        if row.state == "running":
            await asyncio.Event().wait()

    monkeypatch.setattr(tasks, "put_input", put_and_wait)
    at.model.add(calls(("run_code", {"code": "import time; time.sleep(600)"})))
    task_id = (await client.start_task("add", user_id="ann", parameters={"a": "1"}))["task_id"]
    async with asyncio.timeout(PATIENCE_S):
        while (await client.task(task_id))["inputs"][0]["state"] != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await client.abort_task(task_id) is True
    await ended(client, task_id)
    assert await client.active_runs() == []


async def test_a_token_sees_the_tasks_of_its_user(at: Desk, client: Client) -> None:
    at.model.add(*[adds] * 2)
    started = await client.start_task("add", user_id="ann", parameters={"a": "1"})
    await ended(client, started["task_id"])
    async with at.served.client() as http:
        bounds = {"user_id": "bob", "agent_id": "helper"}
        reply = await http.post("/v1/admin/tokens", json=bounds)
        token = reply.json()["token"]
    async with Client(at.served.socket, key=token) as bob:
        assert await bob.tasks() == []
        for call in (bob.task(started["task_id"]), bob.abort_task(started["task_id"])):
            with pytest.raises(NotFound):
                await call
        with pytest.raises(NotFound):
            await bob.start_task("add", user_id="ann", parameters={"a": "1"})


async def test_what_a_service_has_not_completed_is_interrupted(place: Path) -> None:
    tasks = place / "tasks"
    waits = calls(("run_code", {"code": "import time; time.sleep(600)"}))
    async with desk(place, waits, tasks_dir=tasks) as at, Client(at.served.socket) as client:
        started = await client.start_task("add", user_id="ann", parameters={"a": "1"})
        async with asyncio.timeout(PATIENCE_S):
            while not await client.active_runs():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    async with desk(place, tasks_dir=tasks) as at, Client(at.served.socket) as client:
        task = await client.task(started["task_id"])
        assert task["ended_at"] is not None
        assert [each["state"] for each in task["inputs"]] == ["interrupted"]
