"""POST /chat and what is around it: followed again, one at a time, within bounds and scopes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import (
    Desk,
    at,
    body,
    calls,
    desk,
    following,
    messages,
    replayed,
    say,
    the_rest,
)
from live_app import live
from model_server import Asked, BrokenOff, Refused
from places import short_directory
from sessions_calls import API, code_of, ensure, put, url

from sbx.agent.messages import Response

__all__ = ["at"]
SESSION = "sb-session-ann-helper"
HANGS = BrokenOff(Response("thinking about it for long"), after=3, then="hang")


@pytest_asyncio.fixture
async def client(at: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client
    at.model.forget()


async def answered(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the first event once the model answers: the next answer of the script is then for
    another request."""
    first = await anext(events)
    async for event in events:
        if event["type"] == "text_delta":
            return first
    raise AssertionError("the run ended before the model answered")


async def token(client: httpx.AsyncClient, **bounds: Any) -> str:
    asked = {"user_id": "ann", "ttl_s": 600, **bounds}
    reply = await client.post("/v1/admin/tokens", json=asked)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["token"])


# -- followed again --------------------------------------------------------------------------------


async def test_a_run_that_has_ended_is_told_again_from_where_one_was(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(calls(("list_files", {})), Response("done"))
    events = await say(client, "again", message="look")
    assert await replayed(client, "again") == events
    assert await replayed(client, "again", 3) == events[3:]
    assert await replayed(client, "again", run_id=events[0]["run_id"]) == events
    reply = await client.get(f"{API}/chat/again/events", params={"run_id": "chat-other"})
    assert code_of(reply) == (404, "no_chat")
    same = body("again", message="look")
    assert [event async for event in following(client, same, after=2)] == events[2:]
    other = body("again", message="something else")
    reply = await client.post(f"{API}/chat", json=other, headers={"last-event-id": "2"})
    assert code_of(reply) == (409, "another_run")
    malformed = {"last-event-id": "-1"}
    reply = await client.post(f"{API}/chat", json=same, headers=malformed)
    assert code_of(reply) == (400, "invalid_event_id")
    reply = await client.get(f"{API}/chat/again/events", headers=malformed)
    assert code_of(reply) == (400, "invalid_event_id")
    assert len(at.model.requests) == 2  # nobody was asked again


async def test_who_was_cut_off_gets_what_was_missed_and_then_what_comes(
    at: Desk, client: httpx.AsyncClient
) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits(_: Asked) -> Response:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
        return Response("and that was all")

    at.model.add(calls(("list_files", {})), waits)
    seen = []
    async with aclosing(following(client, body("cut"))) as events:
        async for event in events:
            seen.append(event)
            if event["type"] == "step_end":
                break
    missed = asyncio.create_task(replayed(client, "cut", after=1))
    gate.set()
    rest = await missed
    assert rest[: len(seen) - 1] == seen[1:]
    assert rest[-1]["content"] == "and that was all"


async def test_a_second_message_is_refused_while_the_agent_works(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(HANGS)
    async with aclosing(following(client, body("busy"))) as events:
        first = await answered(events)
        reply = await client.post(f"{API}/chat", json=body("busy", message="and?"))
        assert code_of(reply) == (409, "run_in_progress")
        assert reply.json()["error"]["details"]["run_id"] == first["run_id"]
        at.model.add(Response("elsewhere"))
        assert (await say(client, "free"))[-1]["content"] == "elsewhere"
        assert (await client.post(f"{API}/chat/busy/abort")).json() == {"aborted": True}
        end = (await the_rest(events))[-1]
    assert (end["type"], end["reason"]) == ("run_end", "aborted")
    at.model.add(Response("welcome back"))
    assert (await say(client, "busy"))[-1]["content"] == "welcome back"


@pytest.mark.parametrize("what", ["conversation", "session"])
async def test_deleting_ends_what_the_agent_does_there(
    at: Desk, client: httpx.AsyncClient, what: str
) -> None:
    at.model.add(HANGS)
    async with aclosing(following(client, body("gone"))) as events:
        await answered(events)
        path = "" if what == "session" else "/conversations/gone"
        assert (await client.delete(url(SESSION, path))).status_code == 204
        assert (await the_rest(events))[-1]["reason"] == "aborted"
    assert code_of(await client.get(f"{API}/conversations/gone/messages"))[0] == 404
    assert code_of(await client.get(f"{API}/chat/gone/events"))[0] == 404


# -- what is asked ---------------------------------------------------------------------------------


async def test_requests_that_make_no_sense_are_refused_and_make_nothing(
    at: Desk, client: httpx.AsyncClient
) -> None:
    async def refused(**more: Any) -> tuple[int, str]:
        asked = {"user_id": "new", "agent_id": "new", "message": "unheard", **more}
        return code_of(await client.post(f"{API}/chat", json=asked))

    assert await refused(sandbox_session_id="sb-session-other") == (400, "validation_error")
    assert await refused(project_id="project-none") == (404, "not_found")
    assert await refused(message="") == (422, "validation_error")
    assert await refused(max_steps=0) == (422, "validation_error")
    assert await refused(conversation_id="a/b\n") == (400, "validation_error")
    assert (await client.get(url("sb-session-new-new"))).status_code == 404
    assert not any("unheard" in asked.text for asked in at.model.requests)


async def test_users_of_one_owner_have_their_own_conversation_ids(
    at: Desk, client: httpx.AsyncClient
) -> None:
    """The first user of an id once kept the others out of it, who learned that it is in use."""
    texts = {"bob": "hello bob", "ann": "hello ann"}
    bearers = {}
    for user, text in texts.items():
        bearers[user] = {"authorization": f"Bearer {await token(client, user_id=user)}"}
        async with at.served.client() as theirs:
            theirs.headers.update(bearers[user])
            at.model.add(Response(text))
            assert (await say(theirs, "mine", user_id=user))[-1]["content"] == text
            assert [one["content"] for one in await messages(theirs, "mine")][1:] == [text]
            assert (await replayed(theirs, "mine"))[-1]["content"] == text
    for path in ("conversations/mine/messages", "conversations/mine/export", "chat/mine/events"):
        assert code_of(await client.get(f"{API}/{path}")) == (409, "conversation_ambiguous")
        chosen = {"user_id": "bob"}
        reply = await client.get(f"{API}/{path}", params=chosen)
        assert reply.status_code == 200
        assert texts["bob"] in reply.text
        assert texts["ann"] not in reply.text
        other = await client.get(f"{API}/{path}", params=chosen, headers=bearers["ann"])
        assert other.status_code == 404


async def test_agents_of_two_users_work_in_one_conversation_id_at_once(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(HANGS)
    async with aclosing(following(client, body("both"))) as events:
        await answered(events)
        at.model.add(Response("hello bob"))
        assert (await say(client, "both", user_id="bob"))[-1]["content"] == "hello bob"
        chosen = {"user_id": "ann"}
        reply = await client.post(f"{API}/chat/both/abort", params=chosen)
        assert reply.json() == {"aborted": True}
        await the_rest(events)


async def test_a_conversation_without_a_name_gets_one_and_another_model_may_be_named(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(Response("hello"))
    asked = {"user_id": "ann", "agent_id": "helper", "message": "hi", "model": "larger"}
    events = [event async for event in following(client, asked)]
    assert (events[0]["model"], at.model.requests[-1].body["model"]) == ("larger", "larger")
    assert len(await messages(client, events[0]["conversation_id"])) == 2


async def test_an_error_of_the_provider_ends_the_run_and_not_the_conversation(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(Refused(400, "no such model"))
    end = (await say(client, "failing"))[-1]
    assert (end["reason"], end["error"]["code"]) == ("error", "model_bad_request")
    (run,) = (await client.get(f"{API}/conversations/failing/runs")).json()["items"]
    assert (run["reason"], run["error"]["code"]) == ("error", "model_bad_request")
    at.model.add(Response("now it goes"))
    assert (await say(client, "failing"))[-1]["content"] == "now it goes"


async def test_without_a_model_a_chat_says_what_is_missing_and_all_else_works() -> None:
    with short_directory() as directory:
        async with live(directory) as served, served.client() as client:
            reply = await client.post(f"{API}/chat", json=body("c1"))
            assert code_of(reply) == (503, "model_not_configured")
            assert "MODEL_NAME" in reply.text
            assert (await client.get(f"{API}/sessions/{SESSION}")).status_code == 404
            assert len((await client.get(f"{API}/tools")).json()["items"]) == 6
            assert (await client.get(f"{API}/approvals")).json()["items"] == []
            session = (await ensure(client, "ann", "helper")).json()["session_id"]
            answer = await invoke(client, "write_file", {"path": "a", "content": "b"}, session)
            assert (answer.status_code, answer.json()["is_error"]) == (200, False)


# -- who may ---------------------------------------------------------------------------------------


async def test_nothing_of_it_is_there_for_another_owner(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(HANGS)
    async with aclosing(following(client, body("secret"))) as events:
        await answered(events)
        async with at.served.client(await at.served.key_of("eve")) as eve:
            tried = [
                await eve.get(f"{API}/chat/secret/events"),
                await eve.post(f"{API}/chat/secret/abort"),
                await eve.get(f"{API}/conversations/secret/messages"),
                await eve.get(f"{API}/conversations/secret/runs"),
                await eve.get(f"{API}/conversations/secret/export"),
                await eve.post(f"{API}/conversations/secret/import", json={}),
            ]
            assert {code_of(reply) for reply in tried} == {(404, "not_found")}
        await client.post(f"{API}/chat/secret/abort")
        await the_rest(events)


async def test_a_token_reaches_its_own_conversation_only(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(Response("hello"), Response("hello to you"))
    await say(client, "theirs")
    bound = await token(client, agent_id="helper", conversation_id="own")
    async with at.served.client(bound) as bearer:
        named = [event async for event in following(bearer, body("own"))]
        assert named[-1]["content"] == "hello to you"
        for asked in (body("theirs"), {**body("own"), "agent_id": "other"}):
            assert code_of(await bearer.post(f"{API}/chat", json=asked))[0] == 404
        for path in ("chat/theirs/events", "conversations/theirs/messages"):
            assert code_of(await bearer.get(f"{API}/{path}"))[0] == 404
        assert code_of(await bearer.post(f"{API}/chat/theirs/abort"))[0] == 404
        assert len(await messages(bearer, "own")) == 2
        assert (await bearer.get(f"{API}/projects")).json()["items"] == []
        made = {"name": "p", "working_directory": str(at.projects)}
        assert code_of(await bearer.post(f"{API}/projects", json=made)) == (403, "forbidden")


@pytest.mark.parametrize(
    ("scope", "may"),
    [
        ("files:read", {"read_file", "list_files"}),
        ("files:write", {"write_file", "edit_file"}),
        ("execute", {"run_code", "execute_command"}),
    ],
)
async def test_tools_are_called_within_the_scopes_of_a_token(
    at: Desk, client: httpx.AsyncClient, scope: str, may: set[str]
) -> None:
    await ensure(client, "ann", "helper")
    await invoke(client, "write_file", {"path": "seen.txt", "content": "seen"})
    arguments: dict[str, dict[str, Any]] = {
        "read_file": {"path": "seen.txt"},
        "list_files": {},
        "write_file": {"path": "new.txt", "content": "new"},
        "edit_file": {"path": "seen.txt", "old_string": "seen", "new_string": "seen"},
        "run_code": {"code": "1 + 1"},
        "execute_command": {"command": "true"},
    }
    async with at.served.client(await token(client, scopes=[scope])) as bearer:
        for name, given in arguments.items():
            reply = await invoke(bearer, name, given)
            assert (reply.status_code == 200) is (name in may), reply.text
            if name not in may:
                assert code_of(reply) == (403, "forbidden")


async def test_an_agent_may_do_no_more_than_the_token_that_asks_it(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(calls(("read_file", {"path": "x"}), ("run_code", {"code": "2"})), Response("ok"))
    async with at.served.client(await token(client, scopes=["execute"])) as bearer:
        events = [event async for event in following(bearer, body("scoped"))]
        denied, ran = (event for event in events if event["type"] == "tool_end")
        assert (denied["is_error"], ran["is_error"]) == (True, False)
        assert "not allowed" in denied["result"]
    async with at.served.client(await token(client, scopes=["files:read"])) as bearer:
        assert code_of(await bearer.post(f"{API}/chat", json=body("scoped")))[0] == 404
        assert code_of(await bearer.get(f"{API}/approvals")) == (403, "forbidden")


# -- tools, histories ------------------------------------------------------------------------------


async def invoke(
    client: httpx.AsyncClient, name: str, arguments: dict[str, Any], session: str = SESSION
) -> httpx.Response:
    asked = {"sandbox_session_id": session, "conversation_id": "tools", "arguments": arguments}
    return await client.post(f"{API}/tools/{name}/invoke", json=asked)


async def test_a_tool_is_called_by_a_program(at: Desk, client: httpx.AsyncClient) -> None:
    await ensure(client, "ann", "helper")
    answer = (await invoke(client, "run_code", {"code": "x = 6; x * 7"})).json()
    assert "42" in answer["result"]
    answer = (await invoke(client, "run_code", {"code": "1 / 0"})).json()
    assert answer["is_error"]
    assert "ZeroDivisionError" in answer["result"]
    assert code_of(await invoke(client, "rm_rf", {})) == (404, "tool_not_found")
    refused = await invoke(client, "run_code", {"cod": "1"})
    assert code_of(refused) == (400, "invalid_arguments")
    assert "code" in refused.json()["error"]["message"]
    assert code_of(await invoke(client, "run_code", {"code": "1"}, "sb-session-no-one"))[0] == 404
    assert await messages(client, "tools") == []  # it is no part of what is said

    asked = {"sandbox_session_id": SESSION, "conversation_id": "tools",
             "arguments": {"command": "echo live"}}  # fmt: skip
    headers = {"accept": "text/event-stream"}
    path = f"{API}/tools/execute_command/invoke"
    async with client.stream("POST", path, json=asked, headers=headers) as reply:
        text = (await reply.aread()).decode()
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line[:6] == "event:"]
    assert (kinds[0], kinds[-1], {*kinds[1:-1]}) == ("tool_start", "tool_end", {"tool_output"})


async def test_what_was_said_is_exported_and_begins_another_conversation(
    at: Desk, client: httpx.AsyncClient
) -> None:
    at.model.add(calls(("list_files", {})), Response("nothing there"), Response("hi"))
    await say(client, "from", message="look around")
    answer = await client.get(f"{API}/conversations/from/export")
    path = f"{API}/conversations/to/import"
    assert code_of(await client.post(path, content=answer.content))[0] == 404
    whose = {"user_id": "ann", "agent_id": "helper"}
    reply = await client.post(path, content=answer.content, params=whose)
    assert reply.json() == {"messages": 4}
    assert code_of(await client.post(path, content=answer.content)) == (409, "history_not_empty")
    assert code_of(await client.post(path, content=b"{}")) == (400, "invalid_history")
    await say(client, "to", message="and?")
    assert "look around" in at.model.requests[-1].text


async def test_imports_at_once_into_one_conversation_store_one_history(
    client: httpx.AsyncClient,
) -> None:
    """Each of them found the history empty, and appended to it."""
    said = [{"role": "user", "content": f"number {number}"} for number in range(500)]
    content = json.dumps({"format": 1, "messages": said}).encode()
    whose = {"user_id": "ann", "agent_id": "helper"}
    path = f"{API}/conversations/copies/import"
    replies = await asyncio.gather(
        *(client.post(path, content=content, params=whose) for _ in range(8))
    )
    assert sorted(reply.status_code for reply in replies) == [200] + [409] * 7
    copied = await client.get(f"{API}/conversations/copies/export")
    assert len(copied.json()["messages"]) == 500


async def test_messages_come_in_pages(at: Desk, client: httpx.AsyncClient) -> None:
    at.model.add(calls(("list_files", {})), Response("done"))
    await say(client, "pages")
    path, seen, cursor = f"{API}/conversations/pages/messages", [], None
    while True:
        params = {"limit": 3} if cursor is None else {"limit": 3, "cursor": cursor}
        page = (await client.get(path, params=params)).json()
        seen += [message["seq"] for message in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [1, 2, 3, 4]
    assert code_of(await client.get(path, params={"cursor": "²"}))[0] == 400


async def test_a_session_that_cannot_be_created_or_started_is_an_error_with_its_cause() -> None:
    message = {"user_id": "ann", "agent_id": "helper", "message": "hello"}
    with short_directory() as directory:
        settings: dict[str, Any] = {"cgroups": False, "sessions_policy": "strict"}
        async with desk(directory, **settings) as at, at.served.client() as client:
            reply = await client.post(f"{API}/chat", json=message)
            assert code_of(reply) == (500, "session_create_failed")
            details = reply.json()["error"]["details"]
            assert details == {"session_id": SESSION, "cause": "cannot_enforce"}
    with short_directory() as directory:
        settings = {"start_timeout": 0.001, "fast_path": False}
        async with desk(directory, **settings) as at, at.served.client() as client:
            await ensure(client, "ann", "helper")
            await put(client, SESSION, "a.csv", b"x")
            await client.post(url(SESSION, "/stop"))
            reply = await client.post(f"{API}/chat", json=message)
            assert code_of(reply) == (503, "session_not_ready")
            assert reply.json()["error"]["details"]["cause"] == "start_timeout"
