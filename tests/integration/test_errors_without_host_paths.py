"""Faults of the host as a tenant is told of them: without a path that the tenant did not name."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live_app import Served, live
from places import short_directory, small_disk

POLICY = 'schema = 1\nextends = "default"\n{more}\n'
BROKEN = {
    "broken": "memory_max = [",
    "unknown": "colour = 1",
    "mounts": '[[filesystem.mount]]\nsource = "{top}/none"\ntarget = "/opt/none"',
    "runs": 'interpreter = "{top}/bin/python"',
    "misses": 'interpreter = "env:missing"',
    "wrong": 'interpreter = "env:wrong"',
}


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """A directory below which everything of the host is that a caller may not learn of."""
    with short_directory() as directory:
        policies = directory / "policies"
        policies.mkdir()
        for name, more in BROKEN.items():
            text = POLICY.format(more=more.replace("{top}", str(directory)))
            (policies / f"{name}.toml").write_text(text)
        (directory / "environments").mkdir()
        (directory / "environments" / "wrong").write_text("not an environment")
        yield directory


@pytest_asyncio.fixture(scope="module")
async def served(top: Path) -> AsyncIterator[Served]:
    async with live(
        top,
        policy_dirs=(top / "policies",),
        environments=top / "environments",
        project_dirs=(top / "projects",),
    ) as served:
        yield served


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client(await served.key_of("ann")) as client:
        yield client


def check(reply: httpx.Response, top: Path, *codes: str) -> None:
    """Refused with one of these codes, and without a path."""
    assert reply.status_code >= 400, reply.text
    assert reply.json()["error"]["code"] in codes, reply.text
    assert str(top) not in reply.text


async def created(client: httpx.AsyncClient, **body: Any) -> str:
    reply = await client.post("/v1/sandboxes", json=body)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def run(client: httpx.AsyncClient, box: str) -> Awaitable[httpx.Response]:
    return client.post(f"/v1/sandboxes/{box}/python/exec", json={"code": "1"})


@contextmanager
def file_in_place_of(path: Path) -> Iterator[None]:
    """As if something had replaced a directory or a file."""
    aside = path.with_name(f"{path.name}-aside")
    existed = path.exists()
    if existed:
        path.rename(aside)
    path.write_text("x")
    path.chmod(0o644)
    try:
        yield
    finally:
        path.unlink()
        if existed:
            aside.rename(path)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(BROKEN))
async def test_a_policy_that_cannot_be_used_names_no_path(
    client: httpx.AsyncClient, top: Path, policy: str
) -> None:
    """A tenant once read the paths of policies, interpreters and environments."""
    reply = await client.post("/v1/sandboxes", json={"profile": policy})
    if reply.status_code == 201:
        box = reply.json()["id"]
        reply = await run(client, box)
        for path in ("", "/events", "/inspect", "/history"):
            view = await client.get(f"/v1/sandboxes/{box}{path}")
            assert str(top) not in view.text, path
        streamed = await client.post(
            f"/v1/sandboxes/{box}/python/exec",
            json={"code": "1"},
            headers={"accept": "text/event-stream"},
        )
        assert str(top) not in streamed.text
    assert reply.status_code >= 400
    assert str(top) not in reply.text


async def test_a_policy_whose_file_breaks_later_names_no_path(
    client: httpx.AsyncClient, top: Path
) -> None:
    file = top / "policies" / "later.toml"
    file.write_text(POLICY.format(more=""))
    box = await created(client, profile="later")
    file.write_text("schema = ")
    for reply in (
        await client.post("/v1/sandboxes", json={"profile": "later"}),
        await client.get("/v1/profiles"),
        await client.get(f"/v1/sandboxes/{box}"),
        await client.get("/v1/sandboxes"),
        await run(client, box),
    ):
        assert str(top) not in reply.text


# -- the data directory ----------------------------------------------------------------------------


@asynccontextmanager
async def store_that(served: Served, pragma: str, after: str) -> AsyncIterator[None]:
    await served.service.store.write(lambda on: on.execute(f"PRAGMA {pragma}"))
    writer = served.service.store._writer
    try:
        yield
    finally:
        await writer.run(lambda on: on.execute(f"PRAGMA {after}"))
        served.service.recording.reserve.allocate()  # or the disk counts as full for a while


async def test_a_store_that_cannot_be_written_names_no_path(
    served: Served, client: httpx.AsyncClient, top: Path
) -> None:
    """A tenant once read the path of the store."""
    box = await created(client)
    async with store_that(served, "query_only = 1", "query_only = 0"):
        check(await client.post("/v1/sandboxes", json={}), top, "store_unusable")
        check(await client.post("/v1/cargos", json={}), top, "store_unusable")
        check(await client.delete(f"/v1/sandboxes/{box}"), top, "store_unusable")
        session = {"user_id": "u", "agent_id": "a"}
        check(await client.post("/api/v1/sessions", json=session), top, "store_unusable")
        keyed = {"idempotency-key": "k"}
        reply = await client.post("/v1/sandboxes", json={}, headers=keyed)
        check(reply, top, "store_unusable")


async def test_a_full_store_names_no_path(
    served: Served, client: httpx.AsyncClient, top: Path
) -> None:
    async with store_that(served, "max_page_count = 1", "max_page_count = 1000000"):
        for _ in range(200):
            reply = await client.post("/v1/cargos", json={})
            if reply.status_code != 201:
                break
        check(reply, top, "no_space")
    await asyncio.to_thread(served.service.recording.reserve.allocate)  # or the next tests get 507


async def test_a_directory_that_became_a_file_names_no_path(
    served: Served, client: httpx.AsyncClient, top: Path
) -> None:
    directory = served.service.data_dir / "sandboxes"
    box = await created(client)
    with file_in_place_of(directory):
        files = f"/v1/sandboxes/{box}/filesystem/files"
        for reply in (
            await run(client, box),
            await client.put(files, json={"path": "a.txt", "content": "x"}),
            await client.get(files, params={"path": "a.txt"}),
            await client.post("/v1/sandboxes", json={}),
            await client.get(f"/v1/sandboxes/{box}"),
            await client.get(f"/v1/sandboxes/{box}/events"),
            await client.delete(f"/v1/sandboxes/{box}"),
        ):
            assert str(top) not in reply.text


async def test_a_secret_that_others_may_read_names_no_path(served: Served, top: Path) -> None:
    secret = served.service.data_dir / "token_secret"
    async with served.client() as operator:
        with file_in_place_of(secret):
            asked = {"user_id": "u", "ttl_s": 60}
            check(await operator.post("/v1/admin/tokens", json=asked), top, "secret_unusable")


async def test_a_project_outside_the_allowed_paths_names_only_itself(
    client: httpx.AsyncClient, top: Path
) -> None:
    """The refusal once listed the directories of all projects."""
    asked = {"name": "p", "working_directory": "/usr/share"}
    check(await client.post("/api/v1/projects", json=asked), top, "not_granted")


@pytest.mark.full_tier
@pytest.mark.needs("root")
async def test_a_full_disk_names_no_path() -> None:
    async with AsyncExitStack() as stack:
        disk = stack.enter_context(small_disk("8m"))
        served = await stack.enter_async_context(live(disk))
        client = await stack.enter_async_context(served.client(await served.key_of("ann")))
        box = await created(client)
        files = f"/v1/sandboxes/{box}/filesystem/files"
        content = {"path": "a.txt", "content": "x" * 5000}
        put = partial(client.put, files, json=content)
        assert (await put()).status_code == 200
        (disk / "filling").write_bytes(b"x" * shutil.disk_usage(disk).free)
        try:
            replies = [
                await put(),
                await run(client, box),
                await client.delete(files, params={"path": "a.txt"}),
                await client.post("/v1/sandboxes", json={}),
                await client.post(f"/v1/sandboxes/{box}/stop"),
                await client.delete(f"/v1/sandboxes/{box}"),
                await client.get(f"/v1/sandboxes/{box}/events"),
            ]
        finally:
            (disk / "filling").unlink()
        assert sum(reply.status_code == 507 for reply in replies) >= 2
        for reply in replies:
            assert str(disk) not in reply.text
