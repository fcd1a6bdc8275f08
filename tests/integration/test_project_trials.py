"""A call in a project is shown while it is tried on a copy. Commands of one answer run at once."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import (
    PERSON,
    Desk,
    Event,
    at,
    body,
    calls,
    decide,
    desk,
    following,
    kinds,
    messages,
    one,
    pending,
    project,
    replayed,
    runs,
    say,
    the_rest,
)
from places import short_directory
from sessions_calls import API

from sbx import Runtime
from sbx.agent.agent import Agent, Budget
from sbx.agent.approvals import Approvals
from sbx.agent.messages import Response
from sbx.agent.models.replay import ReplayModel
from sbx.agent.tools.approval_rules import Permissions
from sbx.client import Client
from sbx.protocol.agent import ToolPending
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession
from tests.fake_clock import FakeClock

pytestmark = [pytest.mark.core, pytest.mark.needs("namespaces")]
__all__ = ["at"]
ENDLESS = "kept = 1; open('a', 'w').write('a'); print('on', flush=True)\nwhile True: pass"


@pytest_asyncio.fixture
async def http(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as http:
        yield http
    at.model.forget()


@pytest_asyncio.fixture
async def person(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as person:
        yield person


def cell(code: str) -> tuple[str, dict[str, Any]]:
    return "run_code", {"code": code}


def command(text: str) -> tuple[str, dict[str, Any]]:
    return "execute_command", {"command": text}


async def until(events: AsyncIterator[Event], kind: str) -> Event:
    async for event in events:
        if event["type"] == kind:
            return event
    raise AssertionError(f"no {kind}")


async def allowing(http: httpx.AsyncClient, request: dict[str, Any]) -> list[Event]:
    """Follow a chat to its end, and allow each question."""
    seen = []
    async with aclosing(following(http, request)) as events:
        async for event in events:
            seen.append(event)
            if event["type"] == "tool_pending":
                assert (await decide(http, event["tool_call_id"], True)).status_code == 200
    return seen


def results(said: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in said if message["role"] == "tool"]


async def test_a_call_is_shown_while_it_is_tried(
    at: Desk, http: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    """A cell of four seconds showed nothing for four seconds, and no client listed the call."""
    directory = at.directory("shown")
    at.model.add(calls(cell(ENDLESS)))
    request = body("shown", project_id=await project(http, directory))
    async with aclosing(following(http, request)) as events:
        start = await until(events, "tool_start")
        assert (start["approval_required"], start["tool_args"]) == (None, {"code": ENDLESS})
        output = await until(events, "tool_output")
        assert output["text"].startswith("on")

        status = f"{API}/conversations/shown/runs/{start['run_id']}"
        (call,) = (await person.get(status)).json()["pending_calls"]
        assert (call["tool_call_id"], call["approval_required"], call["expires_at"]) == (
            *(start["tool_call_id"], None),
            None,
        )
        async with Client(at.served.socket) as client:
            (run,) = [each for each in await client.active_runs() if each["run_id"]]
        assert [each["tool_name"] for each in run["pending_calls"]] == ["run_code"]
        assert await pending(person) == []

        # A client that reconnects receives the rest of the trial.
        again = following(person, request, after=start["seq"])
        async with aclosing(again) as other:
            assert (await until(other, "tool_output"))["text"].startswith("on")
            assert (await person.post(f"{API}/chat/shown/abort")).json() == {"aborted": True}
            rest = await the_rest(other)
        assert rest[-1]["reason"] == "aborted"
        assert kinds(await the_rest(events)) == kinds(rest) == ["tool_end", "run_end"]
    (result,) = results(await messages(http, "shown"))
    assert "changes of files were dropped" in result
    assert "not known" not in result
    assert list(directory.iterdir()) == []
    replay = await replayed(person, "shown")
    assert kinds(replay) == ["run_start", "tool_start", "tool_end", "run_end"]
    assert await copies_left(at) == set()


async def copies_left(at: Desk) -> set[str]:
    """Return the copies that stay when all sandboxes of projects have closed."""
    for state in list(at.served.service.projects._sessions._states.values()):
        async with state.lock:
            await state.shut()
    return set(at.served.service.runtime.copies)


async def test_commands_of_one_answer_are_tried_at_the_same_time(
    at: Desk, http: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    """They were made one after another: this test would wait for the end of the first."""
    at.model.add(calls(*[command("echo on; sleep 600")] * 3))
    request = body("beside", project_id=await project(http, at.directory("beside")))
    printed: set[str] = set()
    async with asyncio.timeout(120), aclosing(following(http, request)) as events:
        async for event in events:
            if event["type"] == "tool_output":
                printed.add(event["tool_call_id"])
            if len(printed) == 3:
                break
        (run,) = (await person.get(f"{API}/runs")).json()["items"]
        assert len(run["pending_calls"]) == 3
        await person.post(f"{API}/chat/beside/abort")
        rest = await the_rest(events)
    assert kinds(rest) == ["tool_end"] * 3 + ["run_end"]
    assert await copies_left(at) == set()


async def test_questions_come_in_the_order_of_the_calls_and_see_the_changes_before(
    at: Desk, http: httpx.AsyncClient
) -> None:
    """Calls that change the same file are tried again, before the user is asked."""
    directory = at.directory("order")
    texts = ["echo 1 >> same", "echo 2 >> same", "mkdir d; echo 3 > d/x", "mkdir d; echo 4 > d/y"]
    at.model.add(calls(*map(command, texts)), Response("done"))
    seen = await allowing(http, body("order", project_id=await project(http, directory)))
    questions = [event for event in seen if event["type"] == "tool_pending"]
    assert [event["tool_args"]["command"] for event in questions] == texts
    starts = [event for event in seen if event["type"] == "tool_start"]
    assert [event["tool_args"]["command"] for event in starts] == texts
    (change,) = questions[1]["dry_run"]["changes"]
    assert change["diff"] == "@@ -1,1 +1,2 @@\n 1\n+2"
    assert (directory / "same").read_text() == "1\n2\n"
    assert (directory / "d/x").read_text() + (directory / "d/y").read_text() == "3\n4\n"
    again = [event for event in seen if "tried again" in event.get("text", "")]
    assert [event["tool_call_id"] for event in again] == [
        questions[number]["tool_call_id"] for number in (1, 3)
    ]
    # mkdir fails in the second trial, and the file is written all the same.
    assert [event["is_error"] for event in seen if event["type"] == "tool_end"] == [False] * 4


async def test_a_call_that_missed_the_changes_of_another_reports_it(
    at: Desk, http: httpx.AsyncClient
) -> None:
    directory = at.directory("missed")
    at.model.add(calls(command("echo 1 > a"), command("ls > b; cat b")), Response("done"))
    await allowing(http, body("missed", project_id=await project(http, directory)))
    first, second = results(await messages(http, "missed"))
    assert "did not see" not in first
    assert "did not see the changes of files by earlier calls of the same answer" in second
    assert (directory / "b").read_text() == "b\n"


async def test_cells_and_files_see_the_calls_before_them(at: Desk, http: httpx.AsyncClient) -> None:
    directory = at.directory("sees")
    write = ("write_file", {"path": "mine.py", "content": "x = 1\n"})
    edit = ("edit_file", {"path": "mine.py", "old_string": "x = 1", "new_string": "x = 2"})
    at.model.add(
        calls(write, edit, cell("import mine; mine.x"), command("cat mine.py")), Response("done")
    )
    await allowing(http, body("sees", project_id=await project(http, directory)))
    *_, third, fourth = results(await messages(http, "sees"))
    assert "[result]\n2" in third
    assert "x = 2" in fourth
    assert (directory / "mine.py").read_text() == "x = 2\n"


async def test_an_abort_tells_the_model_how_far_each_call_came(
    at: Desk, http: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    """Calls that were dropped, or that never began, were said to have come an unknown way."""
    directory = at.directory("truth")
    at.model.add(calls(command("echo 1 > a"), command("echo 2 > b"), cell("open('c', 'w')")))
    request = body("truth", project_id=await project(http, directory))
    async with aclosing(following(http, request)) as events:
        await until(events, "tool_pending")
        await person.post(f"{API}/chat/truth/abort")
        rest = await the_rest(events)
    assert kinds(rest) == ["tool_approval", "tool_end", "tool_end", "tool_end", "run_end"]
    said = await messages(http, "truth")
    first, second, third = results(said)
    assert "denied: the run was aborted. It was tried on a copy" in first
    assert "changes of files were dropped" in second or "has changed nothing" in second
    assert third == "The run ended before this call began: it has changed nothing."
    assert said[2]["error"]["code"] == "denied"
    assert [event["result"] for event in rest if event["type"] == "tool_end"] == [
        *(first, second, third)
    ]
    assert list(directory.iterdir()) == []


async def test_a_call_without_changes_ends_while_another_waits(
    at: Desk, http: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    at.model.add(calls(command("echo 1 > a"), command("true")), Response("done"))
    request = body("ends", project_id=await project(http, at.directory("ends")))
    async with aclosing(following(http, request)) as events:
        seen = {event["type"]: event async for event in _both(events)}
        assert seen["tool_end"]["tool_call_id"] != seen["tool_pending"]["tool_call_id"]
        await decide(person, seen["tool_pending"]["tool_call_id"], False)
        rest = await the_rest(events)
    assert kinds(rest) == ["tool_approval", "tool_end", "step_end", "step_end", "run_end"]


async def _both(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield events up to one question and one end, in any order."""
    missing = {"tool_pending", "tool_end"}
    while missing:
        event = await anext(events)
        missing.discard(event["type"])
        yield event


async def test_a_follower_of_a_started_run_gets_its_events(
    at: Desk, http: httpx.AsyncClient
) -> None:
    """Two clients follow one run, and each sees the question and the decision."""
    at.model.add(runs("echo 1 > a"), Response("done"))
    request = body("two", project_id=await project(http, at.directory("two")))
    async with aclosing(following(http, request)) as events:
        question = await until(events, "tool_pending")
        async with aclosing(following(http, request, after=0)) as others:
            assert (await until(others, "tool_pending"))["seq"] == question["seq"]
            await decide(http, question["tool_call_id"], True)
            assert kinds(await the_rest(others)) == kinds(await the_rest(events))


# -- the end of a trial ----------------------------------------------------------------------------

TRYING = """
import asyncio, sys
from contextlib import aclosing
from pathlib import Path
from agent_calls import body, calls, desk, following, project

async def main(top):
    code = "open('a', 'w').write('a'); print('on', flush=True)\\nwhile True: pass"
    async with desk(top, calls(("run_code", {"code": code}))) as at, at.served.client() as client:
        request = body("killed", project_id=await project(client, at.directory("killed")))
        async with aclosing(following(client, request)) as events:
            while (await anext(events))["type"] != "tool_output":
                pass
            print("on", flush=True)
            await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def killed_during_a_trial(top: Path) -> None:
    here = Path(__file__).parent
    ours = os.pathsep.join(map(str, (here.parents[1], here)))
    with subprocess.Popen(
        [sys.executable, "-c", TRYING, str(top)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ours},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.kill()


async def test_a_killed_service_leaves_nothing_of_a_trial() -> None:
    with short_directory() as top:
        await asyncio.to_thread(killed_during_a_trial, top)
        async with desk(top, Response("here again")) as at, at.served.client() as client:
            assert list((at.projects / "killed").iterdir()) == []
            assert await pending(client) == []
            assert (await say(client, "killed"))[-1]["content"] == "here again"
            result = (await messages(client, "killed"))[2]
            assert "interrupted" in result["content"]
            assert await copies_left(at) == set()
            names = [path.name for path in at.served.service.data_dir.rglob("a")]
            assert names == []


async def test_a_question_that_expires_is_denied_and_its_copy_is_dropped(
    own_runtime: Runtime, tmp_path: Path
) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, PERSON, PERSON)
    clock = FakeClock()
    box = ProjectSession(await open_project(own_runtime, "default", directory))
    agent = Agent(
        box,
        ReplayModel([calls(command("echo 1 > a"), command("echo 2 > b")), "ok"]),
        approvals=Approvals(clock=clock, timeout_s=60),
        permissions=Permissions("project"),
    )
    asked = 0
    async with asyncio.timeout(120), aclosing(agent.stream("go")) as events:
        async for event in events:
            if isinstance(event, ToolPending):
                asked += 1
                asyncio.get_running_loop().call_soon(clock.advance, 61)
    kept = [entry.message for entry in await agent.history.messages()]
    for result in kept[2:4]:
        assert "no answer came within the time limit. It was tried on a copy" in result.content
    assert (asked, list(directory.iterdir())) == (2, [])
    await box.close()
    assert not own_runtime.copies
    assert not own_runtime.data.sandboxes()


async def test_a_budget_of_time_ends_a_trial(own_runtime: Runtime, tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, PERSON, PERSON)
    box = ProjectSession(await open_project(own_runtime, "default", directory))
    agent = Agent(
        box,
        ReplayModel([calls(cell(ENDLESS), command("echo 2 > b")), "ok"]),
        approvals=Approvals(),
        permissions=Permissions("project"),
        budget=Budget(seconds=5),
    )
    end = await agent.run("go")
    assert end.reason == "budget"
    first, second = [entry.message.content for entry in await agent.history.messages()][2:]
    assert "changes of files were dropped" in first
    assert second == "The run ended before this call began: it has changed nothing."
    assert list(directory.iterdir()) == []
    await box.close()
    assert not own_runtime.copies


# -- a project that asks before each command -------------------------------------------------------


async def test_each_command_is_asked_about_before_it_runs(
    at: Desk, http: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("first")
    at.model.add(
        calls(command("echo 1 > a"), cell("kept = 2; print(open('b', 'w').write('b'))")),
        calls(cell("kept"), ("list_files", {}), ("write_file", {"path": "c", "content": "c"})),
        Response("done"),
    )
    asks = await project(http, directory, ask_commands=True)
    seen = []
    async with aclosing(following(http, body("first", project_id=asks))) as events:
        async for event in events:
            seen.append(event)
            if event["type"] == "tool_start" and event["tool_name"] != "list_files":
                if event["tool_name"] == "write_file":
                    assert event["approval_required"] is None  # a file is asked about by its diff
                    continue
                assert event["approval_required"] is True
                writes = {"execute_command": "a", "run_code": "b"}[event["tool_name"]]
                assert event["tool_args"] == {"code": "kept"} or not (directory / writes).exists()
                (waiting, *_) = await pending(person)
                assert "dry_run" not in waiting
                await decide(person, event["tool_call_id"], True)
            if event["type"] == "tool_pending":
                assert event["tool_name"] == "write_file"
                await decide(person, event["tool_call_id"], True)
    assert [event["is_error"] for event in seen if event["type"] == "tool_end"] == [False] * 5
    assert sorted(path.name for path in directory.iterdir()) == ["a", "b", "c"]
    assert "[result]\n2" in results(await messages(http, "first"))[2]

    # A rule, and the permission for the conversation, count as always.
    at.model.add(runs("echo 3 > d"), Response("ok"))
    async with aclosing(following(http, body("first"))) as events:
        start = await until(events, "tool_start")
        always = await decide(person, start["tool_call_id"], True, remember="exact")
        assert always.status_code == 200
        await the_rest(events)
    at.model.add(runs("echo 3 > d"), Response("ok"))
    assert "tool_approval" not in kinds(await allowing(http, body("first")))
    path = f"{API}/conversations/first/commands"
    assert (await person.put(path, json={"allowed": True})).status_code == 200
    at.model.add(runs("echo 4 > d"), Response("ok"))
    assert "tool_approval" not in kinds(await allowing(http, body("first")))
    assert (directory / "d").read_text() == "4\n"


async def test_a_denied_command_did_not_run(
    at: Desk, http: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("never")
    at.model.add(calls(command("echo 1 > a"), cell("open('b', 'w')")), Response("done"))
    asks = await project(http, directory)
    reply = await person.patch(f"{API}/projects/{asks}", json={"ask_commands": True})
    assert reply.json()["ask_commands"] is True
    async with aclosing(following(http, body("never", project_id=asks))) as events:
        async for event in events:
            if event.get("approval_required"):
                await decide(person, event["tool_call_id"], False)
    said = await messages(http, "never")
    assert all("It was not made." in result for result in results(said))
    assert [message["error"]["code"] for message in said[2:4]] == ["denied", "denied"]
    assert list(directory.iterdir()) == []
    setting = {"changes": "allow"}  # is about changes, and no permission to run
    await person.put(f"{API}/conversations/never/commands", json=setting)
    at.model.add(runs("true"), Response("ok"))
    async with aclosing(following(http, body("never"))) as events:
        start = await until(events, "tool_start")
        assert start["approval_required"] is True
        await person.post(f"{API}/chat/never/abort")
        rest = await the_rest(events)
    assert one(rest, "tool_end")["result"].endswith("the run was aborted. It was not made.")
