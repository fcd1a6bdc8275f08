"""What the page of the console reads and follows: conversations, runs of agents, one stream."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import pytest_asyncio
from agent_calls import PERSON, body, calls, project, runs
from console_service import Console, console_service
from model_server import KEY, ModelServer, model_server
from places import short_directory
from pydantic import SecretStr
from sessions_calls import API, until
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed

from sbx.agent.messages import Response
from sbx.agent.settings import AgentSettings
from sbx.api import sse
from sbx.api.console import stream as console_stream
from sbx.api.console.topics import Follow
from sbx.protocol.events import text_from_json
from tests.fake_clock import FakeClock

CONVERSATIONS = f"{API}/conversations"


@dataclass(frozen=True)
class Desk:
    console: Console
    model: ModelServer
    projects: Path


@pytest_asyncio.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    with short_directory() as directory, model_server() as model:
        projects = directory / "projects"
        projects.mkdir()
        agent = AgentSettings(
            base_url=model.openai_url, api_key=SecretStr(KEY), model_name="scripted"
        )
        service = console_service(directory, agent=agent, project_dirs=(projects,))
        async with service as console:
            yield Desk(console, model, projects)


@pytest_asyncio.fixture
async def client(desk: Desk) -> AsyncIterator[httpx.AsyncClient]:
    async with desk.console.served.client() as client:
        yield client
    desk.model.forget()


class Stream:
    """A client of the stream, as the page is one."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def next(self) -> dict[str, Any]:
        """The next message that is not a beat."""
        async with asyncio.timeout(30):
            while True:
                message: dict[str, Any] = json.loads(await self.socket.recv())
                if message.get("type") != "beat":
                    return message

    async def follow(self, topic_id: str, topic: str, **more: Any) -> None:
        await self.socket.send(json.dumps({"do": "follow", "id": topic_id, "topic": topic, **more}))

    async def event(self, kind: str) -> dict[str, Any]:
        """The next event of this type."""
        while (message := await self.next()).get("event", {}).get("type") != kind:
            pass
        return dict(message["event"])


@asynccontextmanager
async def stream(console: Console, cookie: str | None = None) -> AsyncIterator[Stream]:
    """The stream of a logged-in page, after its hello."""
    cookie = cookie or await console.login()
    socket = connect(
        f"ws://{console.host}/api/v1/events",
        additional_headers={"Cookie": f"sbx_console={cookie}"},
        origin=console.origin,  # type: ignore[arg-type]  # a NewType of str
        proxy=None,
        host="127.0.0.1",  # the name needs no resolver
        port=console.port,
    )
    async with socket as opened:
        hello = json.loads(await opened.recv())
        assert hello["type"] == "hello"
        assert hello["instance_id"] == console.served.service.instance_id
        yield Stream(opened)


# -- conversations -----------------------------------------------------------------------------


async def begun(client: httpx.AsyncClient, name: str, message: str = "hi", **more: Any) -> str:
    """Begin a detached run; its id."""
    reply = await client.post(f"{API}/chat", json=body(name, message, detach=True, **more))
    assert reply.status_code == 202, reply.text
    started = reply.json()
    assert started["conversation_id"] == name
    assert started["session_id"] == "sb-session-ann-helper"
    assert started["sandbox_id"].startswith("sandbox-")
    return str(started["run_id"])


async def over(client: httpx.AsyncClient, name: str, run_id: str) -> None:
    """Wait for the end of a run."""

    async def is_over() -> bool:
        reply = await client.get(f"{CONVERSATIONS}/{name}/runs/{run_id}")
        return bool(reply.json()["status"] == "ended")

    await until(is_over)


async def test_a_detached_run_is_followed_from_its_start(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    desk.model.add(Response("hello there"), Response("again"))
    async with stream(desk.console) as page:
        run_id = await begun(client, "detached", "hi  there\n friend")
        await page.follow("1", "chat", conversation_id="detached", run_id=run_id)
        events = []
        while (message := await page.next()).get("type") != "end":
            events.append(message)
        assert [message["seq"] for message in events] == list(range(1, len(events) + 1))
        start, end = events[0]["event"], events[-1]["event"]
        assert (start["type"], start["after_seq"]) == ("run_start", 0)
        assert start["session_id"] == "sb-session-ann-helper"
        assert start["sandbox_id"].startswith("sandbox-")
        assert (end["type"], end["content"]) == ("run_end", "hello there")
        again = await begun(client, "detached", "more")
        await page.follow("2", "chat", conversation_id="detached", run_id=again, after=1)
        assert (await page.next())["seq"] > 1
        await over(client, "detached", again)
        await page.follow("3", "chat", conversation_id="detached")
        assert (await page.event("run_start"))["after_seq"] == 2
    (item,) = (await client.get(CONVERSATIONS, params={"q": "FRIEND"})).json()["items"]
    assert (item["title"], item["run"], item["pending"]) == ("hi there friend", None, 0)


async def test_conversations_are_listed_the_last_used_first_in_pages(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    names = [f"page-{number}" for number in range(5)]
    desk.model.add(*(Response("ok") for _ in names))
    for name in names:
        run_id = await begun(client, name, f"the title of {name}")
        await over(client, name, run_id)
    found: list[str] = []
    params: dict[str, Any] = {"limit": 2, "q": "title of page-"}
    while True:
        page = (await client.get(CONVERSATIONS, params=params)).json()
        found += [item["conversation_id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert found == names[::-1]
    bad = await client.get(CONVERSATIONS, params={"cursor": "x"})
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "validation_error")


async def test_a_title_can_be_changed_and_stays(desk: Desk, client: httpx.AsyncClient) -> None:
    desk.model.add(Response("ok"), Response("ok"))
    await over(client, "titled", await begun(client, "titled", "first"))
    url = f"{CONVERSATIONS}/titled"
    assert (await client.get(url)).json()["title"] == "first"
    assert (await client.patch(url, json={"title": "  Mine  "})).json()["title"] == "Mine"
    await over(client, "titled", await begun(client, "titled", "second"))
    assert (await client.get(url)).json()["title"] == "Mine"
    assert (await client.patch(url, json={"title": " "})).status_code == 422
    assert (await client.get(f"{CONVERSATIONS}/none")).status_code == 404


async def test_a_conversation_is_deleted_with_its_run_and_its_files(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    desk.model.add(calls(("run_code", {"code": "open('f', 'w').close()\nwhile True: pass"})))
    run_id = await begun(client, "gone")

    async def is_called() -> bool:
        reply = await client.get(f"{CONVERSATIONS}/gone/runs/{run_id}")
        return bool(reply.json()["pending_calls"])

    await until(is_called)
    assert (await client.get(f"{CONVERSATIONS}/gone")).json()["run"]["run_id"] == run_id
    async with stream(desk.console) as page:
        await page.follow("1", "owner")
        assert (await client.delete(f"{CONVERSATIONS}/gone")).status_code == 204
        ended = await page.event("chat.ended")
        assert (ended["conversation_id"], ended["reason"]) == ("gone", "aborted")
        assert (await page.event("conversation.deleted"))["conversation_id"] == "gone"
    assert (await client.get(f"{CONVERSATIONS}/gone")).status_code == 404
    assert (await client.delete(f"{CONVERSATIONS}/gone")).status_code == 404
    sessions = f"{API}/sessions/sb-session-ann-helper/conversations"
    names = [each["conversation_id"] for each in (await client.get(sessions)).json()["items"]]
    assert "gone" not in names


async def test_another_owner_sees_and_deletes_nothing(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    desk.model.add(Response("ok"))
    await over(client, "mine", await begun(client, "mine"))
    served = desk.console.served
    async with served.client(await served.key_of("other")) as other:
        assert (await other.get(CONVERSATIONS)).json()["items"] == []
        assert (await other.get(f"{CONVERSATIONS}/mine")).status_code == 404
        assert (await other.patch(f"{CONVERSATIONS}/mine", json={"title": "x"})).status_code == 404
        assert (await other.delete(f"{CONVERSATIONS}/mine")).status_code == 404
    assert (await client.get(f"{CONVERSATIONS}/mine")).status_code == 200


async def test_a_token_has_the_conversations_of_its_bounds(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    desk.model.add(Response("ok"), Response("ok"))
    await over(client, "bound-1", await begun(client, "bound-1"))
    await over(client, "bound-2", await begun(client, "bound-2"))
    bounds = {"user_id": "ann", "agent_id": "helper", "conversation_id": "bound-1"}
    reads = {**bounds, "scopes": ["files:read"]}
    made = (await client.post("/v1/admin/tokens", json=reads)).json()
    async with desk.console.served.client(made["token"]) as token:
        items = (await token.get(CONVERSATIONS)).json()["items"]
        assert [item["conversation_id"] for item in items] == ["bound-1"]
        url = f"{CONVERSATIONS}/bound-1"
        assert (await token.patch(url, json={"title": "x"})).status_code == 404
        assert (await token.delete(url)).status_code == 404
        assert (await token.get(CONVERSATIONS, params={"user_id": "ben"})).json()["items"] == []
    assert (await client.get(f"{CONVERSATIONS}/bound-1")).status_code == 200


async def test_the_outputs_of_code_reach_people_with_their_files(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    code = (
        "from IPython.display import HTML, Image, display\n"
        "display(HTML('<b>bold</b>'))\n"
        "import base64\n"
        "gif = base64.b64decode('R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs=')\n"
        "display(Image(gif, format='gif'))\n"
        "'x' * 300_000"
    )
    desk.model.add(calls(("run_code", {"code": code})), Response("shown"))
    run_id = await begun(client, "outputs")
    await over(client, "outputs", run_id)
    messages = (await client.get(f"{CONVERSATIONS}/outputs/messages")).json()["items"]
    (tool,) = [message for message in messages if message["role"] == "tool"]
    html, gif, truncated = tool["outputs"]
    assert html["text/html"] == "<b>bold</b>"
    figure = gif["image/gif"]
    assert (figure["media_type"], figure["size"]) == ("image/gif", 29)
    assert truncated == {"truncated": True}
    box = "/v1/sandboxes/sb-session-ann-helper/conversations/outputs/files"
    content = await client.get(box, params={"path": figure["path"]})
    assert content.content.startswith(b"GIF89a"), content.text


async def test_a_failed_call_names_its_error(desk: Desk, client: httpx.AsyncClient) -> None:
    desk.model.add(calls(("read_file", {"path": "none.txt"})), Response("no such file"))
    await over(client, "failing", await begun(client, "failing"))
    messages = (await client.get(f"{CONVERSATIONS}/failing/messages")).json()["items"]
    (tool,) = [message for message in messages if message["role"] == "tool"]
    assert (tool["is_error"], tool["error"]["code"]) == (True, "file_not_found")
    assert desk.model.requests[-1].messages[-1].keys() <= {"role", "content", "tool_call_id"}


# -- approvals ----------------------------------------------------------------------------------


async def test_an_approval_is_announced_and_its_decision_too(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    directory = desk.projects / "announced"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, PERSON, PERSON)
    desk.model.add(runs("echo done > made.txt"), Response("done"))
    async with stream(desk.console) as page:
        await page.follow("1", "owner")
        run_id = await begun(client, "asks", project_id=await project(client, directory))
        notice = await page.event("approval.pending")
        assert notice.keys() == {"type", "tool_call_id", "conversation_id"}
        url = f"{API}/approvals/{notice['tool_call_id']}"
        waiting = (await client.get(url)).json()
        assert waiting["tool_args"] == {"command": "echo done > made.txt"}
        (change,) = waiting["dry_run"]["changes"]
        assert change["kind"] == "added"
        assert waiting["decision"] is None
        item = (await client.get(f"{CONVERSATIONS}/asks")).json()
        assert (item["run"], item["pending"]) == ({"run_id": run_id, "waiting": True}, 1)
        assert (await client.post(url, json={"approved": True})).status_code == 200
        decided = await page.event("approval.decided")
        assert (decided["approved"], decided["conversation_id"]) == (True, "asks")
        assert (await page.event("chat.ended"))["reason"] == "done"
    after = (await client.get(url)).json()
    assert (after["decision"]["approved"], after["decision"]["by"]) == (True, decided["by"])
    again = await client.post(url, json={"approved": False})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_decided")
    assert again.json()["error"]["details"]["approved"] is True
    assert (await client.get(f"{API}/approvals/none")).status_code == 404


# -- templates ----------------------------------------------------------------------------------


async def test_templates_of_an_owner_are_made_changed_and_deleted(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    url = f"{API}/templates"
    built_in = (await client.get(url)).json()["items"]
    assert len([item for item in built_in if item["built_in"]]) == 5
    for item in built_in:
        for variable in item["variables"]:
            assert f"{{{{{variable['name']}}}}}" in item["prompt"]
    new = {"name": "Mine", "prompt": "Do {{it}}", "variables": [{"name": "it", "label": "It"}]}
    made = (await client.post(url, json=new)).json()
    assert (made["name"], made["built_in"]) == ("Mine", False)
    one = f"{url}/{made['id']}"
    changed = (await client.patch(one, json={"name": "Yours", "max_steps": 3})).json()
    assert (changed["name"], changed["prompt"], changed["max_steps"]) == ("Yours", "Do {{it}}", 3)
    served = desk.console.served
    async with served.client(await served.key_of("other")) as other:
        assert (await other.get(one)).status_code == 404
        assert (await other.patch(one, json={"name": "x"})).status_code == 404
        assert (await other.delete(one)).status_code == 204
    assert (await client.get(one)).json()["name"] == "Yours"
    assert (await client.delete(one)).status_code == 204
    assert (await client.get(one)).status_code == 404
    theirs = f"{url}/{built_in[0]['id']}"
    for reply in (await client.patch(theirs, json={"name": "x"}), await client.delete(theirs)):
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "built_in")
    missing = {**new, "project_id": "project-none"}
    assert (await client.post(url, json=missing)).status_code == 404


# -- the stream -----------------------------------------------------------------------------------


async def test_a_run_of_code_is_followed(desk: Desk, client: httpx.AsyncClient) -> None:
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    async with stream(desk.console) as page:
        await page.follow("o", "owner")
        url = f"/v1/sandboxes/{box}/conversations/default/runs"
        run = (await client.post(url, json={"code": "print('hi'); 6 * 7"})).json()
        started = await page.event("sandbox")
        assert (started["sandbox_id"], started["kind"]) == (box, "started")
        await page.follow("1", "run", sandbox_id=box, run_id=run["run_id"])
        kinds = []
        while (message := await page.next()).get("type") != "end":
            if message["id"] == "1":
                kinds.append(message["event"]["type"])
        assert kinds[-1] == "run_end"
        assert "stdout" in kinds
        await page.follow("2", "run", sandbox_id=box, run_id="run-none")
        failure = await page.next()
        assert (failure["type"], failure["error"]["code"]) == ("failure", "not_found")
        await page.follow("3", "usage", sandbox_ids=[box], interval_s=0.2)
        usage = (await page.event("usage"))["items"][box]
        assert usage["memory"] > 0
        await page.socket.send(json.dumps({"do": "drop", "id": "3"}))
        await page.follow("4", "files", sandbox_id=box)
        assert (await page.event("started"))["path"] == "/workspace"
        await client.post(url, json={"code": "open('made', 'w').close()"})
        assert (await page.event("created"))["path"] == "/workspace/made"
        assert (await client.delete(f"/v1/sandboxes/{box}")).status_code == 204
        while (await page.event("sandbox"))["kind"] != "deleted":
            pass


async def test_an_open_stream_keeps_no_sandbox_alive(tmp_path: Path) -> None:
    """A console that stays open over night, with every topic of a sandbox followed."""
    clock = FakeClock()
    async with (
        console_service(tmp_path, clock=clock, idle_timeout=100) as console,
        console.served.client() as client,
        stream(console) as page,
    ):
        box = (await client.post("/v1/sandboxes", json={"ttl": 50_000})).json()["id"]
        url = f"/v1/sandboxes/{box}/conversations/default/runs"
        run = (await client.post(url, json={"code": "1"})).json()
        await page.follow("1", "owner")
        await page.follow("2", "usage", sandbox_ids=[box], interval_s=0.2)
        await page.follow("3", "run", sandbox_id=box, run_id=run["run_id"])
        await page.follow("4", "files", sandbox_id=box)
        assert (await page.event("usage"))["items"][box]["memory"] > 0
        clock.advance(101)
        await console.served.service.reaper.round()
        while (await page.event("sandbox"))["kind"] != "stopped":
            pass
        state = (await client.get(f"/v1/sandboxes/{box}", params={"detail": "true"})).json()
        assert (state["kernels"], state["usage"]) == (0, None)
        assert (await page.event("usage"))["items"] == {}


async def test_no_message_of_a_long_output_is_long(desk: Desk, client: httpx.AsyncClient) -> None:
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    url = f"/v1/sandboxes/{box}/conversations/default/runs"
    # This character is escaped in JSON, and no escape may be cut.
    code = "print('\\ufdd0 and a line\\n' * 200_000)"
    run = (await client.post(url, json={"code": code})).json()
    text, longest, end = "", 0, None
    async with stream(desk.console) as page:
        await page.follow("1", "run", sandbox_id=box, run_id=run["run_id"])
        while end is None:
            message = await page.next()
            longest = max(longest, len(json.dumps(message, ensure_ascii=False)))
            if message["event"]["type"] == "stdout":
                text += text_from_json(message["event"]["text"])
            elif message["event"]["type"] == "run_end":
                end = message["event"]["run"]
    assert text == "\ufdd0 and a line\n" * 200_000 + "\n"
    assert longest < 300_000
    assert end["stdout"].endswith(" and a line\n\n")
    await client.delete(f"/v1/sandboxes/{box}")


async def test_notices_of_another_owner_do_not_come(desk: Desk, client: httpx.AsyncClient) -> None:
    served = desk.console.served
    async with served.client(await served.key_of("else")) as other:
        cookie = await desk.console.login(other)
        async with stream(desk.console, cookie) as page:
            await page.follow("1", "owner")
            await page.follow("2", "usage", sandbox_ids=["none"], interval_s=0.2)
            assert (await page.event("usage"))["items"] == {}
            await page.socket.send(json.dumps({"do": "drop", "id": "2"}))
            mine = (await client.post("/v1/sandboxes", json={})).json()["id"]
            theirs = (await other.post("/v1/sandboxes", json={})).json()["id"]
            event = await page.event("sandbox")
            assert (event["sandbox_id"], event["kind"]) == (theirs, "created")
            assert mine != theirs


@pytest.mark.parametrize(
    "message",
    ["", "[]", "{}", b"{}", '{"do": "follow"}', '{"do": "follow", "id": "1", "topic": "x"}'],
)
async def test_a_message_that_is_not_known_ends_the_stream(
    desk: Desk, message: str | bytes
) -> None:
    async with stream(desk.console) as page:
        await page.socket.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            await page.next()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "not_a_message")


async def test_one_connection_follows_so_many_topics(desk: Desk) -> None:
    async with stream(desk.console) as page:
        for number in range(65):
            await page.follow(str(number), "owner")
        failure = await page.next()
        assert (failure["id"], failure["error"]["code"]) == ("64", "too_many_topics")
        await page.follow("0", "owner")  # in place of one that it has
        await page.socket.send(json.dumps({"do": "drop", "id": "1"}))
        await page.follow("64", "usage", interval_s=0.2)
        assert (await page.next())["id"] == "64"


async def test_a_logout_ends_the_stream(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_stream, "_CHECK_S", 0.1)
    cookie = await desk.console.login()
    async with stream(desk.console, cookie) as page:
        await desk.console.call("POST", "/api/v1/console/logout", cookie, {})
        with pytest.raises(ConnectionClosed) as closed:
            await page.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401


async def test_a_program_follows_notices_as_server_sent_events(
    desk: Desk, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FIRST_S", 0.1)
    accepts = {"accept": "text/event-stream"}
    async with client.stream("GET", f"{API}/events", headers=accepts) as reply:
        assert reply.status_code == 200
        box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["type"] == "sandbox":
                assert json.loads(line[6:])["sandbox_id"] == box
                break


# -- topics and tokens -----------------------------------------------------------------------------

SEES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    # bounds and scopes; the notices of the topic `owner`; the other topics with content
    "all": ({}, {"approval", "chat", "conversation", "uploads"}, {"chat", "run", "usage", "files"}),
    "no scopes": ({"scopes": []}, set(), set()),
    "reads": ({"scopes": ["files:read"]}, {"chat", "conversation", "uploads"}, {"files"}),
    "writes": ({"scopes": ["files:write"]}, set(), set()),
    "executes": (
        {"scopes": ["execute"]},
        {"approval", "chat", "conversation"},
        {"chat", "run", "usage"},
    ),
    "another conversation": ({"conversation_id": "another"}, set(), set()),
    "another agent": ({"agent_id": "another"}, set(), set()),
    "another user": ({"user_id": "bea"}, set(), set()),
}


async def test_a_token_gets_no_topic_beyond_its_scopes_and_bounds(
    desk: Desk, client: httpx.AsyncClient
) -> None:
    """A token without any scope got each approval with its arguments and the diffs of the user's
    files, and a token of one conversation the usage of the others."""
    topics = {get_args(kind.model_fields["topic"].annotation)[0] for kind in get_args(Follow)}
    assert topics == {"owner", *SEES["all"][2]}
    directory = desk.projects / "topics"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, PERSON, PERSON)
    asks = await project(client, directory)
    desk.model.add(Response("done"))
    run_id = await begun(client, "topical")
    await over(client, "topical", run_id)
    sandbox = (await client.get(f"{CONVERSATIONS}/topical")).json()["sandbox_id"]
    place = f"/v1/sandboxes/{sandbox}/conversations/topical"
    run = (await client.post(f"{place}/runs", json={"code": "1"})).json()
    fields: dict[str, dict[str, Any]] = {
        "owner": {},
        "chat": {"conversation_id": "topical"},
        "run": {"sandbox_id": sandbox, "run_id": run["run_id"]},
        "usage": {"sandbox_ids": [sandbox], "interval_s": 0.2},
        "files": {"sandbox_id": sandbox, "conversation": "topical"},
    }
    async with AsyncExitStack() as stack:
        pages: dict[str, tuple[Stream, list[dict[str, Any]]]] = {}
        for name, (bounds, _, _) in SEES.items():
            new = {"user_id": "ann", "ttl_s": 600, **bounds}
            token = (await client.post("/v1/admin/tokens", json=new)).json()["token"]
            opening = unix_connect(
                str(desk.console.served.socket),
                f"ws://sbx{API}/events",
                additional_headers={"authorization": f"Bearer {token}"},
            )
            page = Stream(await stack.enter_async_context(opening))
            messages: list[dict[str, Any]] = []
            pages[name] = page, messages
            for topic in topics:
                await page.follow(topic, topic, **fields[topic])
            await page.follow("last", "run", sandbox_id="none", run_id="none")
            while not messages or messages[-1].get("id") != "last":
                messages.append(await page.next())
        desk.model.add(Response("CREDITCARD-4111"))
        await over(client, "topical", await begun(client, "topical"))
        await client.put(f"{place}/files", params={"path": "a.txt"}, content=b"a")
        reply = await client.put(f"{place}/uploads/CREDITCARD-4111.txt", content=b"a")
        assert reply.status_code == 200, reply.text
        desk.model.add(runs("touch CREDITCARD-4111"))
        started = body("topical-asks", detach=True, project_id=asks)
        await client.post(f"{API}/chat", json=started)
        await until(partial(_waits, client))
        # The last notice is of a sandbox, which each token sees.
        for ids in ({"user_id": "ann", "agent_id": "another"}, {"user_id": "bea", "agent_id": "x"}):
            assert (await client.post(f"{API}/sessions", json=ids)).status_code == 201
        for page, messages in pages.values():
            while messages[-1].get("event", {}).get("kind") != "created":
                messages.append(await page.next())
    for name, (_, notices, others) in SEES.items():
        events = [each for each in pages[name][1] if "event" in each]
        kinds = {each["event"]["type"] for each in events if each["id"] == "owner"}
        assert {kind.partition(".")[0] for kind in kinds} == notices | {"sandbox"}, name
        assert {
            each["id"] for each in events if each["id"] != "owner" and each["event"].get("items", 1)
        } == others, name
        assert "CREDITCARD" not in str(events), name


async def _waits(client: httpx.AsyncClient) -> bool:
    items = (await client.get(f"{API}/approvals")).json()["items"]
    return any(each["conversation_id"] == "topical-asks" for each in items)
