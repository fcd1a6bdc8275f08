"""External tools: MCP servers, HTTP endpoints, OpenAPI documents and Python functions, as a model
and a program call them, with what their sources permit, and what they do wrong."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from agent_calls import ANN, Desk, body, calls, decide, desk, following, kinds, say
from model_server import Asked
from places import short_directory
from sessions_calls import API
from tool_servers import HttpServer, mcp_file, mcp_over_http

from sbx.agent.messages import Response
from sbx.client import Client
from sbx.errors import BadRequest, Conflict, Denied, NotFound, Unavailable

SECRET = "s3cr3t-of-the-tools-71"
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with short_directory() as directory:
        (directory / "tools").mkdir()
        (directory / "agents").mkdir()
        yield directory


@pytest_asyncio.fixture(scope="module")
async def at(place: Path) -> AsyncIterator[Desk]:
    os.environ["SECRET_OF_TESTS"] = SECRET
    try:
        async with desk(place, tools_dir=place / "tools", agents_dir=place / "agents") as at:
            yield at
    finally:
        del os.environ["SECRET_OF_TESTS"]


@pytest.fixture
def tools(place: Path) -> Iterator[Path]:
    """The directory of the sources, which is empty at the end of each test."""
    directory = place / "tools"
    yield directory
    for file in [*directory.iterdir(), *(place / "agents").iterdir()]:
        file.unlink()


@pytest_asyncio.fixture
async def http(at: Desk, tools: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with at.served.client() as client:
        yield client
    at.model.forget()


@pytest_asyncio.fixture
async def client(at: Desk, tools: Path) -> AsyncIterator[Client]:
    async with Client(at.served.socket) as client:
        yield client


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer().serving() as serving:
        yield serving


async def invoke(
    http: httpx.AsyncClient, name: str, arguments: dict[str, Any], **ids: str
) -> dict[str, Any]:
    """The result of one call by a program."""
    ensured = await http.post(f"{API}/sessions", json={**ANN, **ids})
    assert ensured.is_success, ensured.text
    call = {
        "sandbox_session_id": ensured.json()["session_id"],
        "conversation_id": "calls",
        "arguments": arguments,
    }
    reply = await http.post(f"{API}/tools/{name}/invoke", json=call)
    return {"status": reply.status_code, **reply.json()}


async def offered(at: Desk, http: httpx.AsyncClient, conversation: str, **more: Any) -> list[str]:
    """The names of the tools that the model gets."""
    names: list[str] = []

    def answer(request: Asked) -> Response:
        names.extend(tool["function"]["name"] for tool in request.body["tools"])
        return Response("done")

    at.model.add(answer)
    await say(http, conversation, **more)
    return names


async def states(client: Client) -> dict[str, tuple[str, list[str]]]:
    return {each["name"]: (each["state"], each["tools"]) for each in await client.tool_sources()}


async def until_ready(client: Client, name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await states(client))[name][0] != "ready":  # noqa: ASYNC110  # it is in a service
            await asyncio.sleep(0.05)


# -- kinds of sources -----------------------------------------------------------------------------


async def test_a_model_calls_an_mcp_server(
    at: Desk, http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    (tools / "sums.toml").write_text(mcp_file(place))
    await until_ready(client, "sums")
    assert "sums_add" in await offered(at, http, "mcp-names")
    results: list[str] = []

    def after(request: Asked) -> Response:
        results.append(request.messages[-1]["content"])
        return Response("42 it is")

    at.model.add(calls(("sums_add", {"a": 40, "b": 2})), after)
    events = await say(http, "mcp-call")
    assert results == ["42"]
    (start,) = (event for event in events if event["type"] == "tool_start")
    assert (start["tool_name"], start["approval_required"]) == ("sums_add", False)
    wrong = await invoke(http, "sums_add", {"a": "x", "b": 2})
    assert (wrong["status"], wrong["error"]["code"]) == (400, "invalid_arguments")
    (listed,) = [each for each in await client.tools("mcp") if each["name"] == "sums_add"]
    assert listed["description"] == "Add two numbers."
    assert set(listed["inputSchema"]["properties"]) == {"a", "b"}


async def test_an_mcp_server_does_not_start_in_the_working_directory(
    http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    """`npx NAME`, `uvx NAME` and `python -m NAME` of the operator took the program from the
    workspace in which `sbx agent` or the service was started."""
    (tools / "placed.toml").write_text(mcp_file(place))
    await until_ready(client, "placed")
    assert (await invoke(http, "placed_where", {}))["result"] == "/"


async def test_an_mcp_server_over_http_gets_the_headers(
    http: httpx.AsyncClient, client: Client, tools: Path
) -> None:
    async with mcp_over_http() as (url, tokens):
        (tools / "remote.toml").write_text(f"""
approval = "allow"
[secrets]
key = "env:SECRET_OF_TESTS"
[mcp]
url = "{url}"
headers = {{ Authorization = "Bearer ${{key}}" }}
tools = ["echo", "wide"]
""")
        await until_ready(client, "remote")
        assert (await states(client))["remote"][1] == ["remote_echo", "remote_wide"]
        assert (await invoke(http, "remote_echo", {"text": "hello"}))["result"] == "hello"
        assert set(tokens) == {f"Bearer {SECRET}"}
        wide = await invoke(http, "remote_wide", {"megabytes": 20})
        assert wide["is_error"]
        assert len(wide["result"]) < 2000
        await until_ready(client, "remote")
        assert (await invoke(http, "remote_echo", {"text": "again"}))["result"] == "again"
    gone = await invoke(http, "remote_echo", {"text": "hello"})
    assert gone["is_error"]


async def test_an_endpoint_gets_path_query_body_and_the_secret(
    http: httpx.AsyncClient, tools: Path, server: HttpServer
) -> None:
    (tools / "weather.toml").write_text(f"""
approval = "allow"
description = "The weather in a city"
[secrets]
token = "env:SECRET_OF_TESTS"
[http]
url = "{server.url}/cities/{{city}}/now"
headers = {{ Authorization = "Bearer ${{token}}" }}
[http.parameters]
type = "object"
required = ["city"]
[http.parameters.properties]
city = {{ type = "string" }}
unit = {{ type = "string" }}
""")
    (tools / "notes.toml").write_text(f"""
approval = "allow"
[http]
method = "POST"
url = "{server.url}/notes"
[http.parameters]
type = "object"
[http.parameters.properties]
text = {{ type = "string" }}
""")
    result = await invoke(http, "weather", {"city": "São Paulo/../x?y", "unit": "C"})
    assert not result["is_error"]
    (got,) = server.requests
    assert got["path"] == "/cities/S%C3%A3o%20Paulo%2F..%2Fx%3Fy/now"
    assert got["query"] == {"unit": ["C"]}
    assert got["token"] == f"Bearer {SECRET}"
    assert SECRET not in result["result"]  # the server has sent it back
    assert "Bearer [secret token]" in result["result"]
    assert not (await invoke(http, "notes", {"text": "buy milk"}))["is_error"]
    assert json.loads(server.requests[1]["body"]) == {"text": "buy milk"}
    for city in ("..", ".", ""):
        refused = await invoke(http, "weather", {"city": city})
        assert refused["is_error"]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/big", "longer than"),
        ("/moved", "HTTP 302"),
        ("/broken", "HTTP 500"),
        ("/binary", "not text"),
    ],
)
async def test_an_answer_that_cannot_be_used_is_an_error(
    http: httpx.AsyncClient, tools: Path, server: HttpServer, path: str, text: str
) -> None:
    (tools / "page.toml").write_text(f'approval = "allow"\n[http]\nurl = "{server.url}{path}"')
    result = await invoke(http, "page", {})
    assert result["is_error"]
    assert text in result["result"]
    assert len(result["result"]) < 2000
    assert len(server.requests) == 1  # a redirect is not followed


async def test_a_server_that_does_not_listen_is_an_error(
    http: httpx.AsyncClient, tools: Path
) -> None:
    (tools / "gone.toml").write_text('approval = "allow"\n[http]\nurl = "http://127.0.0.1:9/"')
    result = await invoke(http, "gone", {})
    assert result["is_error"]
    assert "tool_unavailable" in result["result"]


async def test_operations_of_an_openapi_document(
    http: httpx.AsyncClient, client: Client, tools: Path, server: HttpServer
) -> None:
    note = {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Note"}}}
    document = {
        "openapi": "3.1.0",
        "servers": [{"url": server.url}],
        "components": {
            "schemas": {"Note": note},
            "parameters": {
                "Id": {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}
            },
        },
        "paths": {
            "/notes/{id}": {
                "parameters": [{"$ref": "#/components/parameters/Id"}],
                "get": {
                    "operationId": "read",
                    "summary": "Read a note",
                    "parameters": [
                        {"name": "x-trace", "in": "header", "schema": {"type": "string"}},
                        {"name": "tag", "in": "query", "schema": {"type": "array"}},
                        {"name": "Authorization", "in": "header", "schema": {"type": "string"}},
                    ],
                },
                "put": {
                    "operationId": "write.note",
                    "requestBody": {
                        "required": True,
                        "content": {
                            "application/json": {"schema": {"$ref": "#/components/schemas/Note"}}
                        },
                    },
                },
            },
            "/form": {"post": {"requestBody": {"content": {"multipart/form-data": {}}}}},
        },
    }
    (tools / "notes.json").write_text(json.dumps(document))
    text = 'approval = "allow"\n[openapi]\ndocument = "notes.json"\n'
    (tools / "notes.toml").write_text(text)
    definitions = {each["name"]: each for each in await client.tools("mcp")}
    assert {"notes_read", "notes_write_note"} <= definitions.keys()
    assert set(definitions["notes_read"]["inputSchema"]["properties"]) == {"id", "x-trace", "tag"}
    written = definitions["notes_write_note"]["inputSchema"]
    assert written["$defs"]["Note"]["properties"]["next"] == {"$ref": "#/$defs/Note"}
    arguments = {"id": 7, "x-trace": "abc", "tag": ["a", "b"]}
    assert not (await invoke(http, "notes_read", arguments))["is_error"]
    got = server.requests[0]
    assert (got["method"], got["path"], got["trace"]) == ("GET", "/notes/7", "abc")
    assert got["query"] == {"tag": ["a", "b"]}
    arguments = {"id": 7, "body": {"next": {"next": {}}}}
    assert not (await invoke(http, "notes_write_note", arguments))["is_error"]
    assert json.loads(server.requests[1]["body"]) == {"next": {"next": {}}}
    wrong = await invoke(http, "notes_write_note", {"id": 7, "body": {"next": 3}})
    assert wrong["error"]["code"] == "invalid_arguments"
    (tools / "notes.toml").write_text(f'{text}operations = ["erase"]')
    (source,) = await client.tool_sources()
    assert "no operation erase" in source["problem"]


async def test_a_python_function_and_a_sequence_of_tools(
    http: httpx.AsyncClient, client: Client, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "tools_of_tests.py").write_text("""
from sbx.agent import tool

def double(number: int) -> int:
    "Double a number."
    if number == 13:
        raise ValueError("thirteen")
    return 2 * number

@tool(name="triple")
def other(number: int) -> int:
    "Multiply by three."
    return 3 * number

BOTH = [double, other]
""")
    monkeypatch.syspath_prepend(str(tools))
    for name, attribute in (("twice", "double"), ("many", "BOTH"), ("none", "missing")):
        text = f'approval = "allow"\n[python]\nfunction = "tools_of_tests:{attribute}"'
        (tools / f"{name}.toml").write_text(text)
    try:
        assert (await invoke(http, "twice", {"number": 4}))["result"] == "8"
        failed = await invoke(http, "twice", {"number": 13})
        assert failed["is_error"]
        assert "ValueError: thirteen" in failed["result"]
        assert (await invoke(http, "many_double", {"number": 4}))["result"] == "8"
        assert (await invoke(http, "many_triple", {"number": 4}))["result"] == "12"
        assert (await states(client))["none"] == ("failed", [])
    finally:
        sys.modules.pop("tools_of_tests", None)
        await asyncio.to_thread(shutil.rmtree, tools / "__pycache__", ignore_errors=True)


# -- what a source permits ------------------------------------------------------------------------


async def test_users_agents_and_profiles_select(
    at: Desk, http: httpx.AsyncClient, client: Client, tools: Path, place: Path, server: HttpServer
) -> None:
    def source(name: str, fields: str) -> None:
        (tools / f"{name}.toml").write_text(f'{fields}\n[http]\nurl = "{server.url}"')

    source("everyone", 'approval = "allow"')
    source("anns", 'approval = "allow"\nusers = ["ann"]')
    source("tables_only", 'approval = "allow"\nagents = ["tables"]')
    (place / "agents" / "narrow.toml").write_text('external = ["anns"]')
    (place / "agents" / "closed.toml").write_text("external = []")

    async def external(conversation: str, **ids: str) -> set[str]:
        names = await offered(at, http, conversation, **ids)
        return {"everyone", "anns", "tables_only"} & set(names)

    assert await external("one") == {"everyone", "anns"}
    assert await external("two", user_id="bob") == {"everyone"}
    assert await external("three", agent_id="tables") == {"everyone", "anns", "tables_only"}
    assert await external("four", agent_id="narrow") == {"anns"}
    assert await external("five", agent_id="closed") == set()
    refused = await invoke(http, "anns", {}, user_id="bob")
    assert (refused["status"], refused["error"]["code"]) == (404, "tool_not_found")
    assert not (await invoke(http, "anns", {}))["is_error"]


async def test_a_token_needs_the_scope_and_sees_its_tools_only(
    http: httpx.AsyncClient, at: Desk, tools: Path, server: HttpServer
) -> None:
    for name, fields in (("mine", 'users = ["ann"]'), ("other", 'users = ["bob"]')):
        text = f'approval = "allow"\n{fields}\n[http]\nurl = "{server.url}"'
        (tools / f"{name}.toml").write_text(text)
    bounds = {"user_id": "ann", "agent_id": "helper", "scopes": ["files:read"]}
    token = (await http.post("/v1/admin/tokens", json=bounds)).json()["token"]
    async with at.served.client() as narrow:
        narrow.headers["authorization"] = f"Bearer {token}"
        items = (await narrow.get(f"{API}/tools", params={"format": "mcp"})).json()["items"]
        names = {each["name"] for each in items}
        assert "mine" in names
        assert "other" not in names
        assert (await narrow.get(f"{API}/tools/sources")).status_code == 403
        source = {"name": "x", "source": {"http": {"url": server.url}}}
        assert (await narrow.post(f"{API}/tools", json=source)).status_code == 403
        assert (await narrow.delete(f"{API}/tools/mine")).status_code == 403
        ensured = await http.post(f"{API}/sessions", json=ANN)
        ids = {"sandbox_session_id": ensured.json()["session_id"], "conversation_id": "calls"}
        refused = await narrow.post(f"{API}/tools/mine/invoke", json={**ids, "arguments": {}})
        assert refused.status_code == 403
        assert refused.json()["error"]["details"] == {"scope": "execute"}
    assert not server.requests


async def test_a_person_approves_a_call_unless_the_operator_allows_it(
    at: Desk, http: httpx.AsyncClient, tools: Path, server: HttpServer
) -> None:
    (tools / "asks.toml").write_text(f'[http]\nurl = "{server.url}"')
    (tools / "never.toml").write_text(f'approval = "deny"\n[http]\nurl = "{server.url}"')
    at.model.add(calls(("asks", {}), ("never", {})), Response("done"))
    events = []
    async for event in following(http, body("approved")):
        events.append(event)
        if event["type"] == "tool_start" and event["approval_required"]:
            assert not server.requests
            await decide(http, event["tool_call_id"], approved=True)
    assert len(server.requests) == 1
    ends = {event["tool_call_id"]: event["is_error"] for event in events if "is_error" in event}
    assert sorted(ends.values()) == [False, True]
    assert "tool_approval" in kinds(events)


async def test_calls_of_an_owner_in_a_minute_are_limited(
    at: Desk, http: httpx.AsyncClient, tools: Path, server: HttpServer
) -> None:
    """Each invented user had a quota of its own."""
    text = f'approval = "allow"\ncalls_per_minute = 2\n[http]\nurl = "{server.url}"'
    (tools / "rare.toml").write_text(text)
    results = [await invoke(http, "rare", {}) for _ in range(3)]
    assert [result["is_error"] for result in results] == [False, False, True]
    assert "too_many_tool_calls" in results[2]["result"]
    assert (await invoke(http, "rare", {}, user_id="invented"))["is_error"]
    async with at.served.client(await at.served.key_of("paul")) as paul:
        assert not (await invoke(paul, "rare", {}))["is_error"]
    assert len(server.requests) == 3


async def test_another_owner_cannot_name_its_user_as_one_who_may(
    at: Desk, http: httpx.AsyncClient, tools: Path, server: HttpServer
) -> None:
    """`users` was the only bound, and each key names its users as it likes: the secret of the
    operator was used for another owner."""
    text = f'approval = "allow"\nowners = ["olga"]\nusers = ["ann"]\n[http]\nurl = "{server.url}"'
    (tools / "olgas.toml").write_text(text)
    for owner, listed, status in (("paul", False, 404), ("olga", True, 200)):
        async with at.served.client(await at.served.key_of(owner)) as client:
            assert (await invoke(client, "olgas", {}))["status"] == status
            names = [
                each["function"]["name"]
                for each in (await client.get(f"{API}/tools")).json()["items"]
            ]
            assert ("olgas" in names) is listed
    assert len(server.requests) == 1


async def test_a_result_is_used_again_for_the_same_user_and_arguments(
    at: Desk, http: httpx.AsyncClient, tools: Path, server: HttpServer
) -> None:
    (tools / "page.toml").write_text(f"""
approval = "allow"
idempotent = true
cache = 600
[http]
url = "{server.url}/{{name}}"
parameters = {{ type = "object", required = ["name"], properties = {{ name = {{}} }} }}
""")
    for name in ("a", "b", "a", "broken", "broken"):
        await invoke(http, "page", {"name": name})
    assert [each["path"] for each in server.requests] == ["/a", "/b", "/broken", "/broken"]
    await invoke(http, "page", {"name": "a"}, user_id="bob")
    assert len(server.requests) == 5
    at.model.add(calls(("page", {"name": "a"}), ("page", {"name": "c"})), Response("done"))
    events = await say(http, "cached")
    ends = [event["cached"] for event in events if event["type"] == "tool_end"]
    assert sorted(ends) == [False, True]
    assert len(server.requests) == 6


async def test_a_profile_repeats_failed_calls_of_an_idempotent_source(
    at: Desk, http: httpx.AsyncClient, tools: Path, place: Path
) -> None:
    for name, idempotent in (("safe", "true"), ("unsafe", "false")):
        (tools / f"{name}.toml").write_text(
            f'approval = "allow"\nidempotent = {idempotent}\n[http]\nurl = "http://127.0.0.1:9/"'
        )
    (place / "agents" / "again.toml").write_text(
        'external = ["safe", "unsafe"]\n[retries]\nsafe = 1\nunsafe = 1\n'
    )
    at.model.add(calls(("safe", {}), ("unsafe", {})), Response("done"))
    events = await say(http, "again", agent_id="again")
    names = {
        event["tool_call_id"]: event["tool_name"]
        for event in events
        if event["type"] == "tool_start"
    }
    took = {
        names[event["tool_call_id"]]: event["duration_ms"]
        for event in events
        if event["type"] == "tool_end"
    }
    assert took["safe"] >= 200  # the pause before the second call
    assert took["unsafe"] < took["safe"]


async def test_the_operator_adds_and_removes_sources(
    at: Desk, client: Client, http: httpx.AsyncClient, tools: Path, server: HttpServer
) -> None:
    additions = at.served.service.data_dir / "tools"
    source = {"approval": "allow", "http": {"url": f"{server.url}/x"}}
    added = await client.add_tool("page", source)
    assert (added["name"], added["state"], added["tools"]) == ("page", "ready", ["page"])
    assert (additions / "page.toml").stat().st_mode & 0o777 == 0o600
    (tools / "file.toml").write_text(f'[http]\nurl = "{server.url}"')
    assert not (await invoke(http, "page", {}))["is_error"]
    with pytest.raises(Conflict) as exists:
        await client.add_tool("page", source)
    assert exists.value.code == "tool_exists"
    with pytest.raises(Conflict):
        await client.add_tool("file", source)
    for name in ("run_code", "../x", "X", ""):
        with pytest.raises(BadRequest):
            await client.add_tool(name, source)
    with pytest.raises(Unavailable) as broken:
        await client.add_tool("broken", {"openapi": {"document": "/missing.json"}})
    assert broken.value.code == "invalid_tool"
    assert os.listdir(additions) == ["page.toml"]
    await client.remove_tool("page")
    await client.remove_tool("page")
    assert not os.listdir(additions)
    assert (await invoke(http, "page", {}))["status"] == 404


async def test_a_broken_file_is_a_problem_of_its_source_alone(
    client: Client, tools: Path, server: HttpServer
) -> None:
    (tools / "good.toml").write_text(f'[http]\nurl = "{server.url}"')
    (tools / "bad.toml").write_text("nonsense = 1")
    (tools / "no_secret.toml").write_text(
        f'[secrets]\nkey = "env:NOT_SET_ANYWHERE"\n[http]\nurl = "{server.url}"'
    )
    sources = {each["name"]: each for each in await client.tool_sources()}
    assert sources["good"]["state"] == "ready"
    assert "nonsense" in sources["bad"]["problem"]
    assert "NOT_SET_ANYWHERE" in sources["no_secret"]["problem"]
    (tools / "bad.toml").write_text(f'[http]\nurl = "{server.url}"')
    assert (await states(client))["bad"] == ("ready", ["bad"])


# -- attacks and failures -------------------------------------------------------------------------


def _records(place: Path) -> list[str]:
    """The contents of the store and of the audit log."""
    files = (file for name in ("store.sqlite*", "audit.jsonl*") for file in place.rglob(name))
    return [repr(file.read_bytes()) for file in files]


async def test_an_echoed_secret_reaches_no_model_event_log_or_store(
    at: Desk,
    http: httpx.AsyncClient,
    client: Client,
    tools: Path,
    place: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = mcp_file(place, secrets={"key": "env:SECRET_OF_TESTS"}, env={"TOKEN": "${key}"})
    (tools / "leaky.toml").write_text(text)
    await until_ready(client, "leaky")
    seen: list[str] = []

    def after(request: Asked) -> Response:
        seen.append(request.text)
        return Response("done")

    forms = [("leaky_secret", {"form": form}) for form in ("plain", "base64", "error")]
    at.model.add(calls(*forms), after)
    events = await say(http, "leaky")
    stored = await http.get(f"{API}/conversations/leaky/messages", params=ANN)
    records = _records(place)
    assert len(records) > 1
    texts = [*seen, json.dumps(events), stored.text, caplog.text, *records]
    assert seen
    for shown in texts:
        assert SECRET not in shown
        assert "Z2V0" not in shown
    assert "[secret key]" in seen[0]
    assert "SECRET_OF_TESTS" not in seen[0]  # a server gets few variables of the service


async def test_a_server_that_dies_is_started_again(
    http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    starts = place / "starts"
    (tools / "mortal.toml").write_text(mcp_file(place, env={"STARTS": str(starts)}))
    await until_ready(client, "mortal")
    died = await invoke(http, "mortal_die", {})
    assert died["is_error"]
    assert "tool_unavailable" in died["result"]
    await until_ready(client, "mortal")
    assert (await invoke(http, "mortal_add", {"a": 1, "b": 2}))["result"] == "3"
    assert len(starts.read_text().split()) == 2


async def test_an_answer_of_100_mb_ends_the_server_and_not_the_service(
    http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    (tools / "wide.toml").write_text(mcp_file(place))
    await until_ready(client, "wide")
    before = psutil.Process().memory_info().rss
    result = await invoke(http, "wide_huge", {"megabytes": 100})
    assert result["is_error"]
    assert psutil.Process().memory_info().rss - before < 64 << 20
    await until_ready(client, "wide")
    text = (await invoke(http, "wide_huge", {"megabytes": 3}))["result"]
    assert len(text) < 40_000  # the rest is in a file of the sandbox
    assert "cut out here" in text


async def test_an_answer_of_many_parts_is_cut_or_ends_the_server(
    http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    """250,000 parts took 2.3 s of the event loop (holes 2.16)."""
    (tools / "crowd.toml").write_text(mcp_file(place))
    await until_ready(client, "crowd")
    few = await invoke(http, "crowd_parts", {"count": 1005})
    assert "[5 more parts are left out]" in few["result"]
    many = await invoke(http, "crowd_parts", {"count": 60_000})
    assert many["is_error"]
    await until_ready(client, "crowd")


async def test_a_call_that_hangs_ends_after_its_time(
    http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    (tools / "slow.toml").write_text(mcp_file(place, timeout=1))
    await until_ready(client, "slow")
    result = await invoke(http, "slow_hang", {})
    assert result["is_error"]
    assert "tool_timeout" in result["result"] or "timed out" in result["result"].lower()
    assert (await invoke(http, "slow_add", {"a": 1, "b": 2}))["result"] == "3"


async def test_a_removed_source_ends_its_server(client: Client, tools: Path, place: Path) -> None:
    starts = place / "starts_of_removed"
    (tools / "brief.toml").write_text(mcp_file(place, env={"STARTS": str(starts)}))
    await until_ready(client, "brief")
    pid = int(starts.read_text())
    assert psutil.pid_exists(pid)
    await client.remove_tool("brief")
    assert not psutil.pid_exists(pid)


async def test_fifty_agents_with_a_server_that_hangs_one_that_dies_and_a_wide_one(
    at: Desk, http: httpx.AsyncClient, client: Client, tools: Path, place: Path
) -> None:
    many = {"calls_per_minute": 10_000}
    (tools / "hangs.toml").write_text(mcp_file(place, env={"HANGS": "1"}, **many))
    (tools / "dies.toml").write_text(mcp_file(place, **many))
    (tools / "wide.toml").write_text(mcp_file(place, **many))
    await until_ready(client, "dies")
    await until_ready(client, "wide")

    def answer(request: Asked) -> Response:
        last = request.messages[-1]
        if last["role"] != "user":
            return Response("done")
        number = int(last["content"])
        tool = [
            ("dies_die", {}),
            ("wide_huge", {"megabytes": 100 if number == 1 else 1}),
            ("dies_add", {"a": number, "b": 1}),
            ("wide_add", {"a": number, "b": 1}),
        ][number % 4]
        return calls(tool)

    at.model.add(*[answer] * 100)
    agents = 50
    async with asyncio.timeout(240):
        for first in range(0, agents, 25):  # the clients of a test have 25 connections
            ended = await asyncio.gather(
                *(
                    say(http, f"crowd-{number}", message=str(number), user_id=f"user-{number}")
                    for number in range(first, first + 25)
                )
            )
            for events in ended:
                assert events[-1]["type"] == "run_end"
                assert events[-1]["reason"] == "done"
    assert (await states(client))["hangs"][0] in ("starting", "failed")
    await until_ready(client, "wide")


async def test_a_source_that_does_not_exist(client: Client) -> None:
    with pytest.raises(NotFound):
        await client.invoke("nothing", {}, session_id="x", conversation_id="y")
    with pytest.raises((Denied, NotFound, BadRequest)):
        await client.remove_tool("../tools")
