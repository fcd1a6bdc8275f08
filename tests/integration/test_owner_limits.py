"""The limits of one object and of one owner: labels, watches, bodies in memory, streams."""

import asyncio
import gc
import json
import re
import socket
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_calls import ANN, Desk, desk
from fastapi.routing import APIRoute
from live_app import Served, live, serving
from msgspec.structs import replace
from persistent_sandboxes import ME, eventually, open_service, printed, run
from places import short_directory
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sbx.api.middleware import RequestLimitsMiddleware
from sbx.errors import NotFound, Unavailable
from sbx.event_log import EndedRuns
from sbx.protocol.runs import Status
from sbx.service import auth, runs
from sbx.service.caller import Caller
from sbx.service.ids import LABELS_MAX
from sbx.service.limits import OwnerBytes, RoomQueue
from sbx.service.run import RunHandle, RunRequest
from sbx.service.service import Service
from sbx.store import chats

E2B_FILES = "/filesystem.Filesystem"
LARGE = {"large": "x" * LABELS_MAX}
ANN_, BOB = "ann-of-limits", "bob-of-limits"


@pytest_asyncio.fixture(scope="module")
async def small() -> AsyncIterator[Served]:
    """A service in which an owner may have one stream, and 16 MiB of bodies."""
    with short_directory() as directory:
        async with live(directory, streams_per_owner=1, bodies_per_owner=16 << 20) as served:
            yield served


async def client_of(served: Served, owner: str, **headers: str) -> httpx.AsyncClient:
    """A client with the key of an owner, in the headers of each surface."""
    key = await served.key_of(owner)
    headers |= {"x-api-key": f"e2b_{key.removeprefix('sk-sbx-')}", "open-sandbox-api-key": key}
    client = served.client(key)
    client.headers.update(headers)
    return client


def inside(sandbox: dict[str, Any], port: int = 49983) -> dict[str, str]:
    """The headers of a call of E2B's SDK, which sends a user of the sandbox as authorization."""
    place = {"e2b-sandbox-id": sandbox["sandboxID"], "e2b-sandbox-port": str(port)}
    return {**place, "authorization": ""}


async def created(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v2/sandboxes", json=body)
    assert reply.status_code == 201, reply.text
    sandbox: dict[str, Any] = reply.json()
    return sandbox


# -- what belongs to a conversation ----------------------------------------------------------------


async def test_watchers_end_with_their_conversation(served: Served) -> None:
    """A weak dictionary kept each conversation with its unread events until the restart, because
    the watchers in it referred to their key: 290 MiB in 12 s (holes 2.2b)."""
    async with await client_of(served, ANN_) as client:
        sandbox = await created(client)
        at = inside(sandbox)
        watch = {"path": "/home/user", "recursive": True}
        reply = await client.post(f"{E2B_FILES}/CreateWatcher", json=watch, headers=at)
        watcher = {"watcherId": reply.json()["watcherId"]}
        await client.post(f"{E2B_FILES}/MakeDir", json={"path": "made"}, headers=at)
        async with asyncio.timeout(30):
            events: list[Any] = []
            while not events:
                reply = await client.post(f"{E2B_FILES}/GetWatcherEvents", json=watcher, headers=at)
                events = reply.json()["events"]
        assert events == [{"name": "made", "type": "EVENT_TYPE_CREATE"}]
        (box,) = (each for each in served.service.sandboxes.every() if each.row.owner == ANN_)
        assert box.active is not None
        conversation = weakref.ref(box.active.conversation("default"))
        assert (await client.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 204
        del box
    await collected(conversation)


async def collected(reference: weakref.ref[Any]) -> None:
    def ended() -> bool:
        gc.collect()
        return reference() is None

    await eventually(ended)


@pytest.mark.full_tier
async def test_watchers_count_among_the_followers_of_their_owner(tmp_path: Path) -> None:
    """Those of a few sandboxes took all inotify instances that Linux gives the service."""
    async with (
        live(tmp_path, followers_per_owner=1) as served,
        await client_of(served, ANN_) as client,
    ):
        at = inside(await created(client))

        async def watch() -> httpx.Response:
            body = {"path": "/home/user"}
            return await client.post(f"{E2B_FILES}/CreateWatcher", json=body, headers=at)

        first, second = await watch(), await watch()
        assert (first.status_code, second.status_code) == (200, 429)
        await client.post(f"{E2B_FILES}/RemoveWatcher", json=first.json(), headers=at)
        assert (await watch()).status_code == 200


async def test_the_port_of_an_interpreter_ends_with_its_conversation(served: Served) -> None:
    """Each sandbox of the interpreter's image stayed in memory, 60 KiB of it (holes 2.2c)."""
    async with await client_of(served, BOB) as client:
        image = {"image": {"uri": "ubuntu:22.04"}, "entrypoint": ["tail", "-f", "/dev/null"]}
        probe = {"command": "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}'"}
        reply = await client.post("/opensandbox/v1/sandboxes", json=image)
        place = f"/opensandbox/v1/sandboxes/{reply.json()['id']}"
        assert (await client.get(f"{place}/proxy/44772/ping")).status_code == 200
        command = f"{place}/proxy/44772/command"
        assert (await client.post(command, json=probe)).status_code == 200
        (box,) = (each for each in served.service.sandboxes.every() if each.row.owner == BOB)
        assert box.active is not None
        conversation = weakref.ref(box.active.conversation("default"))
        assert len(await box.active.conversation("default").commands.list()) == 1
        assert (await client.post(command, json=probe)).status_code == 200
        assert len(await box.active.conversation("default").commands.list()) == 1
        assert (await client.delete(place)).status_code == 204
        del box
    await collected(conversation)


async def test_long_arguments_of_processes_are_not_remembered(served: Served) -> None:
    """Each of 64 ended processes of a conversation kept 2 MiB of arguments."""
    async with await client_of(served, ANN_) as client:
        sandbox = await created(client)
        at = inside(sandbox)
        words = ["-c", "sleep 600", *["x" * 100_000] * 15]
        process = {"cmd": "sh", "args": words, "envs": {"A": "b", "LARGE": "y" * 100_000}}
        start = connect_envelope(json.dumps({"process": process, "tag": "t"}).encode())
        stream = {"content-type": "application/connect+json"}
        place = "/process.Process/Start"
        async with client.stream("POST", place, content=start, headers=at | stream) as running:
            await anext(running.aiter_bytes())
            reply = await client.post("/process.Process/List", json={}, headers=at)
            (shown,) = reply.json()["processes"]
            assert (shown["config"]["args"], shown["config"]["envs"]) == (words[:2], {"A": "b"})
        tagged = connect_envelope(
            json.dumps({"process": {"cmd": "id"}, "tag": "t" * 5000}).encode()
        )
        reply = await client.post(place, content=tagged, headers=at | stream)
        assert b"code_too_large" in reply.content or reply.status_code == 413
        await client.delete(f"/sandboxes/{sandbox['sandboxID']}")


# -- labels ----------------------------------------------------------------------------------------


async def test_labels_have_a_limit_at_each_surface(served: Served) -> None:
    """1.7 MiB of metadata took 15 MiB of memory for each of 200 sandboxes of an owner, also after a
    restart (holes 2.2d)."""
    async with await client_of(served, ANN_) as client:
        e2b = await client.post("/v2/sandboxes", json={"metadata": LARGE})
        open_sandbox = {"image": {"uri": "ubuntu:22.04"}, "metadata": LARGE}
        other = await client.post("/opensandbox/v1/sandboxes", json=open_sandbox)
        narrower = {"network": {"allow": [f"{number:030}.example.org" for number in range(9_000)]}}
        native = await client.post("/v1/sandboxes", json={"narrower": narrower})
        assert [e2b.status_code, other.status_code, native.status_code] == [413, 413, 413]
        assert native.json()["error"]["code"] == "metadata_too_large"
        assert not [each for each in served.service.sandboxes.every() if each.row.owner == ANN_]


async def test_changes_of_metadata_do_not_add_up_beyond_the_limit(served: Served) -> None:
    """24 changes of 1.7 MiB each made labels of 40 MiB (holes 2.1e, 2.2d)."""
    async with await client_of(served, ANN_) as client:
        created = await client.post(
            "/opensandbox/v1/sandboxes", json={"image": {"uri": "ubuntu:22.04"}}
        )
        place = f"/opensandbox/v1/sandboxes/{created.json()['id']}"
        for name, status in (("a", 200), ("b", 413)):
            change = {name: "x" * (LABELS_MAX * 2 // 3)}
            reply = await client.patch(f"{place}/metadata", json=change)
            assert reply.status_code == status
        assert list((await client.get(place)).json()["metadata"]) == ["a"]
        sandbox = next(each for each in served.service.sandboxes.every() if each.row.owner == ANN_)
        assert sandbox.row.labels is not None
        earlier = {**sandbox.row.labels, "metadata": LARGE}  # of a store before the limit
        sandbox.row = replace(sandbox.row, labels=earlier)
        assert (await client.post(f"{place}/pause")).status_code == 202
        assert (await client.patch(f"{place}/metadata", json={"large": None})).status_code == 200
        await client.delete(place)


# -- bodies in flight ------------------------------------------------------------------------------


class Unfinished:
    """A request of which the service never gets the last byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def begin(cls, at: Path | tuple[str, int], key: str, size: int) -> "Unfinished":
        head = (
            b"POST /v1/sandboxes/none/conversations/c/runs HTTP/1.1\r\nhost: sbx\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n{" % (key.encode(), size)
        )
        return await cls.send(at, head)

    @classmethod
    async def send(cls, at: Path | tuple[str, int], head: bytes) -> "Unfinished":
        if isinstance(at, Path):
            reader, writer = await asyncio.open_unix_connection(str(at))
        else:
            reader, writer = await asyncio.open_connection(*at)
        writer.write(head)
        return cls(reader, writer)

    async def head(self) -> bytes:
        async with asyncio.timeout(30):
            return (await self.reader.readuntil(b"\r\n\r\n")).lower()

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def test_unfinished_bodies_of_an_owner_have_a_limit_together(small: Served) -> None:
    """40 connections with an unfinished body took 600 MiB; one key may have 1,000 (holes 2.2e)."""
    keys = [await small.key_of(owner) for owner in (ANN_, BOB)]
    first = await Unfinished.begin(small.socket, keys[0], 15 << 20)
    await eventually(lambda: bool(_bodies(small)))
    second = await Unfinished.begin(small.socket, keys[0], 2 << 20)
    refused = await second.head()
    assert b" 429 " in refused
    assert b"retry-after: 1\r\n" in refused
    other = await Unfinished.begin(small.socket, keys[1], 15 << 20)
    await eventually(lambda: len(_bodies(small)) == 2)
    for each in (first, second, other):
        await each.close()
    await eventually(lambda: not _bodies(small))
    async with small.client(keys[0]) as client:
        body = b"{" + b" " * (15 << 20) + b"}"
        place = "/v1/sandboxes/none/conversations/c/runs"
        reply = await client.post(place, content=body)
        assert reply.status_code == 422, reply.text  # a body of the largest size is read


async def test_no_body_is_read_before_its_caller_is_known(served: Served) -> None:
    """A body counts for the owner of its caller, so one without a caller must not be read: each
    route refuses it by its head. Only a login reads a small one, which identifies its caller."""
    routes = {
        (method, re.sub(r"\{[^}]*\}", "1", route.path))
        for route in served.app.routes
        if isinstance(route, APIRoute)
        for method in (route.methods or set()) - {"GET", "HEAD"}
    }
    assert len(routes) > 100
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()[:2]
        async with serving(served.app, sockets=[listening]):
            for method, path in sorted(routes):
                for authorization in (b"", b"authorization: Bearer sk-sbx-x\r\n"):
                    head = (
                        b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%b"
                        b"content-length: 100000\r\n\r\n"
                    ) % (method.encode(), path.encode(), authorization)
                    call = await Unfinished.send(address, head)
                    status = (await call.head()).split()[1]
                    logs_in = path in ("/api/v1/login", "/api/v1/console/login")
                    assert status in ((b"413",) if logs_in else (b"401", b"404")), (method, path)
                    assert not _bodies(served)
                    await call.close()
            login = b"POST /api/v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: 16384\r\n\r\n{"
            call = await Unfinished.send(address, login)
            await eventually(lambda: _bodies(served)[""] == 16 << 10)
            await call.close()
            await eventually(lambda: not _bodies(served))


async def test_a_body_counts_until_its_call_has_ended() -> None:
    """Only an unfinished body counted. Input for a process that does not read it stayed in memory,
    also when its client was gone: 16 MiB each took 30 MiB, without a limit."""
    bodies = OwnerBytes(16 << 20)
    counted = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        counted.append(bodies._used[ANN_])
        await Response()(scope, receive, send)

    async def ann(_: Request) -> Caller:
        return Caller(ANN_, "key")

    whole = RequestLimitsMiddleware(app, ann, bodies)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(whole), base_url="http://x") as http:
        await http.post("/e2b/49983/process.Process/SendInput", content=b"x" * 1000)
    assert (counted, bodies._used) == ([1000], {})


def _bodies(served: Served) -> Any:
    return served.app.state.bodies._used


# -- streams ---------------------------------------------------------------------------------------


async def test_streams_that_answer_a_post_count_before_their_work(small: Served) -> None:
    """80 streams that no client read took 200 MiB: only those of a GET were counted (holes 2.2f).
    A stream that is refused has started nothing."""
    hang = {"kind": "python", "code": "import time; print(1, flush=True); time.sleep(600)"}
    async with await client_of(small, ANN_) as client:
        native = (await client.post("/v1/sandboxes", json={})).json()["id"]
        e2b = await created(client)
        image = {"image": {"uri": "ubuntu:22.04"}}
        other = (await client.post("/opensandbox/v1/sandboxes", json=image)).json()["id"]
        session = {"user_id": "u", "agent_id": "a"}
        sessions = "/api/v1/sessions"
        held = (await client.post(sessions, json=session)).json()["session_id"]
        plane = f"/opensandbox/v1/sandboxes/{other}/proxy/44772"
        runs_of = f"/v1/sandboxes/{native}/conversations/default/runs"
        execute = {"conversation_id": "c", "code": "1", "stream": True}
        start = connect_envelope(b'{"process": {"cmd": "id"}}')
        stream = {"content-type": "application/connect+json"}
        posts: list[tuple[str, dict[str, Any]]] = [
            (runs_of, {"json": {**hang, "stream": True}}),
            (f"{sessions}/{held}/execute", {"json": execute}),
            (f"/v1/sandboxes/{native}/python/exec", {"json": {"code": "1", "stream": True}}),
            (f"{plane}/code", {"json": {"code": "1"}}),
            (f"{plane}/command", {"json": {"command": "true"}}),
            ("/execute", {"json": {"code": "1"}, "headers": inside(e2b, 49999)}),
            ("/process.Process/Start", {"content": start, "headers": {**inside(e2b), **stream}}),
        ]
        async with client.stream("POST", runs_of, json={**hang, "stream": True}) as following:
            assert following.status_code == 200
            before = await history_of(small, ANN_)
            for path, how in posts:
                reply = await client.post(path, **how)
                assert (reply.status_code, path) == (429, path)
            assert await history_of(small, ANN_) == before
            async with await client_of(small, BOB) as others:
                sandbox = await created(others)
                reply = await others.post(
                    "/execute", json={"code": "1"}, headers=inside(sandbox, 49999)
                )
                assert reply.status_code == 200
        await client.post(f"/v1/sandboxes/{native}/interrupt")
        for _ in range(2):  # the slot is free again after each stream
            assert (await client.post(*posts[3][:1], **posts[3][1])).status_code == 200
    await small.empty()


def connect_envelope(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


async def history_of(served: Served, owner: str) -> int:
    await served.service.store.write(lambda on: None)
    rows = await served.service.store.rows(
        "SELECT count(*) FROM runs JOIN sandboxes ON sandboxes.id = sandbox_id WHERE owner = ?",
        owner,
    )
    count: int = rows[0][0]
    return count


# -- connections -----------------------------------------------------------------------------------


async def test_the_connections_of_one_key_leave_room_for_others(served: Served) -> None:
    """200 port tunnels of one key took all places over TCP (holes 2.10)."""
    ann, bob = [await served.key_of(owner) for owner in (ANN_, BOB)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()[:2]
        async with serving(served.app, sockets=[listening], most=8):
            slow = [await Unfinished.begin(address, ann, 1 << 20) for _ in range(2)]
            await eventually(lambda: _bodies(served)[ANN_] == 2 << 20)
            refused = await Unfinished.begin(address, ann, 1 << 20)
            head = await refused.head()
            assert b" 503 " in head
            assert b"retry-after: 1\r\n" in head
            assert b"too_many_connections" in await refused.reader.readuntil(b"}")
            other = await Unfinished.begin(address, bob, 1 << 20)
            await eventually(lambda: _bodies(served)[BOB] == 1 << 20)
            for each in (*slow, refused, other):
                await each.close()
            await eventually(lambda: not _bodies(served))


# -- kernels, code, agents -------------------------------------------------------------------------


async def test_a_kernel_of_an_owner_below_its_share_is_not_evicted(tmp_path: Path) -> None:
    """Two owners at their limits once took the variables of a third one before each of its cells:
    the least recently used kernel of all was evicted (holes 2.11)."""
    owners = [Caller(name, "key") for name in ("one", "two")]
    async with open_service(tmp_path / "data", kernels_max=4, kernels_per_owner=2) as service:
        boxes = [(each, await service.sandboxes.create(each)) for each in owners for _ in "ab"]

        async def use_all() -> None:
            for caller, box in boxes:
                handle = await service.runs.start(
                    caller, box.id, "default", RunRequest("python", "1")
                )
                await handle.result()

        await use_all()
        mine = await service.sandboxes.create(ME)
        assert (await run(service, mine.id, "x = 1")).ok
        for _ in range(2):
            await use_all()
            result = await run(service, mine.id, "x")
            assert (result.ok, result.state_lost) == (True, False)


async def test_ended_runs_of_one_owner_leave_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner could end the replay of all others: the oldest run of all made room."""
    large = RunRequest("python", "print('x' * 1_000_000)")
    other = Caller("other", "key")
    async with open_service(tmp_path / "data") as service:
        monkeypatch.setattr(service.runs, "_ended", EndedRuns(service.clock, 10_000_000))

        async def ended(caller: Caller, sandbox: str) -> RunHandle:
            handle = await service.runs.start(caller, sandbox, "default", large)
            assert (await handle.result()).ok
            return handle

        mine = (await service.sandboxes.create(ME)).id
        theirs = (await service.sandboxes.create(other)).id
        kept = await ended(other, theirs)
        handles = [await ended(ME, mine) for _ in range(5)]
        assert await service.runs.attach(other, theirs, kept.run_id) is kept
        assert await service.runs.attach(ME, mine, handles[-1].run_id) is handles[-1]
        with pytest.raises(NotFound):  # of the owner that has most, the oldest run
            await service.runs.attach(ME, mine, handles[0].run_id)


HANG = "import time; print('on', flush=True); time.sleep(600)"


async def test_owner_within_its_share_gets_the_next_kernel_that_becomes_free(
    tmp_path: Path,
) -> None:
    """It was refused as long as all kernels were busy with the runs of others."""
    greedy, other = Caller("greedy", "key"), Caller("other", "key")
    async with open_service(tmp_path / "data", kernels_max=2, kernels_per_owner=3) as service:
        boxes = [await service.sandboxes.create(greedy) for _ in range(3)]
        begun = [await started(service, greedy, box.id, HANG) for box in boxes[:2]]
        for handle in begun:
            await printed(handle)
        queue = service.sandboxes.kernels.queue
        waiting = []
        for caller in (ME, other):  # the second one waits behind the first one
            box = await service.sandboxes.create(caller)
            waiting.append(await started(service, caller, box.id, "import time; time.sleep(0.1)"))
            await eventually(lambda: queue.waiting == len(waiting))
        with pytest.raises(Unavailable) as full:
            await (await started(service, greedy, boxes[2].id, "1")).result()
        assert full.value.code == "too_many_kernels"
        await begun[0].interrupt()
        assert (await waiting[0].result()).ok
        assert not waiting[1].ended
        assert queue.waiting == 1
        await begun[1].interrupt()
        assert (await waiting[1].result()).ok
        assert queue.waiting == 0


async def test_wait_for_a_kernel_has_an_end(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", kernels_max=1) as service:
        box = await service.sandboxes.create(Caller("greedy", "key"))
        begun = await started(service, Caller("greedy", "key"), box.id, HANG)
        await printed(begun)
        kernels = service.sandboxes.kernels
        kernels.queue = RoomQueue(wait_s=0.2)
        mine = await service.sandboxes.create(ME)
        with pytest.raises(Unavailable) as full:
            await run(service, mine.id, "1")
        assert full.value.code == "too_many_kernels"
        assert (kernels.queue.waiting, kernels._counts().total()) == (0, 1)
        await begun.interrupt()


async def test_interrupted_run_no_longer_waits_for_a_kernel(tmp_path: Path) -> None:
    async with open_service(tmp_path / "data", kernels_max=1) as service:
        box = await service.sandboxes.create(Caller("greedy", "key"))
        begun = await started(service, Caller("greedy", "key"), box.id, HANG)
        await printed(begun)
        kernels = service.sandboxes.kernels
        mine = await service.sandboxes.create(ME)
        handle = await started(service, ME, mine.id, "1")
        await eventually(lambda: kernels.queue.waiting == 1)
        await handle.interrupt()
        assert (await handle.result()).status is Status.INTERRUPTED
        assert (kernels.queue.waiting, kernels._counts().total()) == (0, 1)
        await begun.interrupt()


async def started(service: Service, caller: Caller, sandbox_id: str, code: str) -> RunHandle:
    return await service.runs.start(caller, sandbox_id, "default", RunRequest("python", code))


@pytest.mark.full_tier
async def test_code_that_waits_has_a_limit_for_each_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner's waiting code could fill the limit of all."""
    monkeypatch.setattr(runs, "_ASKED_PER_OWNER", 1000)
    async with open_service(tmp_path / "data") as service:
        mine = await service.sandboxes.create(ME)
        large = RunRequest("python", "#" * 600)
        first = await service.runs.start(ME, mine.id, "default", large)
        with pytest.raises(Unavailable) as full:
            await service.runs.start(ME, mine.id, "default", large)
        assert (full.value.code, full.value.details["limit"]) == ("queue_full", 1000)
        other = Caller("other", "key")
        theirs = await service.sandboxes.create(other)
        handles = [first, await service.runs.start(other, theirs.id, "default", large)]
        for handle in handles:
            await handle.result()
        assert (await run(service, mine.id, "#" * 600)).ok
        assert not service.runs._asked


async def test_an_owner_has_a_limit_of_valid_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,476 tokens in 4 s, and no limit (holes 2.16). Those that ended make room."""
    monkeypatch.setattr(auth, "TOKENS_PER_OWNER", 3)
    async with open_service(tmp_path / "data") as service:
        access = service.access

        async def make(owner: str = "me", ttl_s: float = 60) -> str:
            token, _ = await access.make_token(owner, user_id="u", ttl_s=ttl_s)
            return token.id

        made = [await make() for _ in range(3)]
        with pytest.raises(Unavailable) as full:
            await make()
        assert full.value.code == "too_many_tokens"
        await make("other")
        for _ in range(10):
            await access.revoke_token(made.pop())
            made.append(await make())
        assert len(await access.tokens("me")) <= 6


async def test_versions_of_a_profile_that_no_conversation_uses_are_forgotten() -> None:
    """830 changes in 3 s took 30 MiB of the store, for ever (holes 2.16)."""
    with short_directory() as directory:
        async with desk(directory) as at:
            await profiles_are_forgotten(at)


async def profiles_are_forgotten(at: Desk) -> None:
    async with at.served.client() as client:
        place = "/api/v1/agents"
        new = {"agent_id": "helper", "profile": {"instructions": "0"}}
        reply = await client.post(place, json=new)
        assert reply.status_code == 201, reply.text
        message = {**ANN, "conversation_id": "c1", "message": "hi"}
        await client.post("/api/v1/chat", json=message)
        for number in range(1, 31):
            body = {"instructions": str(number)}
            reply = await client.put(f"{place}/helper", json=body)
            assert reply.json()["version"] == number + 1
        rows = await at.served.service.store.rows("SELECT version FROM agent_profiles")
        assert [row[0] for row in rows] == [1, *range(22, 32)]
        (row,) = await chats.named(
            at.served.service.store, (await owner_of(client)), "c1", user_id="ann"
        )
        stored = await at.served.service.agent_profiles.of_chat(row.profile_id)
        assert stored is not None
        assert stored.profile.instructions == "0"
        await client.delete(f"{place}/helper")
        rows = await at.served.service.store.rows("SELECT version FROM agent_profiles")
        assert [row[0] for row in rows] == [1]


async def owner_of(client: httpx.AsyncClient) -> str:
    owner: str = (await client.get("/api/v1/me")).json()["owner"]
    return owner
