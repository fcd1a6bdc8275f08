"""Steps of a task in a service: their order, their files, a resume, a crash, and the cache."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agent_calls import ANN, Desk, calls, desk
from model_server import KEY, Asked, Refused, model_server
from places import short_directory
from serving import open_directory, service
from sessions_calls import API

from sbx.agent.messages import Response, TokenUsage
from sbx.client import Client
from sbx.errors import Conflict, NotFound

PATIENCE_S = 60.0
TEMPLATE = """
agent = "helper"
cache = "1h"
[parameters.topic]
[[step]]
name = "collect"
prompt = "COLLECT ${topic}"
files = ["data/facts.txt"]
[[step]]
name = "draw"
prompt = "DRAW ${topic}"
[[step]]
name = "report"
needs = ["collect", "draw"]
prompt = "REPORT on ${steps.collect.answer} and ${steps.draw.answer}"
check = "test -s report.txt"
files = ["report.txt"]
"""
WRITES = {
    "COLLECT": {"path": "data/facts.txt", "content": "the facts"},
    "REPORT": {"path": "report.txt", "content": "the report"},
}


class Worker:
    """A model that does each step. `broken`: steps that it refuses. `begun`: each first message."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.begun: list[str] = []
        self.read: list[str] = []

    def __call__(self, request: Asked) -> Response | Refused:
        task = next(m["content"] for m in request.messages if m["role"] == "user")
        word, last = task.split()[0], request.messages[-1]
        if last["role"] == "user":
            self.begun.append(task)
            if word in self.broken:
                return Refused(400, "no")
            if word == "REPORT":
                return calls(("read_file", {"path": "/workspace/data/facts.txt"}))
        if word == "REPORT" and "the facts" in last["content"]:
            self.read.append(last["content"])
        if word in WRITES and len(request.messages) < 6 and "bytes" not in last["content"]:
            return calls(("write_file", WRITES[word]))
        return Response(f"{word.lower()}-answer", usage=TokenUsage(2, 1))


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        (directory / "tasks").mkdir()
        (directory / "tasks" / "report.toml").write_text(TEMPLATE)
        yield directory


@pytest_asyncio.fixture
async def at(place: Path) -> AsyncIterator[Desk]:
    async with desk(place, tasks_dir=place / "tasks") as at:
        yield at


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[Client]:
    async with Client(at.served.socket) as client:
        yield client


@pytest.fixture
def worker(at: Desk) -> Worker:
    worker = Worker()
    at.model.add(*[worker] * 200)
    return worker


async def ended(client: Client, task_id: str) -> dict[str, dict[str, Any]]:
    """The rows of the steps by name, once the task has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while (task := await client.task(task_id))["ended_at"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return {each["step"]: each for each in task["inputs"]}


async def states(client: Client, task_id: str) -> list[str]:
    return [each["state"] for each in (await client.task(task_id))["inputs"]]


async def start(client: Client, topic: str = "sales", **how: Any) -> str:
    started = await client.start_task("report", user_id="ann", parameters={"topic": topic}, **how)
    assert [each["step"] for each in started["inputs"]] == ["collect", "draw", "report"]
    return str(started["task_id"])


async def test_steps_get_the_answers_and_files_of_their_needs(
    client: Client, worker: Worker
) -> None:
    steps = await ended(client, await start(client))
    assert {name: each["state"] for name, each in steps.items()} == {
        "collect": "done",
        "draw": "done",
        "report": "done",
    }, steps
    assert worker.begun[-1] == "REPORT on collect-answer and draw-answer"
    assert worker.read
    assert sorted(worker.begun[:2]) == ["COLLECT sales", "DRAW sales"]
    assert len({each["conversation_id"] for each in steps.values()}) == 3


async def test_a_failed_step_skips_its_successors_and_resumes(
    client: Client, worker: Worker
) -> None:
    worker.broken = {"DRAW"}
    task_id = await start(client)
    steps = await ended(client, task_id)
    assert [steps[name]["state"] for name in ("collect", "draw", "report")] == [
        *("done", "error", "skipped")
    ]
    worker.broken, first = set(), list(worker.begun)
    resumed = await client.resume_task(task_id)
    assert resumed["ended_at"] is None
    again = await ended(client, task_id)
    assert {each["state"] for each in again.values()} == {"done"}
    assert again["collect"] == steps["collect"]
    assert worker.begun[len(first) :][:1] == ["DRAW sales"]
    assert sum(task.startswith("COLLECT") for task in worker.begun) == 1
    with pytest.raises(Conflict) as nothing:
        await client.resume_task(task_id)
    assert nothing.value.code == "nothing_to_resume"
    with pytest.raises(NotFound):
        await client.resume_task("task-unknown")


async def test_a_step_without_its_file_fails(client: Client, worker: Worker, place: Path) -> None:
    changed = TEMPLATE.replace('["data/facts.txt"]', '["data/facts.txt", "more.txt"]')
    (place / "tasks" / "report.toml").write_text(changed)
    steps = await ended(client, await start(client))
    assert steps["collect"]["state"] == "error"
    assert steps["collect"]["error"]["code"] == "step_output_missing"
    assert (steps["draw"]["state"], steps["report"]["state"]) == ("done", "skipped")


async def test_a_task_with_other_steps_or_erased_content_does_not_resume(
    at: Desk, client: Client, worker: Worker, place: Path
) -> None:
    worker.broken = {"DRAW"}
    task_id = await start(client)
    steps = await ended(client, task_id)
    (place / "tasks" / "report.toml").write_text(
        TEMPLATE.replace('"draw"', '"paint"').replace("steps.draw.", "steps.paint.")
    )
    with pytest.raises(Conflict) as changed:
        await client.resume_task(task_id)
    assert changed.value.code == "template_changed"
    (place / "tasks" / "report.toml").write_text(TEMPLATE)
    async with at.served.client() as http:
        name = steps["draw"]["conversation_id"]
        await http.delete(f"{API}/conversations/{name}", params=ANN)
    with pytest.raises(Conflict) as erased:
        await client.resume_task(task_id)
    assert erased.value.code == "task_erased"


async def test_a_step_does_not_get_the_answer_of_a_deleted_conversation(
    at: Desk, client: Client
) -> None:
    """The conversation of `collect` is deleted while `draw` runs, before `report` begins."""
    worker = Worker()
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)"

    def answer(request: Asked) -> Response | Refused:
        task = next(m["content"] for m in request.messages if m["role"] == "user")
        if task.startswith("DRAW") and request.messages[-1]["role"] == "user":
            return calls(("run_code", {"code": waits}))
        return worker(request)

    at.model.add(*[answer] * 20)
    task_id = await start(client)
    async with asyncio.timeout(PATIENCE_S):
        while await states(client, task_id) != ["done", "running", "waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    collect, draw, _ = (each["conversation_id"] for each in (await client.task(task_id))["inputs"])
    async with at.served.client() as http:
        assert (await http.delete(f"{API}/conversations/{collect}", params=ANN)).status_code == 204
        (box,) = (await http.get("/v1/sandboxes")).json()["items"]
        files = f"/v1/sandboxes/{box['id']}/conversations/{draw}/files"
        (await http.put(files, params={"path": "go"}, content=b"")).raise_for_status()
    steps = await ended(client, task_id)
    assert steps["draw"]["state"] == "done"
    assert steps["report"]["error"]["code"] == "task_erased"
    assert not any(task.startswith("REPORT") for task in worker.begun)


async def test_a_result_is_used_again_for_the_same_input(client: Client, worker: Worker) -> None:
    first = await ended(client, await start(client))
    count = len(worker.begun)
    second = await ended(client, await start(client))
    assert len(worker.begun) == count
    assert {each["cached"] for each in first.values()} == {False}
    assert {each["cached"] for each in second.values()} == {True}
    for name, each in second.items():
        for field in ("answer", "conversation_id", "run_id"):
            assert each[field] == first[name][field]
    other = await ended(client, await start(client, topic="costs"))
    fresh = await ended(client, await start(client, cache=False))
    assert not any(each["cached"] for each in (*other.values(), *fresh.values()))
    started = await client.start_task("report", user_id="bob", parameters={"topic": "sales"})
    bob = await ended(client, started["task_id"])
    assert not any(each["cached"] for each in bob.values())


async def test_a_deleted_conversation_is_not_a_cached_result(
    at: Desk, client: Client, worker: Worker
) -> None:
    first = await ended(client, await start(client))
    copy_id = await start(client)
    await ended(client, copy_id)
    async with at.served.client() as http:
        name = first["draw"]["conversation_id"]
        assert (await http.delete(f"{API}/conversations/{name}", params=ANN)).status_code == 204
    copied = await ended(client, copy_id)
    assert (copied["draw"]["answer"], copied["draw"]["parameters"]) == (None, {})
    third = await ended(client, await start(client))
    assert (third["collect"]["cached"], third["draw"]["cached"]) == (True, False)
    assert third["report"]["cached"] is False


async def test_a_task_without_cache_does_its_work_again(
    client: Client, worker: Worker, place: Path
) -> None:
    (place / "tasks" / "report.toml").write_text(TEMPLATE.replace('cache = "1h"', ""))
    await ended(client, await start(client))
    again = await ended(client, await start(client))
    assert not any(each["cached"] for each in again.values())


async def test_steps_that_a_service_did_not_complete_resume_in_the_next(place: Path) -> None:
    waits = calls(("run_code", {"code": "import time; time.sleep(600)"}))
    async with (
        desk(place, *[waits] * 2, tasks_dir=place / "tasks") as at,
        Client(at.served.socket) as client,
    ):
        task_id = await start(client)
        async with asyncio.timeout(PATIENCE_S):
            while len(await client.active_runs()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    worker = Worker()
    async with (
        desk(place, *[worker] * 50, tasks_dir=place / "tasks"),
        Client(at.served.socket) as client,
    ):
        steps = await ended(client, task_id)
        assert {each["state"] for each in steps.values()} == {"interrupted"}
        await client.resume_task(task_id)
        steps = await ended(client, task_id)
        assert {each["state"] for each in steps.values()} == {"done"}, steps


async def test_after_a_kill_a_resume_does_only_the_remaining_steps() -> None:
    """The service is killed while one step is done and another one runs."""
    worker, waits = Worker(), calls(("run_code", {"code": "import time; time.sleep(600)"}))
    killed = False

    def answer(request: Asked) -> Response | Refused:
        task = next(m["content"] for m in request.messages if m["role"] == "user")
        is_blocked = task.startswith("DRAW") and not killed
        return waits if is_blocked else worker(request)

    with open_directory() as top, model_server(*[answer] * 30) as model:
        (top / "tasks").mkdir()
        (top / "tasks" / "report.toml").write_text(TEMPLATE)
        env = {
            "BASE_URL": model.openai_url,
            "API_KEY": KEY,
            "MODEL_NAME": "scripted",
            "SBX_TASKS_DIR": str(top / "tasks"),
        }
        with service(env=env, top=top) as served:
            async with Client(served.socket) as client:
                task_id = await start(client)
                async with asyncio.timeout(PATIENCE_S):
                    while await states(client, task_id) != ["done", "running", "waiting"]:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                served.process.kill()
                await asyncio.to_thread(served.process.wait)
                killed = True
        with service(env=env, top=top) as served:
            async with Client(served.socket) as client:
                steps = await ended(client, task_id)
                assert [steps[name]["state"] for name in ("collect", "draw", "report")] == [
                    *("done", "interrupted", "interrupted")
                ]
                await client.resume_task(task_id)
                steps = await ended(client, task_id)
                assert {each["state"] for each in steps.values()} == {"done"}, steps
                assert worker.read  # the file of the step before the kill
                assert sum(task.startswith("COLLECT") for task in worker.begun) == 1
