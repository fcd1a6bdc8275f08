"""A person's yes or no to an agent's command, given by a second client."""

import asyncio
import os
import subprocess
import sys
from asyncio import to_thread
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
    asked_for,
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
    runs,
    say,
    the_rest,
)
from live_app import live
from model_server import Asked
from places import short_directory
from sessions_calls import API, code_of, until, url

from sbx.agent.messages import Response
from sbx.api.agent_v1 import agents_of
from sbx.service.ids import session_id

__all__ = ["at"]
WRITES = "echo done > made.txt && echo said"


@pytest_asyncio.fixture
async def asker(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client
    at.model.forget()  # what a test that failed did not use


@pytest_asyncio.fixture
async def person(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    """Another client of the same owner."""
    async with at.served.client() as client:
        yield client


def response_to(asked: Asked) -> Response:
    """Ends with the result that the model was told."""
    return Response(f"I was told: {asked.messages[-1]['content']}")


async def test_a_yes_makes_the_very_changes_of_the_dry_run(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("yes")
    at.model.add(runs(WRITES), response_to)
    asked = body("yes", project_id=await project(asker, directory))
    async with aclosing(following(asker, asked)) as events:
        start = await asked_for(events)
        (change,) = start["dry_run"]["changes"]
        assert (change["path"], change["kind"]) == ("/workspace/made.txt", "added")
        assert (start["dry_run"]["exit_code"], start["dry_run"]["output"]) == (0, "said\n")
        assert not (directory / "made.txt").exists()

        (waiting,) = await pending(person)
        assert waiting["tool_call_id"] == start["tool_call_id"]
        assert waiting["tool_args"] == {"command": WRITES}
        assert waiting["remember_as"] == start["remember_as"] == ["exact", "prefix"]
        assert waiting["expires_at"] == start["expires_at"] == waiting["created_at"] + 600
        status = f"{API}/conversations/yes/runs/{start['run_id']}"
        active = (await person.get(status)).json()
        assert (active["status"], active["step"], active["usage"]) == ("running", 1, {})
        (call,) = active["pending_calls"]
        assert (call["tool_call_id"], call["approval_required"], call["expires_at"]) == (
            *(start["tool_call_id"], True),
            start["expires_at"],
        )
        reply = await decide(person, start["tool_call_id"], True)
        assert reply.status_code == 200
        rest = await the_rest(events)
    assert kinds(rest) == ["tool_approval", "tool_end", "step_end", "step_end", "run_end"]
    approval = one(rest, "tool_approval")
    assert (approval["approved"], approval["remembered"]) == (True, None)
    assert approval["by"] == reply.json()["by"] == waiting_owner(at)
    assert (directory / "made.txt").read_text() == "done\n"
    assert "said" in rest[-1]["content"]
    assert await pending(person) == []
    over = (await person.get(status)).json()
    assert (over["status"], over["step"], over["pending_calls"]) == ("ended", None, [])
    assert over["usage"] == rest[-1]["usage"]
    assert code_of(await person.get(f"{API}/conversations/yes/runs/chat-0")) == (404, "not_found")


async def test_abort_denies_what_waits_and_ends_the_run(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("abort")
    at.model.add(runs(WRITES))
    asked = body("abort", project_id=await project(asker, directory))
    async with aclosing(following(asker, asked)) as events:
        call = (await asked_for(events))["tool_call_id"]
        reply = await person.post(f"{API}/chat/abort/abort")
        assert (reply.status_code, reply.json()) == (200, {"aborted": True})
        rest = await the_rest(events)
    assert one(rest, "tool_approval")["by"] == "abort"
    assert rest[-1]["reason"] == "aborted"
    assert code_of(await decide(person, call, True)) == (409, "already_decided")
    assert (await person.post(f"{API}/chat/abort/abort")).json() == {"aborted": False}
    assert list(directory.iterdir()) == []
    said = await messages(asker, "abort")
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]


async def test_check_reports_no_quarantine_that_was_dropped_with_its_copy(
    at: Desk, asker: httpx.AsyncClient
) -> None:
    """Its output named an item and how to restore it, and no item was there."""
    directory = at.directory("check")
    at.model.add(Response("done"))
    check = "echo x > .envrc; mkdir .husky; echo checked"
    asked = body("check", project_id=await project(asker, directory), completion_check=check)
    events = await the_rest(following(asker, asked))
    assert events[-1]["reason"] == "done"
    assert "checked" in one(events, "tool_end")["result"]
    assert "quarantine" not in str(events)
    assert list(directory.iterdir()) == []


async def test_a_session_that_is_stopped_aborts_its_agents(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    at.model.add(runs(WRITES), calls(("run_code", {"code": "while True: pass"})))
    waits = body("waits", project_id=await project(asker, at.directory("stop")))
    async with (
        aclosing(following(asker, waits)) as waiting,
        aclosing(following(asker, body("works"))) as working,
    ):
        await asked_for(waiting)
        while (await anext(working))["type"] != "tool_start":
            pass
        reply = await person.post(url(session_id("ann", "helper"), "/stop"))
        assert (reply.status_code, reply.json()["status"]) == (200, "stopped")
        denied, given_up = await the_rest(waiting), await the_rest(working)
    assert one(denied, "tool_approval")["by"] == "abort"
    assert (denied[-1]["reason"], given_up[-1]["reason"]) == ("aborted", "aborted")
    assert await pending(person) == []
    at.model.add(Response("here again"))
    assert (await say(asker, "works"))[-1]["content"] == "here again"


async def test_a_token_approves_a_call_of_a_project_and_makes_no_rule(
    at: Desk, asker: httpx.AsyncClient
) -> None:
    """A token for one conversation wrote a rule for the whole project, which outlived the token."""
    owner = (await at.served.service.access.from_bearer(await at.served.key_of("ann"))).owner
    bounds = {"user_id": "ann", "agent_id": "helper", "conversation_id": "bounded"}
    made, text = await at.served.service.access.make_token(owner, **bounds, ttl_s=60)
    at.model.add(runs("touch one"), Response("ok"))
    async with (
        at.served.client(await at.served.key_of("ann")) as ann,
        at.served.client(text) as token,
    ):
        asked = body("bounded", project_id=await project(ann, at.directory("bounded")))
        async with aclosing(following(ann, asked)) as events:
            call = (await asked_for(events))["tool_call_id"]
            refused = await decide(token, call, True, remember="prefix", prefix="touch")
            assert code_of(refused) == (403, "rule_not_permitted")
            assert (await decide(token, call, True)).json()["by"] == f"{owner} {made.id}"
            assert one(await the_rest(events), "tool_approval")["remembered"] is None
        assert (await ann.get(f"{API}/approvals/rules")).json()["items"] == []


async def test_what_is_always_allowed_is_listed_and_can_be_revoked(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    at.model.add(runs("touch one"), Response("ok"))
    asked = body("always", project_id=await project(asker, at.directory("always")))
    async with aclosing(following(asker, asked)) as events:
        call = (await asked_for(events))["tool_call_id"]
        assert (await decide(person, call, True, remember="prefix")).status_code == 422
        refused = await decide(person, call, True, remember="prefix", prefix="touch; id")
        assert code_of(refused) == (400, "invalid_prefix")
        reply = await decide(person, call, True, remember="prefix", prefix="touch")
        assert reply.json()["remembered"] == "prefix"
        assert one(await the_rest(events), "tool_approval")["remembered"] == "prefix"

    at.model.add(runs("touch two"), Response("ok"))
    start = one(await say(asker, "always"), "tool_start")
    assert not start["approval_required"]

    (rule,) = (await person.get(f"{API}/approvals/rules")).json()["items"]
    assert (rule["kind"], rule["text"]) == ("prefix", "touch")
    assert (await person.delete(f"{API}/approvals/rules/{rule['id']}")).status_code == 204
    assert code_of(await person.delete(f"{API}/approvals/rules/{rule['id']}"))[0] == 404

    at.model.add(runs("touch three"), Response("ok"))
    async with aclosing(following(asker, body("always"))) as events:
        call = (await asked_for(events))["tool_call_id"]
        assert (await decide(person, call, False)).status_code == 200
        await the_rest(events)


async def test_once_its_commands_are_allowed_a_conversation_asks_no_more(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    starts = ("run_code", {"code": "import subprocess; subprocess.run(['true']).returncode"})
    at.model.add(calls(starts), Response("no"), calls(starts), runs("echo a > b"), Response("yes"))
    directory = at.directory("allowed")
    asked = body("allowed", project_id=await project(asker, directory))
    before = await the_rest(following(asker, asked))
    assert one(before, "tool_end")["is_error"]  # Python is no way round the question
    path = f"{API}/conversations/allowed/commands"
    assert (await person.put(path, json={"allowed": True})).json()["allowed"] is True
    after = await say(asker, "allowed")
    assert [event["is_error"] for event in after if event["type"] == "tool_end"] == [False, False]
    assert (directory / "b").read_text() == "a\n"
    assert (await person.put(path, json={"allowed": False})).json()["allowed"] is False
    at.model.add(calls(starts), Response("no"))
    assert one(await say(asker, "allowed"), "tool_end")["is_error"]
    at.model.add(Response("hello"))
    await say(asker, "free")
    refused = await person.put(f"{API}/conversations/free/commands", json={"allowed": True})
    assert code_of(refused) == (409, "no_project")


async def test_a_cell_is_asked_about_by_its_changes_and_keeps_its_variables(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("cell")
    cell = ("run_code", {"code": "x = 5; open('made.txt', 'w').write('made\\n')"})
    again = ("run_code", {"code": "print('x is', x); open('made.txt', 'w').write('made\\n');"})
    at.model.add(calls(cell), calls(again), runs("ls"), Response("done"))
    asked = body("cell", project_id=await project(asker, directory))
    async with aclosing(following(asker, asked)) as events:
        start = await asked_for(events)
        (change,) = start["dry_run"]["changes"]
        assert (change["path"], change["diff"]) == (
            "/workspace/made.txt",
            "@@ -0,0 +1,1 @@\n+made",
        )
        (waiting,) = await pending(person)
        assert waiting["dry_run"] == start["dry_run"]
        assert waiting["remember_as"] == start.get("remember_as", []) == []
        assert (await decide(person, start["tool_call_id"], False)).status_code == 200
        second = await asked_for(events)
        assert second["dry_run"]["output"].startswith("x is 5\n")
        assert list(directory.iterdir()) == []
        assert (await decide(person, second["tool_call_id"], True)).status_code == 200
        rest = await the_rest(events)
    assert (directory / "made.txt").read_text() == "made\n"
    ls = [event for event in rest if event["type"] == "tool_start"]
    assert [event["approval_required"] for event in ls] == [None]
    assert "tool_pending" not in kinds(rest)
    assert "variables are kept" in (await messages(asker, "cell"))[2]["content"]


async def test_which_changes_are_asked_about_is_a_setting_of_the_conversation(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("setting")
    path = f"{API}/conversations/setting/commands"
    at.model.add(Response("hello"))
    await say(asker, "setting", project_id=await project(asker, directory))
    usual = {"allowed": False, "changes": "ask", "ask_outside": [], "budgets": []}
    assert (await person.get(path)).json() == usual

    reply = await person.put(path, json={"ask_outside": ["tests/", "/workspace/docs"]})
    assert reply.json() == {**usual, "ask_outside": ["tests", "docs"]}
    at.model.add(calls(("write_file", {"path": "tests/a", "content": "a"})), Response("ok"))
    assert "tool_pending" not in kinds(await say(asker, "setting"))
    assert (directory / "tests/a").read_text() == "a"
    at.model.add(runs("mv tests/a a"), Response("ok"))
    async with aclosing(following(asker, body("setting"))) as events:
        call = (await asked_for(events))["tool_call_id"]
        assert (await decide(person, call, False)).status_code == 200
        await the_rest(events)

    reply = await person.put(path, json={"changes": "allow"})
    assert reply.json() == {**usual, "changes": "allow", "ask_outside": ["tests", "docs"]}
    at.model.add(runs("mv tests/a a"), Response("ok"))
    assert "tool_pending" not in kinds(await say(asker, "setting"))
    assert (directory / "a").read_text() == "a"

    for wrong in ({"ask_outside": ["../x"]}, {"ask_outside": ["/etc"]}, {"ask_outside": ["."]}):
        assert code_of(await person.put(path, json=wrong)) == (400, "invalid_prefix")
    malformed: tuple[dict[str, Any], ...] = (
        {},
        {"changes": "some"},
        {"ask_outside": ["x"] * 51},
        {"budgets": [{"below": "x", "files": 0}]},
    )
    for body_ in malformed:
        assert (await person.put(path, json=body_)).status_code == 422
    assert (await person.get(path)).json()["changes"] == "allow"
    assert (await person.get(f"{API}/conversations/none/commands")).status_code == 404


async def test_a_budget_commits_small_changes_without_a_question(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("budget")
    (directory / "tests").mkdir()
    if os.geteuid() == 0:
        os.chown(directory / "tests", PERSON, PERSON)
    path = f"{API}/conversations/budget/commands"
    at.model.add(Response("hello"))
    await say(asker, "budget", project_id=await project(asker, directory))
    budgets = [{"below": "tests/", "files": 2, "deletions": False}]
    reply = await person.put(path, json={"budgets": budgets})
    assert reply.json()["budgets"] == [{**budgets[0], "below": "tests"}]

    at.model.add(runs("touch tests/a tests/b"), Response("ok"))
    assert "tool_pending" not in kinds(await say(asker, "budget"))
    assert sorted(each.name for each in (directory / "tests").iterdir()) == ["a", "b"]
    for beyond in ("touch tests/c tests/d tests/e", "rm tests/a", "touch tests/c outside"):
        at.model.add(runs(beyond), Response("ok"))
        async with aclosing(following(asker, body("budget"))) as events:
            call = (await asked_for(events))["tool_call_id"]
            assert (await decide(person, call, False)).status_code == 200
            await the_rest(events)
    assert sorted(each.name for each in (directory / "tests").iterdir()) == ["a", "b"]
    twice = [budgets[0], {"below": "./tests", "files": 1}]
    assert code_of(await person.put(path, json={"budgets": twice})) == (400, "invalid_prefix")
    assert (await person.put(path, json={"budgets": []})).json()["budgets"] == []


async def test_a_workspace_that_changed_meanwhile_gets_a_dry_run_by_another_call(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("changed")
    more = runs("echo more >> notes.txt")
    at.model.add(more, more, Response("noted"))
    (directory / "notes.txt").write_text("one\n")
    asked = body("changed", project_id=await project(asker, directory))
    async with aclosing(following(asker, asked)) as events:
        call = (await asked_for(events))["tool_call_id"]
        (directory / "notes.txt").write_text("one\ntwo\n")
        assert (await decide(person, call, True)).status_code == 200
        again = await asked_for(events)
        assert code_of(await decide(person, call, True)) == (409, "already_decided")
        assert " two\n+more" in again["dry_run"]["changes"][0]["diff"]
        assert (await decide(person, again["tool_call_id"], True)).status_code == 200
        await the_rest(events)
    assert (directory / "notes.txt").read_text() == "one\ntwo\nmore\n"


async def test_a_program_that_calls_a_tool_is_asked_for_as_a_model_is(
    at: Desk, asker: httpx.AsyncClient, person: httpx.AsyncClient
) -> None:
    directory = at.directory("program")
    at.model.add(Response("hello"))
    await say(asker, "program", project_id=await project(asker, directory))
    call = {
        "sandbox_session_id": "sb-session-ann-helper",
        "conversation_id": "program",
        "arguments": {"command": WRITES},
    }
    invoking = asyncio.create_task(asker.post(f"{API}/tools/execute_command/invoke", json=call))
    await until(lambda: _some(person))
    (waiting,) = await pending(person)
    assert (await decide(person, waiting["tool_call_id"], True)).status_code == 200
    response_to = (await invoking).json()
    assert (response_to["tool_call_id"], response_to["is_error"]) == (
        waiting["tool_call_id"],
        False,
    )
    assert (directory / "made.txt").read_text() == "done\n"


async def _some(client: httpx.AsyncClient) -> bool:
    return bool(await pending(client))


async def test_a_service_that_ends_denies_what_waits_and_says_so_in_the_history() -> None:
    with short_directory() as top:
        async with desk(top, runs(WRITES)) as at, at.served.client() as client:
            asked = body("ends", project_id=await project(client, at.directory("ends")))
            events = following(client, asked)
            await asked_for(events)
            ending = asyncio.create_task(agents_of(at.served.app).close())
            rest = await the_rest(events)
            await ending
            assert one(rest, "tool_approval")["by"] == "restart"
            assert rest[-1]["reason"] == "aborted"
            refused = await client.post(f"{API}/chat", json=body("ends"))
            assert code_of(refused) == (503, "shutting_down")
        async with live(top) as served, served.client() as client:
            assert "restarted" in (await messages(client, "ends"))[-1]["content"]


@pytest.mark.full_tier
async def test_a_service_that_was_killed_denies_at_its_next_start() -> None:
    with short_directory() as top:
        call = await to_thread(killed_while_one_waits, top)
        async with desk(top, response_to) as at, at.served.client() as client:
            assert await pending(client) == []
            assert code_of(await decide(client, call, True)) == (409, "already_decided")
            result = (await messages(client, "killed"))[-1]
            assert (result["role"], result["tool_call_id"]) == ("tool", call)
            assert "restarted" in result["content"]
            assert "It was tried on a copy" in result["content"]
            assert result["error"]["code"] == "denied"
            (run,) = (await client.get(f"{API}/conversations/killed/runs")).json()["items"]
            assert (run["status"], run["reason"]) == ("interrupted", None)
            followed = await client.get(f"{API}/chat/killed/events", headers={"last-event-id": "2"})
            assert code_of(followed) == (404, "run_interrupted")
            going_on = {**body("killed"), "resume": True}
            del going_on["message"]
            resumed = await the_rest(following(client, going_on))
            assert "restarted" in resumed[-1]["content"]


WAITING = f"""
import asyncio, sys
from contextlib import aclosing
from pathlib import Path
from agent_calls import asked_for, body, desk, following, project, runs

async def main(top):
    async with desk(top, runs({WRITES!r})) as at, at.served.client() as client:
        asked = body("killed", project_id=await project(client, at.directory("killed")))
        async with aclosing(following(client, asked)) as events:
            print((await asked_for(events))["tool_call_id"], flush=True)
            await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def killed_while_one_waits(top: Path) -> str:
    """The id of the call, once SIGKILL has ended the service that asked about it."""
    here = Path(__file__).parent
    ours = os.pathsep.join(map(str, (here.parents[1], here)))
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(top)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ours},
    ) as process:
        assert process.stdout is not None
        call = process.stdout.readline().strip()
        process.kill()
    assert call
    return call


def waiting_owner(at: Desk) -> str:
    return at.served.service.access.from_peer(0).owner


# -- the check of a task ---------------------------------------------------------------------------


async def test_a_check_in_a_project_changes_no_file_of_the_user(
    at: Desk, asker: httpx.AsyncClient
) -> None:
    """`completion_check` wrote into the user's directory, without an approval or a trial, and a
    token that does not see the project could choose it."""
    directory = at.directory("checked")
    (directory / "a.txt").write_text("a")
    at.model.add(Response("It is done."))
    project_id = await project(asker, directory)
    check = "touch pwned.txt; cat a.txt"
    events = await say(asker, "checked", project_id=project_id, completion_check=check)
    assert one(events, "tool_end")["result"].startswith("[stdout]\na\n")
    assert one(events, "run_end")["reason"] == "done"
    assert [path.name for path in directory.iterdir()] == ["a.txt"]

    bounds = {"user_id": "ann", "conversation_id": "checked", "scopes": ["execute"], "ttl_s": 600}
    token = (await asker.post("/v1/admin/tokens", json=bounds)).json()["token"]
    asked = body("checked", completion_check="touch token.txt")
    bearer = {"authorization": f"Bearer {token}"}
    reply = await asker.post(f"{API}/chat", json=asked, headers=bearer)
    assert code_of(reply) == (403, "forbidden")
    assert [path.name for path in directory.iterdir()] == ["a.txt"]
