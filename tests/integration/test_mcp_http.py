"""The tools of a conversation over streamable HTTP, by the SDK's own client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from bay_calls import made
from live_app import Served, live
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CallToolResult,
    ElicitRequestParams,
    ElicitResult,
    InputRequiredResult,
    TextContent,
)
from places import short_directory
from test_mcp import TOOLS
from test_mcp_project import Person
from web import Web, granting

from sbx.service.caller import Caller
from sbx.service.models import SessionIdentity

MODES = ["auto", "legacy"]
TASK = 'description = "Greet"\nprompt = "Greet ${name}."\n[parameters.name]\n'


def policies_of(top: Path, site: Web) -> Path:
    """Write the policy `granting`, and return its directory."""
    policies = top / "policies"
    policies.mkdir()
    (policies / "granting.toml").write_text(granting(site))
    return policies


@pytest_asyncio.fixture(scope="module")
async def served(site: Web) -> AsyncIterator[Served]:
    with short_directory() as top:
        (top / "tasks").mkdir()
        (top / "tasks" / "greet.toml").write_text(TASK)
        (top / "tasks" / "broken.toml").write_text("nonsense")
        directories = (policies_of(top, site),)
        async with live(top, tasks_dir=top / "tasks", policy_dirs=directories) as served:
            yield served


@asynccontextmanager
async def connected(
    served: Served, box: str, conversation: str = "default", key: str | None = None, **more: Any
) -> AsyncIterator[Client]:
    url = f"http://sbx/v1/sandboxes/{box}/conversations/{conversation}/mcp"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx2.AsyncHTTPTransport(uds=str(served.socket))
    async with (
        asyncio.timeout(60),
        httpx2.AsyncClient(transport=transport, headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), **more) as client,
    ):
        yield client


def text(result: Any) -> str:
    assert isinstance(result, CallToolResult)
    return "".join(one.text for one in result.content if isinstance(one, TextContent))


async def new(served: Served, **more: Any) -> str:
    async with served.client() as client:
        return str((await made(client, **more))["id"])


@pytest.mark.parametrize("mode", MODES)
async def test_tools_act_on_the_conversation_in_the_address(served: Served, mode: str) -> None:
    box = await new(served)
    async with connected(served, box, mode=mode) as client:
        assert {one.name for one in (await client.list_tools()).tools} == TOOLS
        assert "hello" in text(
            await client.call_tool("run_code", {"code": "x = 41; print('hello')"})
        )
        assert "42" in text(await client.call_tool("run_code", {"code": "x + 1"}))
        await client.call_tool("write_file", {"path": "a.txt", "content": "one"})
        raised = await client.call_tool("run_code", {"code": "1 / 0"})
        assert raised.is_error
        (listed,) = (await client.list_resources()).resources
        assert listed.uri == "file:///workspace/a.txt"
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.name == "greet"
    async with connected(served, box, mode=mode) as later:
        assert "41" in text(await later.call_tool("run_code", {"code": "x"}))
    async with connected(served, box, "other", mode=mode) as other:
        assert "NameError" in text(await other.call_tool("run_code", {"code": "x"}))
    async with served.client() as http:
        runs = (await http.get(f"/v1/sandboxes/{box}/history")).json()
    assert len(runs["entries"]) >= 5


async def test_output_comes_as_progress(served: Served) -> None:
    box, heard = await new(served), []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async with connected(served, box) as client:
        code = "import time\nfor step in range(3): print(step, flush=True); time.sleep(0.1)"
        await client.call_tool("run_code", {"code": code}, progress_callback=on_progress)
    assert "0\n" in "".join(heard)


async def test_a_client_that_leaves_interrupts_its_call(served: Served) -> None:
    box = await new(served)
    begun = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        begun.set()

    async def call() -> None:
        async with connected(served, box) as client:
            code = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
            await client.call_tool("run_code", {"code": code}, progress_callback=on_progress)

    calling = asyncio.create_task(call())
    async with asyncio.timeout(60):
        await begun.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        async with connected(served, box) as client:  # it waits for the kernel
            assert "2" in text(await client.call_tool("run_code", {"code": "1 + 1"}))


async def test_a_stranger_and_an_unknown_sandbox_get_an_error(served: Served) -> None:
    box = await new(served)
    for key, place in ((await served.key_of("mallory"), box), (None, "sandbox-none")):
        with pytest.raises((MCPError, ExceptionGroup)):
            async with connected(served, place, key=key) as client:
                await client.list_tools()


async def test_a_token_needs_the_scope_of_each_tool(served: Served) -> None:
    service = served.service
    ann = Caller("alice", "key")
    box = await service.sandboxes.create(ann, session=SessionIdentity("s-9", "ann", "helper"))
    _, token = await service.access.make_token("alice", user_id="ann", scopes=["execute"], ttl_s=60)
    async with connected(served, box.id, key=token) as client:
        assert "2" in text(await client.call_tool("run_code", {"code": "1 + 1"}))
        refused = await client.call_tool("write_file", {"path": "a", "content": "b"})
        assert refused.is_error
        assert "files:write" in text(refused)


async def test_a_get_and_a_body_that_is_no_message_are_refused(served: Served) -> None:
    box = await new(served)
    url = f"/v1/sandboxes/{box}/conversations/default/mcp"
    accept = {"accept": "application/json, text/event-stream"}
    async with served.client() as client:
        assert (await client.get(url)).status_code == 405
        reply = await client.post(
            url, content=b"{", headers={**accept, "content-type": "application/json"}
        )
        assert reply.status_code == 400
        assert (await client.post(url, json={})).status_code in (400, 406)


def fetch(site: Web, path: str) -> dict[str, str]:
    code = f"import urllib.request as u\nprint(u.urlopen('{site.url}{path}', timeout=50).read())"
    return {"code": code}


async def test_refused_access_is_asked_about(served: Served, site: Web) -> None:
    box, person = await new(served, profile="granting"), Person("no", "yes", "cancel")
    async with connected(served, box, elicitation_callback=person) as client:
        assert "request_access" in {one.name for one in (await client.list_tools()).tools}
        first = await client.call_tool("run_code", fetch(site, "/1"))
        assert "denied" in text(first)
        access = {"kind": "network", "target": site.host, "reason": "the menu"}
        assert "granted connections" in text(await client.call_tool("request_access", access))
        assert "hello from /2" in text(await client.call_tool("run_code", fetch(site, "/2")))
        assert "denied" in text(await client.call_tool("request_access", access))
    question = f"Grant connections to {site.host}, for the next run?"
    reason = "The model gives this reason: the menu"
    assert person.questions == [question, *[f"{question}\n{reason}"] * 2]
    assert [path for path, _ in site.asked] == ["/2"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_cannot_ask_stays_refused(served: Served, site: Web, mode: str) -> None:
    box, person = await new(served, profile="granting"), Person()
    can_ask: dict[str, Any] = {"elicitation_callback": person} if mode == "legacy" else {}
    async with connected(served, box, mode=mode, **can_ask) as client:
        result = text(await client.call_tool("run_code", fetch(site, "/never")))
        assert "refused by network.allow" in result
        assert "granted" not in result
    assert person.questions == []


async def test_only_the_client_that_was_asked_can_answer(served: Served, site: Web) -> None:
    """Another client of the same owner, with another key, does not continue the call."""
    key = await served.key_of("carol")
    async with served.client(key) as http:
        box = str((await made(http, profile="granting"))["id"])

    async def steal(_: Any, params: ElicitRequestParams) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True})

    access = {"kind": "network", "target": site.host}
    async with connected(served, box, key=key, elicitation_callback=steal) as client:
        asked = await client.session.call_tool("request_access", access, allow_input_required=True)
        assert isinstance(asked, InputRequiredResult)
        state = asked.request_state
    other = await served.key_of("carol")
    answers: dict[str, Any] = {"approval": ElicitResult(action="accept", content={"approve": True})}
    async with connected(served, box, key=other, elicitation_callback=steal) as client:
        with pytest.raises(MCPError, match="does not wait"):
            await client.session.call_tool(
                "request_access", access, input_responses=answers, request_state=state
            )
    async with connected(served, box, key=key, elicitation_callback=steal) as client:
        granted = await client.session.call_tool(
            "request_access", access, input_responses=answers, request_state=state
        )
        assert "granted" in text(granted)


async def test_a_call_that_waits_for_an_answer_ends_with_the_service(site: Web) -> None:
    person = Person()
    with short_directory() as top:
        async with asyncio.timeout(60), live(top, policy_dirs=(policies_of(top, site),)) as served:
            box = await new(served, profile="granting")
            async with connected(served, box, elicitation_callback=person) as client:
                access = {"kind": "network", "target": site.host}
                asked = await client.session.call_tool(
                    "request_access", access, allow_input_required=True
                )
                assert isinstance(asked, InputRequiredResult)
    assert person.questions == []
