"""The routes of files beyond reading and writing: who may, what is refused, what survives."""

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from bay_calls import made, refused
from live_app import Served, live
from places import short_directory

from sbx.client import Client
from sbx.runtime.files import resumable_uploads
from tests.tiers import rows

pytestmark = pytest.mark.core


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def place(client: httpx.AsyncClient, conversation: str = "default") -> str:
    return f"/v1/sandboxes/{(await made(client))['id']}/conversations/{conversation}"


# -- who may ---------------------------------------------------------------------------------------

CALLS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "find?pattern=*", None),
    ("GET", "grep?pattern=a", None),
    ("GET", "watch", None),
    ("GET", "archive", None),
    ("PUT", "archive", b""),
    ("POST", "move", {"source": "a", "target": "b"}),
    ("POST", "copy", {"source": "a", "target": "b"}),
    ("POST", "replace", {"path": "a", "old": "a", "new": "b"}),
    ("POST", "chmod", {"path": "a", "mode": 420}),
    ("POST", "partials", {"path": "a", "size": 1}),
    ("GET", "partials/up-1", None),
    ("PATCH", f"partials/up-1?offset=0&sha256={sha(b'')}", b""),
    ("POST", "partials/up-1/finish", {"sha256": sha(b"")}),
    ("DELETE", "partials/up-1", None),
)


async def called(client: httpx.AsyncClient, at: str, call: tuple[str, str, Any]) -> httpx.Response:
    method, what, body = call
    sent = {"content": body} if isinstance(body, bytes) else {"json": body} if body else {}
    return await client.request(method, f"{at}/{what}", **sent)


async def test_a_token_of_another_conversation_reaches_nothing(
    served: Served, client: httpx.AsyncClient
) -> None:
    answer = await client.post("/api/v1/sessions", json={"user_id": "u", "agent_id": "a"})
    at = f"/v1/sandboxes/{answer.json()['session_id']}/conversations/mine"
    assert (await client.put(f"{at}/files?path=a", content=b"a")).status_code == 200
    begun = (await client.post(f"{at}/partials", json={"path": "p", "size": 1})).json()
    bounds = {"user_id": "u", "agent_id": "a", "conversation_id": "other", "ttl_s": 60}
    token = await client.post("/v1/admin/tokens", json={**bounds, "owner": f"uid:{os.getuid()}"})
    async with served.client(token.json()["token"]) as other:
        for method, what, body in CALLS:
            call = (method, what.replace("up-1", begun["id"]), body)
            refused(await called(other, at, call), 404, "not_found")
            mine = await called(other, at.replace("/mine", "/other"), call)
            assert mine.status_code != 200 or what == "archive" or b"up-" not in mine.content
    assert (await client.get(f"{at}/partials/{begun['id']}")).json()["offset"] == 0


async def test_a_token_needs_the_scope_of_what_it_does(
    served: Served, client: httpx.AsyncClient
) -> None:
    answer = await client.post("/api/v1/sessions", json={"user_id": "r", "agent_id": "a"})
    at = f"/v1/sandboxes/{answer.json()['session_id']}/conversations/c"
    await client.put(f"{at}/files?path=a", content=b"a")
    bounds = {"user_id": "r", "scopes": ["files:read"], "ttl_s": 60}
    token = await client.post("/v1/admin/tokens", json={**bounds, "owner": f"uid:{os.getuid()}"})
    async with served.client(token.json()["token"]) as reader:
        assert (await reader.get(f"{at}/grep?pattern=a")).json()["matches"]
        refused(await reader.get(f"{at}/archive"), 403, "forbidden")
        for call in CALLS:
            if call[0] != "GET" and call[1] != "archive":
                refused(await called(reader, at, call), 404, "not_found")
    assert (await client.get(f"{at}/files?path=a")).content == b"a"


async def test_a_look_makes_no_conversation(client: httpx.AsyncClient) -> None:
    at = await place(client, "unknown")
    for call in CALLS:
        if not (call[0] == "PUT" or call[1] == "partials"):
            refused(await called(client, at, call), 404, "not_found")


# -- resumable -------------------------------------------------------------------------------------


async def test_an_upload_goes_on_where_it_was(client: httpx.AsyncClient) -> None:
    at = await place(client)
    data = os.urandom(300_000)
    begun = (await client.post(f"{at}/partials", json={"path": "d/f", "size": len(data)})).json()
    part = f"{at}/partials/{begun['id']}"

    async def append(offset: int, piece: bytes, checksum: str | None = None) -> httpx.Response:
        params = {"offset": str(offset)} | ({"sha256": checksum} if checksum else {})
        return await client.patch(part, params=params, content=piece)

    assert (await append(0, data[:100_000], sha(data[:100_000]))).json()["offset"] == 100_000
    refused(await append(0, data[:100_000]), 409, "wrong_offset")
    refused(await append(100_000, b"x", sha(b"y")), 400, "checksum_mismatch")
    refused(await append(100_000, data), 413, "piece_too_large")
    refused(await client.post(f"{part}/finish", json={"sha256": sha(data)}), 409,
            "upload_incomplete")  # fmt: skip
    assert (await client.get(part)).json()["offset"] == 100_000
    assert (await append(100_000, data[100_000:])).json()["offset"] == 300_000
    refused(await client.post(f"{part}/finish", json={"sha256": sha(b"")}), 400,
            "checksum_mismatch")  # fmt: skip
    refused(await client.get(f"{at}/stat?path=d/f"), 404, "file_not_found")
    for _ in range(2):  # whoever did not hear of it asks again
        done = await client.post(f"{part}/finish", json={"sha256": sha(data)})
        assert done.json() == {"size": 300_000, "upload": None}
    assert (await client.get(f"{at}/files?path=d/f")).content == data
    part_of = await client.get(f"{at}/files?path=d/f", headers={"range": "bytes=5-9"})
    assert (part_of.status_code, part_of.content) == (206, data[5:10])
    refused(await client.get(part), 404, "upload_not_found")


async def test_unfinished_uploads_are_few_and_small(
    served: Served, client: httpx.AsyncClient
) -> None:
    at = await place(client)
    begin = f"{at}/partials"
    refused(await client.post(begin, json={"path": "f", "size": 1 << 50}), 413, "file_too_large")
    refused(await client.post(begin, json={"path": "../f", "size": 1}), 400, "invalid_path")
    refused(await client.post(begin, json={"path": "a/b", "size": 1, "upload": True}), 400,
            "invalid_path")  # fmt: skip
    asked = {"path": "f", "size": 4}
    before = set(_staged(served))
    asking = (client.post(begin, json=asked) for _ in range(2 * resumable_uploads.PARTIALS_MAX))
    begun = await asyncio.gather(*asking)  # at once: none is to slip past the count
    ids = [one.json()["id"] for one in begun if one.status_code == 201]
    assert len(ids) == resumable_uploads.PARTIALS_MAX
    refused(await client.post(begin, json={"path": "f", "size": 1}), 409, "too_many_partials")
    assert len(set(_staged(served)) - before) == resumable_uploads.PARTIALS_MAX
    for id in ids:
        assert (await client.delete(f"{begin}/{id}")).status_code == 204
    assert set(_staged(served)) == before


def _staged(served: Served) -> list[Path]:
    return list(served.socket.parent.rglob("staging/*"))


async def test_an_unfinished_upload_is_forgotten_in_time(
    client: httpx.AsyncClient, served: Served
) -> None:
    at = await place(client)
    sandbox = at.split("/")[3]
    begun = (await client.post(f"{at}/partials", json={"path": "f", "size": 4})).json()
    async with served.service.sandboxes.using(
        served.service.access.from_peer(os.getuid()), sandbox, scope="files:write"
    ) as use:
        held = use.conversation("default").files.partials
        held._lifetime_s = 0.0
        await held._sweep()
    refused(await client.get(f"{at}/partials/{begun['id']}"), 404, "upload_not_found")


@contextlib.asynccontextmanager
async def breaking(socket: Path, at: Path, cuts: list[int]) -> AsyncIterator[list[int]]:
    """A way to `socket` by `at` that is cut after so many bytes, once for each of `cuts`."""
    done: list[int] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def carry(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        left = cuts[0] if up and cuts else 1 << 60
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                left -= len(data)
                if left < 0 and cuts:
                    done.append(cuts.pop(0))
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        there = await asyncio.open_unix_connection(str(socket))
        ways = [
            asyncio.ensure_future(carry(reader, there[1], up=True)),
            asyncio.ensure_future(carry(there[0], writer, up=False)),
        ]
        with contextlib.suppress(asyncio.CancelledError):  # the end of the test
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, there[1]):
            end.transport.abort()
        await asyncio.wait(ways)

    server = await asyncio.start_unix_server(serve, str(at))
    try:
        yield done
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_upload_survives_lost_connections(tmp_path: Path) -> None:
    data = os.urandom(36 << 20)
    (tmp_path / "large.bin").write_bytes(data)
    with short_directory() as directory:
        async with (
            live(directory) as served,
            breaking(served.socket, directory / "w", [3 << 20, 20 << 20, 1 << 20]) as cut,
            Client(directory / "w") as client,
            await client.create() as box,
        ):
            answer: list[int] = []
            size = await box.files.upload(
                tmp_path / "large.bin", "large.bin", on_progress=lambda done, _: answer.append(done)
            )
            assert size == len(data)
            assert len(cut) == 3
            assert answer == sorted(answer)
            assert answer[-1] == size
            run = await box.run(
                "import hashlib; hashlib.sha256(open('large.bin', 'rb').read()).hexdigest()"
            )
            assert run.result == repr(sha(data))
            put = await box.uploads.put(tmp_path / "large.bin", "up.bin")
            assert (put.size, put.sha256) == (len(data), sha(data))
            assert not _staged(served)


# -- archives and watches --------------------------------------------------------------------------


async def test_an_archive_has_a_name_and_goes_back(client: httpx.AsyncClient) -> None:
    at = await place(client)
    await client.put(f"{at}/files?path=d/a", content=b"a" * 1000)
    got = await client.get(f"{at}/archive?path=d")
    assert got.headers["content-type"] == "application/gzip"
    assert 'filename="d.tar.gz"' in got.headers["content-disposition"]
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        assert tar.getnames() == ["a"]
    sent = await client.put(f"{at}/archive?path=e", content=got.content)
    assert sent.json() == {"entries": 1, "bytes": 1000, "skipped": 0}
    refused(await client.put(f"{at}/archive?path=e", content=b"x"), 400, "not_an_archive")
    refused(await client.get(f"{at}/archive?path=nowhere"), 404, "file_not_found")


def tar_of(*sizes: int) -> bytes:
    """The heads of a tar that announce files of these sizes."""
    heads = []
    for number, size in enumerate(sizes):
        heads.append(head := tarfile.TarInfo(str(number)))
        head.size = size
    return b"".join(head.tobuf() for head in heads)


def zip_of(entries: int, size: int = 0) -> bytes:
    """A zip with empty files that announce this `size`, but for the first."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for number in range(entries):
            zipped.writestr(str(number), b"")
        for member in zipped.infolist()[1:]:
            member.file_size = size
    return held.getvalue()


GIB = 1 << 30
TOO_LARGE: dict[str, tuple[Callable[[], bytes], str, int]] = {
    "tar, entries": (lambda: tar_of(*[0] * 50_001), "entries", 50_000),
    "tar, file": (lambda: tar_of(0, 600 << 20), "file_bytes", GIB // 2),
    "zip, bytes": (lambda: zip_of(4, GIB // 2), "bytes", GIB),
    "zip, entries": (lambda: zip_of(50_001), "entries", 50_000),
    "zip, file": (lambda: zip_of(2, 600 << 20), "file_bytes", GIB // 2),
}


@pytest.mark.parametrize(
    ("data", "name", "limit"),
    rows(
        TOO_LARGE.values(),
        ci_tier=[row for name, row in TOO_LARGE.items() if name != "tar, entries"],
    ),
    ids=TOO_LARGE,
)
async def test_an_archive_beyond_a_limit_is_refused_before_anything_is_made(
    client: httpx.AsyncClient, data: Callable[[], bytes], name: str, limit: int
) -> None:
    at = await place(client)
    reply = await client.put(f"{at}/archive?path=d", content=data())
    refused(reply, 413, "archive_too_large")
    error = reply.json()["error"]
    most = error["details"]["limit"]
    used = 1 << 20 if name == "bytes" else 0  # its limit is the room that the workspace has left
    assert limit - used <= most <= limit
    assert error["details"] == {"limit": most, "limit_name": name}
    assert str(most) in error["message"]
    assert (await client.get(f"{at}/find?pattern=d/*")).json()["entries"] == []


async def test_a_client_that_leaves_an_archive_leaves_nothing_running(
    client: httpx.AsyncClient, served: Served
) -> None:
    at = await place(client)
    await client.put(f"{at}/files?path=d/a", content=os.urandom(8 << 20))
    async with client.stream("GET", f"{at}/archive?path=d") as got:
        async for _ in got.aiter_raw(1024):
            break
    shell = {"kind": "shell", "code": "pgrep -fc archive.py"}
    for _ in range(1200):
        run = (await client.post(f"{at}/runs", json=shell)).json()
        if run["stdout"].strip() in ("0", "1"):  # the command itself has the word, too
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail(run["stdout"])


async def test_a_mode_is_a_number(client: httpx.AsyncClient) -> None:
    at = await place(client)
    await client.put(f"{at}/files?path=f", content=b"")
    for mode in (True, "420", 420.0, -1, 0o10000):
        answer = await client.post(f"{at}/chmod", json={"path": "f", "mode": mode})
        refused(answer, 422, "validation_error")
    assert (await client.post(f"{at}/chmod", json={"path": "f", "mode": 420})).status_code == 200


async def test_watches_are_few(client: httpx.AsyncClient) -> None:
    at = await place(client)
    await client.put(f"{at}/files?path=a", content=b"")
    async with contextlib.AsyncExitStack() as held:
        for _ in range(16):
            reply = await held.enter_async_context(client.stream("GET", f"{at}/watch"))
            assert reply.status_code == 200
        over = await client.get(f"{at}/watch")
        assert over.status_code == 429
        assert over.json()["error"]["code"] in ("too_many_watches", "too_many_followers")
    for _ in range(1200):
        async with client.stream("GET", f"{at}/watch") as reply:
            if reply.status_code == 200:
                break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the watches stay")
