"""What a person observes without a use: sandboxes, runs, the network, policies, directories."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from chain import until
from console_service import Console, console_service
from places import short_directory

from tests.fake_clock import FakeClock

PEEK = {"peek": "true"}


@pytest_asyncio.fixture(scope="module")
async def client(console: Console) -> AsyncIterator[httpx.AsyncClient]:
    async with console.served.client() as client:
        yield client


@pytest_asyncio.fixture
async def box(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The id of a sandbox with a kernel."""
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await run(client, box, "x = 1")
    yield box
    await client.delete(f"/v1/sandboxes/{box}")


async def run(client: httpx.AsyncClient, box: str, code: str) -> dict[str, Any]:
    reply = await client.post(
        f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": code}
    )
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


READS = (
    "", "/inspect", "/events", "/network", "/history", "/conversations/default/list",
    "/conversations/default/usage", "/conversations/default/terminals",
    "/conversations/default/contexts", "/conversations/default/receipt",
    "/conversations/default/uploads", "/conversations/default/commands",
)  # fmt: skip


async def test_a_read_that_peeks_never_delays_the_idle_time_out(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        console_service(tmp_path, clock=clock, idle_timeout=100) as console,
        console.served.client() as client,
    ):
        box = (await client.post("/v1/sandboxes", json={"ttl": 5000})).json()["id"]
        await run(client, box, "1")
        before = (await client.get(f"/v1/sandboxes/{box}")).json()
        clock.advance(50)
        for path in READS:
            reply = await client.get(f"/v1/sandboxes/{box}{path}", params=PEEK)
            assert reply.status_code == 200, (path, reply.text)
            now = (await client.get(f"/v1/sandboxes/{box}")).json()
            assert now["idle_expires_at"] == before["idle_expires_at"], path
        details = (await client.get("/v1/sandboxes", params={"detail": "true"})).json()
        assert details["items"][0]["idle_expires_at"] == before["idle_expires_at"]
        await client.get(f"/v1/sandboxes/{box}/conversations/default/list")
        now = (await client.get(f"/v1/sandboxes/{box}")).json()
        assert now["idle_expires_at"] > before["idle_expires_at"]


async def test_a_sandbox_whose_usage_is_followed_by_a_peek_becomes_idle(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        console_service(tmp_path, clock=clock, idle_timeout=100) as console,
        console.served.client() as client,
    ):
        box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        await run(client, box, "1")
        sandbox = console.served.service.sandboxes.index.by_id(box)
        assert sandbox is not None
        url = f"/v1/sandboxes/{box}/conversations/default/usage"
        asks: dict[str, Any] = {"headers": {"accept": "text/event-stream"}}
        for params, idle in (({}, False), (PEEK, True)):
            async with client.stream(
                "GET", url, params={"interval_s": 0.2, **params}, **asks
            ) as reply:
                lines = reply.aiter_lines()
                assert await anext(lines) == "id: 1"
                clock.advance(150)
                assert (sandbox.users, await sandbox.stop_idle()) == (1, idle)
                if idle:  # then the stream ends
                    assert "closed" in "".join([line async for line in lines])
            await until(lambda: sandbox.users == 0)


async def test_a_sandbox_that_a_peek_opens_is_idle_at_once_and_has_no_kernel(
    client: httpx.AsyncClient, box: str, console: Console
) -> None:
    await client.post(f"/v1/sandboxes/{box}/stop")
    reply = await client.get(f"/v1/sandboxes/{box}/conversations/default/list", params=PEEK)
    assert reply.status_code == 200
    sandbox = console.served.service.sandboxes.index.by_id(box)
    assert sandbox is not None
    assert sandbox.kernels == 0
    assert await sandbox.stop_idle()


async def test_the_details_of_sandboxes(client: httpx.AsyncClient, box: str) -> None:
    params: dict[str, Any] = {"detail": "true", "ended": "true", "limit": 200}
    reply = (await client.get("/v1/sandboxes", params=params)).json()
    (item,) = [item for item in reply["items"] if item["id"] == box]
    assert (item["status"], item["kernels"], item["conversations"]) == ("ready", 1, 1)
    assert (item["busy"], item["stopped"], item["failure"]) == (False, False, None)
    assert item["usage"]["memory"] > 0
    assert item["owner"].startswith("uid:")
    await client.post(f"/v1/sandboxes/{box}/stop")
    reply = (await client.get("/v1/sandboxes", params=params)).json()
    (item,) = [item for item in reply["items"] if item["id"] == box]
    assert (item["status"], item["kernels"], item["usage"]) == ("idle", 0, None)
    await client.delete(f"/v1/sandboxes/{box}")
    reply = (await client.get("/v1/sandboxes", params=params)).json()
    assert box not in {item["id"] for item in reply["items"]}
    (ended,) = [item for item in reply["ended"] if item["id"] == box]
    assert (ended["cause"], ended["profile"]) == ("requested", "python-default")


async def test_one_run_is_read_with_its_code(client: httpx.AsyncClient, box: str) -> None:
    made = await run(client, box, "print('hi')\n6 * 7")
    url = f"/v1/sandboxes/{box}/runs"
    one = (await client.get(f"{url}/{made['run_id']}", params=PEEK)).json()
    assert (one["code"], one["kind"], one["result"]) == ("print('hi')\n6 * 7", "python", "42")
    assert (one["stdout"], one["conversation"], one["context"]) == ("hi\n", "default", "default")
    missing = await client.get(f"{url}/run-none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "run_not_kept")


async def test_code_is_completed_and_inspected(client: httpx.AsyncClient, box: str) -> None:
    await run(client, box, "longish_name = 1")
    url = f"/v1/sandboxes/{box}/conversations/default/contexts/default"
    done = (await client.post(f"{url}/complete", json={"code": "longish", "cursor": 7})).json()
    assert "longish_name" in done["matches"]
    assert (done["start"], done["end"]) == (0, 7)
    what = (await client.post(f"{url}/inspect", json={"code": "print", "cursor": 5})).json()
    assert what["found"]
    assert "Docstring" in what["data"]["text/plain"]
    none = (await client.post(f"{url}/inspect", json={"code": "nothing_x", "cursor": 3})).json()
    assert none == {"found": False, "data": {}}
    assert (await run(client, box, "longish_name"))["execution_count"] is not None


async def test_a_busy_or_missing_kernel_answers_no_question(
    client: httpx.AsyncClient, box: str
) -> None:
    runs = f"/v1/sandboxes/{box}/conversations/default/runs"
    url = f"/v1/sandboxes/{box}/conversations/default/contexts/default/complete"
    question = {"code": "pri", "cursor": 3}
    busy = {"code": "print('on')\nimport time\ntime.sleep(60)", "stream": True}
    async with client.stream("POST", runs, json=busy) as reply:
        async for line in reply.aiter_lines():
            if "on" in line and line.startswith("data"):
                break
        refused = await client.post(url, json=question)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
        await client.post(f"/v1/sandboxes/{box}/interrupt")
    await client.post(f"/v1/sandboxes/{box}/stop")
    refused = await client.post(url, json=question)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "kernel_gone")


async def test_the_network_of_a_sandbox_without_one_is_empty(
    client: httpx.AsyncClient, box: str
) -> None:
    reply = (await client.get(f"/v1/sandboxes/{box}/network", params=PEEK)).json()
    assert reply == {"items": [], "next_cursor": None, "complete": True}


async def test_refused_hosts_are_listed_the_newest_first(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/sandboxes", json={"profile": "networked"})
    assert reply.status_code == 201, reply.text
    box = reply.json()["id"]
    code = (
        "import urllib.request\n"
        "for path in ('one?key=secret', 'two'):\n"
        "    try: urllib.request.urlopen(f'http://not-allowed.example/{path}', timeout=5)\n"
        "    except Exception as error: print(error)"
    )
    await run(client, box, code)
    log = (await client.get(f"/v1/sandboxes/{box}/network")).json()
    paths = [item["path"] for item in log["items"]]
    assert paths == ["/two", "/one"]
    assert {item["host"] for item in log["items"]} == {"not-allowed.example"}
    assert not any(item["allowed"] for item in log["items"])
    await client.delete(f"/v1/sandboxes/{box}")


async def test_policies_are_listed_and_shown(console: Console, client: httpx.AsyncClient) -> None:
    items = (await client.get("/v1/policies")).json()["items"]
    by_name = {item["name"]: item for item in items}
    assert by_name["default"]["problem"] is None
    assert by_name["default"]["network_mode"] == "none"
    assert "python" in by_name["default"]["languages"]
    assert len(by_name["default"]["fingerprint"]) > 8
    one = (await client.get("/v1/policies/default")).json()
    assert one["policy"]["limits"]["memory_max"].endswith("B")
    assert one["source"].startswith(("#", "description", "extends"))
    assert (await client.get("/v1/policies/none")).status_code == 404
    assert (await client.get("/v1/policies/..%2f..%2fetc%2fpasswd")).status_code == 404
    served = console.served
    async with served.client(await served.key_of("reader")) as reader:
        assert (await reader.get("/v1/policies/default")).json()["source"] is None


async def test_directories_for_projects_are_suggested(tmp_path: Path) -> None:
    with short_directory() as directory:
        top = directory / "work"
        for name in ("one", "two", ".hidden"):
            (top / name).mkdir(parents=True)
        (top / "file").touch()
        service = console_service(tmp_path, project_dirs=(top,), project_owners=("root",))
        async with service as console, console.served.client() as client:
            url = "/api/v1/projects/directories"
            tops = (await client.get(url)).json()
            assert [item["path"] for item in tops["items"]] == [str(top)]
            below = (await client.get(url, params={"below": str(top)})).json()
            assert [item["name"] for item in below["items"]] == ["one", "two"]
            outside = await client.get(url, params={"below": "/etc"})
            assert (outside.status_code, outside.json()["error"]["code"]) == (403, "not_granted")
            up = await client.get(url, params={"below": f"{top}/../.."})
            assert up.status_code == 400


async def test_peek_is_in_the_document_of_each_read_below_a_sandbox(
    client: httpx.AsyncClient,
) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    reads = [
        operations["get"]
        for path, operations in paths.items()
        if path.startswith("/v1/sandboxes/{sandbox_id}") and "get" in operations
    ]
    assert len(reads) > 20
    for read in reads:
        assert "peek" in {parameter["name"] for parameter in read["parameters"]}
