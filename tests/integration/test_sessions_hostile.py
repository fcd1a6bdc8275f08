"""Hostile names and bodies of uploads over a real socket: 4xx in bounded time, and nothing left."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
import pytest
from live_app import Served
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

# -- hostile names ---------------------------------------------------------------------------------

GOOD = [
    "a b.csv",
    "données.csv",
    "\u202egpj.csv",
    "💥.csv",
    "..csv",
    "a..b.csv",
    "%2e%2e%2f.csv",
    "~.csv",
    "$(id).csv",
    "'\"`;&|.csv",
    "-rf.csv",
    ".csv.csv",
    "\u2028.csv",
    "é" * 125 + "a.csv",
]
assert len(GOOD[-1].encode()) == 255


async def test_odd_names_are_kept_byte_for_byte(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    for name in GOOD:
        made = await raw_put(client, session, name.encode(), b"x")
        assert made.status_code == 201, (name, made.text)
        assert made.json()["name"] == name
        down = await get(client, session, name)
        assert down.content == b"x"
        assert quote(name, safe="!#$&+-.^_`|~") in down.headers["content-disposition"]
    assert await names(client, session) == sorted(GOOD, key=lambda name: name.encode())
    inside = await run(client, session, "import os; sorted(os.listdir('uploads/temparea'))")
    assert sorted(eval(inside.json()["result"])) == sorted(GOOD)
    for name in GOOD:
        reply = await client.delete(url(session, f"/files/{quote(name, safe='')}"), params=C1)
        assert reply.status_code == 204
    assert await names(client, session) == []


async def raw_put(
    client: httpx.AsyncClient, session: str, name: bytes, content: bytes
) -> httpx.Response:
    quoted = name.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    body = b'--B\r\nContent-Disposition: form-data; name="file"; filename="' + quoted + b'"\r\n\r\n'
    return await post(client, session, body + content + b"\r\n--B--\r\n", conversation_id="c1")


BAD = [
    b"",
    b"..",
    b"../x.csv",
    b"/etc/passwd.csv",
    b"a\\b.csv",
    b"C:\\x.csv",
    b"a\0.csv",
    b"a\x7f.csv",
    b"a\xff.csv",
    b"\xc0\xae\xc0\xae\xc0\xaf.csv",
    b"\xed\xa0\x80.csv",
    b"x" * 252 + b".csv",
    "é".encode() * 126 + b".csv",
]


@pytest.mark.parametrize("name", BAD)
async def test_names_that_cannot_be_are_invalid_path_and_leave_nothing(
    served: Served, client: httpx.AsyncClient, name: bytes
) -> None:
    session = await new_session(client)
    reply = await raw_put(client, session, name, b"x")
    assert code_of(reply) == (400, "invalid_path")
    listed = await client.get(url(session, "/files"), params=C1)
    assert listed.status_code == 404 or listed.json()["files"] == []
    assert await asyncio.to_thread(left, served) == []


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../../../etc/passwd",
        "%2e%2e",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "..%2fx.csv",
        "..%5cx.csv",
        "%2fetc%2fpasswd",
        "a%2fb.csv",
        "a%00.csv",
        "a%0a.csv",
        "%ff.csv",
        "%c0%ae%c0%ae%c0%afx.csv",
        "x" * 256,
        "%252e%252e%252fx.csv",
        "....//x.csv",
        ".%00./x.csv",
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_paths_that_lead_out_lead_nowhere(
    served: Served, client: httpx.AsyncClient, path: str, method: str
) -> None:
    """Sent as they are: a client would fold them."""
    session = quote(await new_session(client), safe="")
    head = f"{method} /api/v1/sessions/{session}/files/{path}?conversation_id=c1 HTTP/1.1"
    await put(client, session, "there.csv", b"x")
    reply = await served.raw(f"{head}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    status = int(reply.split()[1])
    assert status in (400, 404), reply[:200]
    assert b'"error"' in reply
    assert await names(client, session) == ["there.csv"]


# -- hostile bodies --------------------------------------------------------------------------------

FILE = ('name="file"; filename="a.csv"', b"x" * 100)
WHOLE = multipart(('name="conversation_id"', b"c1"), FILE)


async def rejected(served: Served, client: httpx.AsyncClient, session: str, body: bytes) -> str:
    """The code of the refusal of a form that leaves nothing."""
    reply = await post(client, session, body)
    assert 400 <= reply.status_code < 500, reply.text
    listed = await client.get(url(session, "/files"), params=C1)
    assert listed.status_code == 404 or listed.json()["files"] == []
    assert await asyncio.to_thread(left, served) == []
    return code_of(reply)[1]


async def test_forms_that_are_cut_anywhere_leave_nothing(
    served: Served, client: httpx.AsyncClient
) -> None:
    session = await new_session(client)
    for length in (*range(0, len(WHOLE) - 4, 9), len(WHOLE) - 5):
        code = await rejected(served, client, session, WHOLE[:length])
        assert code in ("truncated_body", "malformed_form"), WHOLE[:length]
    tail = multipart(('name="conversation_id"', b"c1"), FILE, end=b"--B\r\nContent-Dis")
    assert await rejected(served, client, session, tail) == "truncated_body"
    early = multipart(FILE, ('name="conversation_id"', b"c1"), end=b"")
    assert await rejected(served, client, session, early) == "truncated_body"


async def test_forms_with_too_much_of_anything_are_refused(
    served: Served, client: httpx.AsyncClient
) -> None:
    session = await new_session(client)
    field = ('name="x"', b"1")
    fields = multipart(*[(f'name="f{n}"', b"1") for n in range(10_000)])
    assert await rejected(served, client, session, fields) == "too_many_parts"
    assert await rejected(served, client, session, multipart(FILE, FILE)) == "validation_error"
    assert await rejected(served, client, session, multipart(field, field)) == "validation_error"
    large = multipart(('name="conversation_id"', b"c" * 3_000_000))
    assert await rejected(served, client, session, large) == "field_too_large"
    heads = b"--B\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(9_999)) + b"\r\n"
    code = await rejected(served, client, session, heads)
    assert code in ("headers_too_large", "malformed_form")
    other = multipart(('name="conversation_id"', b"c1"), ('name="b"; filename="b.csv"', b"x"))
    assert await rejected(served, client, session, other) == "validation_error"


async def test_a_form_without_a_file_says_so_to_both_readers(client: httpx.AsyncClient) -> None:
    session = await new_session(client)
    for body in (multipart(('name="conversation_id"', b"c1")), multipart()):
        reply = await post(client, session, body)
        assert code_of(reply) == (422, "validation_error")
        assert reply.json()["detail"][0]["loc"] == ["body", "file"]
    for kind in ("application/json", "multipart/form-data", "text/plain; boundary=B"):
        reply = await post(client, session, WHOLE, **{"content-type": kind})
        assert code_of(reply) == (415, "unsupported_media_type")


@pytest.mark.parametrize("declared", [len(WHOLE) + 10, len(WHOLE) - 10, 10**15])
async def test_a_wrong_length_leaves_nothing(
    served: Served, client: httpx.AsyncClient, declared: int
) -> None:
    session = quote(await new_session(client), safe="")
    head = (
        f"POST /api/v1/sessions/{session}/files/upload HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: {declared}\r\n"
        "Connection: close\r\n\r\n"
    )
    reply = await served.raw(head.encode() + WHOLE, then_end=True)
    assert not reply or reply.split()[1].startswith(b"4"), reply
    listed = await client.get(url(session, "/files"), params=C1)
    assert listed.status_code == 404 or listed.json()["files"] == []
    assert await asyncio.to_thread(left, served) == []


async def test_an_upload_whose_client_goes_away_leaves_nothing(
    served: Served, client: httpx.AsyncClient
) -> None:
    session = await new_session(client)
    await put(client, session, "a.csv", b"old")

    async def body() -> AsyncIterator[bytes]:
        yield WHOLE[:-60]
        for _ in range(20):
            yield b"x" * 100_000
        raise ConnectionError("the client died")

    headers = {"content-type": "multipart/form-data; boundary=B"}
    with pytest.raises(ConnectionError):
        await client.post(url(session, "/files/upload"), content=body(), headers=headers)

    async def nothing_is_left() -> bool:
        return not await asyncio.to_thread(left, served)

    await until(nothing_is_left)
    assert (await get(client, session, "a.csv")).content == b"old"
