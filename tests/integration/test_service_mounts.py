"""Directories that an operator mounts to sandboxes of a service, over its socket."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bay_calls import made, refused
from live_app import Served, live
from places import short_directory

import sbx
from sbx import Sandbox
from sbx.client import Client
from sbx.errors import Conflict, Denied, NotFound
from sbx.protocol.mounts import Mount
from tests.fake_clock import FakeClock

LOOK = "import os; print(sorted(os.listdir('/mnt')) if os.path.isdir('/mnt') else None)"


@pytest.fixture
async def top() -> AsyncIterator[Path]:
    with short_directory() as directory:
        for name in ("srv/wheels", "srv/corpus", "elsewhere", "policies"):
            (directory / name).mkdir(parents=True)
        (directory / "srv/wheels/a.txt").write_text("hello")
        (directory / "srv/link").symlink_to(directory / "elsewhere")
        (directory / "policies/sharing.toml").write_text(
            'schema = 1\nextends = "default"\nshared = true\nhost_executables = "allow"\n'
        )
        (directory / "policies/wired.toml").write_text(
            'schema = 1\nextends = "default"\n[honeytoken]\nenabled = true\n'
        )
        yield directory


@pytest.fixture
async def served(top: Path) -> AsyncIterator[Served]:
    async with live(top, mount_dirs=(top / "srv",), policy_dirs=(top / "policies",)) as served:
        yield served


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with served.client() as client:
        yield client


def path_of(box: str) -> str:
    return f"/v1/admin/sandboxes/{box}/mounts"


async def printed(client: httpx.AsyncClient, box: str, code: str) -> str:
    reply = await client.post(f"/v1/sandboxes/{box}/python/exec", json={"code": code})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["output"]).strip()


def log(served: Served) -> list[dict[str, Any]]:
    lines = (served.service.data_dir / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.full_tier
async def test_it_is_seen_listed_recorded_and_taken_away(
    served: Served, client: httpx.AsyncClient, top: Path
) -> None:
    box = (await made(client))["id"]
    assert await printed(client, box, LOOK) in ("[]", "None")
    asked = {"source": str(top / "srv/wheels")}
    reply = await client.post(path_of(box), json=asked)
    assert reply.status_code == 201, reply.text
    body = {**asked, "target": "/mnt/wheels", "read_only": True}
    assert reply.json() == body
    assert await printed(client, box, "print(open('/mnt/wheels/a.txt').read())") == "hello"
    assert (await client.get(path_of(box))).json() == {"items": [body]}
    assert (await client.get(f"/v1/sandboxes/{box}/inspect")).json()["mounts"] == [body]
    refused(await client.post(path_of(box), json=asked), 409, "already_mounted")
    gone = await client.request("DELETE", path_of(box), params={"target": "/mnt/wheels"})
    assert (gone.status_code, gone.content) == (204, b"")
    assert await printed(client, box, LOOK) == "[]"
    again = await client.request("DELETE", path_of(box), params={"target": "/mnt/wheels"})
    refused(again, 404, "not_mounted")
    acts = [one for one in log(served) if one["what"] in ("sandbox.mount", "sandbox.unmount")]
    assert [(one["what"], one["object"], one["details"]) for one in acts] == [
        ("sandbox.mount", box, body),
        ("sandbox.unmount", box, {"target": "/mnt/wheels"}),
    ]
    answer = (await client.get(f"/v1/sandboxes/{box}/events")).json()["items"]
    assert {"mounted", "unmounted"} <= {one["type"] for one in answer}


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("elsewhere", 403, "not_granted"),
        ("srv/../elsewhere", 400, "invalid_source"),
        ("srv/link", 400, "invalid_source"),
        ("srv/none", 400, "invalid_source"),
        ("srv/wheels/a.txt", 400, "invalid_source"),
        ("srv/\0", 400, "invalid_source"),
        ("", 403, "not_granted"),
        ("data", 403, "not_granted"),
    ],
)
async def test_nothing_but_what_the_settings_name_is_mounted(
    client: httpx.AsyncClient, top: Path, source: str, status: int, code: str
) -> None:
    box = (await made(client))["id"]
    body = json.dumps({"source": str(top / source)}).encode()
    reply = await client.post(
        path_of(box), content=body, headers={"content-type": "application/json"}
    )
    refused(reply, status, code)
    assert (await client.get(path_of(box))).json() == {"items": []}


@pytest.mark.full_tier
async def test_it_is_the_operator_s_whoever_owns_the_sandbox(
    served: Served, client: httpx.AsyncClient, top: Path
) -> None:
    async with served.client(await served.key_of("ann")) as ann:
        box = (await made(ann))["id"]
        asked = {"source": str(top / "srv/wheels")}
        refused(await ann.post(path_of(box), json=asked), 403, "forbidden")
        refused(await ann.get(path_of(box)), 403, "forbidden")
        gone = await ann.request("DELETE", path_of(box), params={"target": "/mnt/wheels"})
        refused(gone, 403, "forbidden")
        assert (await client.post(path_of(box), json=asked)).status_code == 201
        assert await printed(ann, box, "print(open('/mnt/wheels/a.txt').read())") == "hello"
        seen = (await ann.get(f"/v1/sandboxes/{box}/inspect")).json()["mounts"]
        assert seen == [{"target": "/mnt/wheels", "read_only": True, "source": None}]
    refused(await client.post(path_of("nope"), json=asked), 404, "not_found")


@pytest.mark.full_tier
async def test_it_survives_an_idle_close_and_a_stop_and_no_other_process(top: Path) -> None:
    clock = FakeClock()
    chosen: dict[str, Any] = {"mount_dirs": (top / "srv",), "gc_interval": 0}
    async with live(top, clock=clock, **chosen) as served, served.client() as client:
        box = (await made(client))["id"]
        assert await printed(client, box, "x = 1") == ""
        asked = {"source": str(top / "srv/wheels"), "target": "/mnt/w"}
        assert (await client.post(path_of(box), json=asked)).status_code == 201
        (one,) = served.service.sandboxes.every()
        clock.advance(served.service.settings.idle_timeout + 1)
        assert await one.stop_idle()
        assert one.active is None
        assert len((await client.get(path_of(box))).json()["items"]) == 1
        assert await printed(client, box, LOOK) == "['w']"
        assert (await client.post(f"/v1/sandboxes/{box}/stop")).status_code == 200
        second = {"source": str(top / "srv/corpus")}  # while it is closed
        assert (await client.post(path_of(box), json=second)).status_code == 201
        assert one.active is None
        gone = await client.request("DELETE", path_of(box), params={"target": "/mnt/w"})
        assert gone.status_code == 204
        assert await printed(client, box, LOOK) == "['corpus']"
    async with live(top, **chosen) as served, served.client() as client:
        assert (await client.get(path_of(box))).json() == {"items": []}
        assert await printed(client, box, LOOK) in ("[]", "None")


async def test_an_expired_sandbox_gets_nothing(top: Path) -> None:
    clock = FakeClock()
    async with (
        live(top, clock=clock, mount_dirs=(top / "srv",), gc_interval=0) as served,
        served.client() as client,
    ):
        box = (await made(client, ttl=10))["id"]
        clock.advance(11)
        reply = await client.post(path_of(box), json={"source": str(top / "srv/wheels")})
        refused(reply, 409, "sandbox_expired")


async def test_by_the_client(served: Served, top: Path) -> None:
    wheels = top / "srv/wheels"
    async with Client(served.socket) as client, await client.create() as box:
        assert await box.mount(wheels) == "/mnt/wheels"
        assert await box.mounts() == (Mount(str(wheels), "/mnt/wheels", True),)
        assert (await box.run("print(open('/mnt/wheels/a.txt').read())")).stdout == "hello\n"
        with pytest.raises(Conflict) as taken:
            await box.mount(wheels)
        assert taken.value.code == "already_mounted"
        await box.unmount("/mnt/wheels")
        with pytest.raises(NotFound):
            await box.unmount("/mnt/wheels")
        with pytest.raises(Denied) as denied:
            await box.mount("/usr")
        assert denied.value.code == "not_granted"


async def test_without_asyncio(served: Served, top: Path) -> None:
    def use() -> None:
        with Sandbox(connect=served.socket) as box:
            assert box.mount(top / "srv/wheels", "/mnt/w") == "/mnt/w"
            assert [one.target for one in box.mounts()] == ["/mnt/w"]
            assert box.run("print(open('/mnt/w/a.txt').read())").stdout == "hello\n"
            box.unmount("/mnt/w")
            assert box.mounts() == ()
            assert box.unfreeze() is False

    try:
        await asyncio.to_thread(use)
    finally:
        await asyncio.to_thread(sbx.close)


@pytest.mark.full_tier
async def test_what_is_shared_can_be_written_to(served: Served, top: Path) -> None:
    corpus = top / "srv/corpus"
    if os.geteuid() == 0:
        os.chown(corpus, 65_432, 65_432)
    corpus.chmod(0o777)
    async with Client(served.socket) as client, await client.create("sharing") as box:
        at = "/workspace/shared/corpus"
        await box.run(f"import os; os.mkdir({at!r})")
        assert await box.mount(corpus, at, read_only=False) == at
        assert (await box.run(f"open('{at}/f', 'w').write('x')")).ok
    assert (corpus / "f").read_text() == "x"


async def test_a_frozen_sandbox_is_lifted_by_the_client(served: Served) -> None:
    code = "import os; print(os.environ['GITHUB_TOKEN'])"
    async with Client(served.socket) as client, await client.create("wired") as box:
        assert await client.unfreeze(box.id) is False
        assert (await box.run(code)).cause == "honeytoken"
        with pytest.raises(Conflict) as frozen:
            await box.run("1")
        assert frozen.value.code == "honeytoken"
        assert await client.unfreeze(box.id) is True
        assert (await box.run("1 + 1")).result == "2"
        async with Client(served.socket, key=await served.key_of("ann")) as ann:
            with pytest.raises(Denied) as denied:
                await ann.unfreeze(box.id)
            assert denied.value.code == "forbidden"
