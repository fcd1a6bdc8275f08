"""Uploads over a real socket: byte for byte, bounded, and hostile in every way."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live_app import Served, live
from places import small_disk
from sessions_calls import (
    C1,
    code_of,
    get,
    left,
    multipart,
    names,
    new_session,
    post,
    put,
    run,
    until,
    url,
)

from sbx.api import downloads

BYTES = bytes(range(256)) * 4000  # 1 MB of every byte
# -- up, listed, down, deleted ---------------------------------------------------------------------


async def test_an_upload_is_listed_read_inside_and_comes_back_byte_for_byte(
    client: httpx.AsyncClient,
) -> None:
    session = await new_session(client)
    made = await put(client, session, "data.csv", BYTES, subdir="temparea")
    assert made.status_code == 201
    digest = hashlib.sha256(BYTES).hexdigest()
    body = made.json()
    assert body == {
        "name": "data.csv",
        "size": len(BYTES),
        "sha256": digest,
        "path": "/workspace/uploads/temparea/data.csv",
        "uploaded_at": body["uploaded_at"],
    }
    await put(client, session, "a.txt", b"")
    listed = (await client.get(url(session, "/files"), params=C1)).json()
    assert listed["files"] == ["a.txt", "data.csv"]
    assert listed["items"][1] == body
    down = await get(client, session, "data.csv")
    assert down.content == BYTES
    assert down.headers["content-length"] == str(len(BYTES))
    assert down.headers["etag"] == f'"{digest}"'
    assert down.headers["accept-ranges"] == "bytes"
    assert down.headers["content-type"] == "application/octet-stream"
    assert "data.csv" in down.headers["content-disposition"]
    seen = await run(
        client,
        session,
        "import hashlib; hashlib.sha256(open('/workspace/uploads/temparea/data.csv','rb').read())"
        ".hexdigest()",
    )
    assert seen.json()["result"] == f"'{digest}'"
    gone = await client.delete(url(session, "/files/data.csv"), params=C1)
    assert (gone.status_code, gone.content) == (204, b"")
    again = await client.delete(url(session, "/files/data.csv"), params=C1)
    assert code_of(again) == (404, "file_not_found")
    assert code_of(await get(client, session, "data.csv")) == (404, "file_not_found")
    assert await names(client, session) == ["a.txt"]


async def test_what_the_code_writes_is_never_listed_as_an_upload(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    code = (
        "open('x.csv','w').write('1'); open('uploads/generated/y.csv','w').write('2')\n"
        "try:\n    open('uploads/temparea/z.csv','w')\nexcept OSError as e:\n    print(e.errno)"
    )
    assert (await run(client, session, code)).json()["stdout"] in ("30\n", "13\n")
    assert await names(client, session) == []
    assert code_of(await get(client, session, "x.csv")) == (404, "file_not_found")


async def test_conversations_see_only_their_own_uploads(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    await put(client, session, "one.csv", b"1", "c1")
    await put(client, session, "two.csv", b"2", "c2")
    await put(client, session, "both.csv", b"first", "c1")
    await put(client, session, "both.csv", b"second", "c2")
    assert await names(client, session, "c1") == ["both.csv", "one.csv"]
    assert await names(client, session, "c2") == ["both.csv", "two.csv"]
    inside = await run(client, session, "import os; os.listdir('uploads/temparea')", "c2")
    assert sorted(eval(inside.json()["result"])) == ["both.csv", "two.csv"]
    only = await client.get(url(session, "/files/two.csv"))
    assert (only.status_code, only.text) == (200, "2")
    which = await client.get(url(session, "/files/both.csv"))
    assert code_of(which) == (400, "conversation_required")
    assert which.json()["error"]["details"]["available"] == ["c1", "c2"]
    await client.delete(url(session, "/files/both.csv"), params=C1)
    assert (await client.get(url(session, "/files/both.csv"))).text == "second"
    assert code_of(await client.get(url(session, "/files/none.csv"))) == (404, "file_not_found")


async def test_the_conversation_may_be_named_by_header_query_or_field(
    client: httpx.AsyncClient,
) -> None:
    session = await new_session(client)
    file = {"file": ("h.csv", b"x")}
    upload = url(session, "/files/upload")
    for headers in (
        {"conversation_id": "c1"},
        {"X-Conversation-Id": "c1"},
        {"conversation_id": "c1", "x-conversation-id": "c1", "subdir": "temparea"},
    ):
        assert (await client.post(upload, files=file, headers=headers)).status_code == 201
        listed = await client.get(url(session, "/files"), headers=headers)
        assert listed.json()["files"] == ["h.csv"]
        down = await client.get(url(session, "/files/h.csv"), headers=headers)
        assert down.content == b"x"
        gone = await client.delete(url(session, "/files/h.csv"), headers=headers)
        assert gone.status_code == 204
    unicode = {b"conversation_id": "gespräch".encode()}
    assert (await client.post(upload, files=file, headers=unicode)).status_code == 201
    assert await names(client, session, "gespräch") == ["h.csv"]
    bad: list[tuple[dict[str, str], dict[str, str]]] = [
        ({"conversation_id": "c1"}, {"conversation_id": "c2"}),
        ({"conversation_id": "c1", "x-conversation-id": "c2"}, {}),
        ({"conversation_id": "a/b"}, {}),
        ({"conversation_id": "c1", "subdir": "generated"}, {}),
        ({}, {"conversation_id": "c1", "subdir": "../temparea"}),
        ({}, {"conversation_id": ".."}),
        ({}, {"conversation_id": ""}),
        ({}, {"conversation_id": "x" * 129}),
    ]
    garbled = await client.get(url(session, "/files"), headers={b"conversation_id": b"\xff"})
    assert code_of(garbled) == (400, "validation_error")
    for headers, params in bad:
        reply = await client.get(url(session, "/files"), headers=headers, params=params)
        assert code_of(reply) == (400, "validation_error"), (headers, params)
    assert code_of(await client.get(url(session, "/files"))) == (400, "conversation_required")
    gone = await client.delete(url(session, "/files/h.csv"))
    assert code_of(gone) == (400, "conversation_required")
    assert code_of(await client.post(upload, files=file)) == (400, "conversation_required")
    unknown = await client.get(url(session, "/files"), params={"conversation_id": "nobody"})
    assert code_of(unknown) == (404, "not_found")


async def test_a_file_may_come_before_the_fields_that_say_whose_it_is(
    served: Served, client: httpx.AsyncClient
) -> None:
    session = await new_session(client)
    body = multipart(
        ('name="file"; filename="early.csv"', BYTES),
        ('name="conversation_id"', b"c1"),
        ('name="subdir"', b"temparea"),
    )
    assert (await post(client, session, body)).status_code == 201
    assert (await get(client, session, "early.csv")).content == BYTES
    headers = {"conversation_id": "c2"}
    assert code_of(await post(client, session, body, **headers)) == (400, "validation_error")
    bad = multipart(('name="file"; filename="bad.csv"', b"x"), ('name="subdir"', b"elsewhere"))
    assert code_of(await post(client, session, bad, conversation_id="c1")) == (
        400,
        "validation_error",
    )
    assert await names(client, session) == ["early.csv"]
    assert await asyncio.to_thread(left, served) == []


async def test_ranges_and_conditions(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    etag = f'"{(await put(client, session, "r.csv", BYTES)).json()["sha256"]}"'
    part = await get(client, session, "r.csv", range="bytes=1000-300999")
    assert (part.status_code, part.content) == (206, BYTES[1000:301_000])
    assert part.headers["content-range"] == f"bytes 1000-300999/{len(BYTES)}"
    assert (await get(client, session, "r.csv", range="bytes=-5")).content == BYTES[-5:]
    none = await get(client, session, "r.csv", range=f"bytes={len(BYTES)}-")
    assert code_of(none) == (416, "range_not_satisfiable")
    assert none.headers["content-range"] == f"bytes */{len(BYTES)}"
    same = await get(client, session, "r.csv", **{"if-none-match": etag})
    assert (same.status_code, same.content) == (304, b"")
    head = await client.head(url(session, "/files/r.csv"), params=C1)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(BYTES))
    await put(client, session, "r.csv", b"new")
    stale = {"range": "bytes=0-1", "if-range": etag}
    assert (await get(client, session, "r.csv", **stale)).content == b"new"


# -- limits: each names its own, and leaves what was there -----------------------------------------


async def test_too_large_too_many_and_of_the_wrong_type(
    served: Served, client: httpx.AsyncClient
) -> None:
    config = {"max_file_size": 2, "max_file_size_unit": "KB", "max_file_count": 2}
    session = await new_session(client, file_upload_config=config)
    assert (await put(client, session, "a.csv", b"x" * 2048)).status_code == 201
    large = await put(client, session, "a.csv", b"y" * 2049)
    assert code_of(large) == (413, "file_too_large")
    assert large.json()["error"]["details"]["limit"] == 2048
    huge = await put(client, session, "b.csv", b"y" * 5_000_000)
    assert code_of(huge) == (413, "file_too_large")
    body = multipart(
        ('name="file"; filename="b.csv"', b"y" * 2049), ('name="conversation_id"', b"c1")
    )
    assert code_of(await post(client, session, body)) == (413, "file_too_large")
    wrong = await put(client, session, "a.exe", b"x")
    assert code_of(wrong) == (415, "file_type_not_allowed")
    assert "csv" in wrong.json()["error"]["details"]["limit"]
    assert code_of(await put(client, session, "noextension", b"x")) == (
        415,
        "file_type_not_allowed",
    )
    assert (await put(client, session, "B.CSV", b"x")).status_code == 201
    many = await put(client, session, "c.csv", b"x")
    assert code_of(many) == (409, "too_many_files")
    assert many.json()["error"]["details"]["limit"] == 2
    assert (await put(client, session, "a.csv", b"replaced")).status_code == 201
    assert (await put(client, session, "c.csv", b"x", "c2")).status_code == 201
    assert await names(client, session) == ["B.CSV", "a.csv"]
    assert (await get(client, session, "a.csv")).content == b"replaced"
    assert await asyncio.to_thread(left, served) == []


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk("24m") as disk:
        yield disk


@pytest.mark.needs("root")
async def test_no_space_is_507_and_leaves_what_was_there(disk: Path) -> None:
    async with live(disk) as served, served.client() as client:
        session = await new_session(client)
        assert (await put(client, session, "a.csv", b"old")).status_code == 201
        assert code_of(await put(client, session, "a.csv", b"x" * (40 << 20))) == (507, "no_space")
        early = multipart(
            ('name="file"; filename="a.csv"', b"x" * (40 << 20)), ('name="conversation_id"', b"c1")
        )
        assert code_of(await post(client, session, early)) == (507, "no_space")
        assert await asyncio.to_thread(left, served) == []
        assert (await get(client, session, "a.csv")).content == b"old"
        assert (await put(client, session, "a.csv", b"new")).status_code == 201


async def is_open() -> bool:
    return any("big.csv" in file.path for file in psutil.Process().open_files())


async def none_is_open() -> bool:
    return not await is_open()


async def test_a_download_whose_client_goes_away_holds_nothing(
    served: Served, client: httpx.AsyncClient
) -> None:
    session = await new_session(client)
    await put(client, session, "big.csv", b"x" * 20_000_000)
    for _ in range(5):
        async with (
            served.client() as other,
            other.stream("GET", url(session, "/files/big.csv"), params=C1) as down,
        ):
            await anext(down.aiter_bytes())
    await until(none_is_open)


async def test_a_download_that_its_client_does_not_take_is_given_up(
    served: Served, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_STALLED_S", 0.3)
    session = await new_session(client)
    await put(client, session, "big.csv", b"x" * 20_000_000)

    _, writer = await asyncio.open_unix_connection(str(served.socket), limit=1000)
    writer.write(f"GET {url(session, '/files/big.csv')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await until(is_open)
    await until(none_is_open)
    writer.close()
