"""The pure parts of E2B's surface."""

import asyncio
import gzip
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from e2b.sandbox.signature import get_signature
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from sbx.api.e2b import connect, files, paths
from sbx.api.e2b.code import result_line
from sbx.api.e2b.filesystem import shown
from sbx.api.e2b.processes import end_message
from sbx.api.inner_files import InnerEntry
from sbx.api.signed_urls import hashed, signature_of
from sbx.api.surfaces import E2B, e2b_id, e2b_path, id_of_e2b, surface_of
from sbx.errors import BadRequest, Denied, InvalidPath
from sbx.runtime.processes.live_processes import ProcessEnd

ENVD = {b"e2b-sandbox-id": b"sandbox1", b"e2b-sandbox-port": b"49983"}


@pytest.mark.parametrize(
    ("path", "headers", "own"),
    [
        ("/v2/sandboxes", {}, "/e2b/v2/sandboxes"),
        ("/sandboxes/sandbox1/timeout", {}, "/e2b/sandboxes/sandbox1/timeout"),
        ("//process.Process/Start", ENVD, "/e2b/49983/process.Process/Start"),
        ("/health", ENVD, "/e2b/49983/health"),
        ("/execute", {**ENVD, b"e2b-sandbox-port": b"49999"}, "/e2b/49999/execute"),
        ("/v1/x", {**ENVD, b"e2b-sandbox-port": b"3000"}, "/e2b/ports/3000/v1/x"),
        ("/files", {}, "/e2b/49983/files"),
        ("/health", {}, None),
        ("/v1/sandboxes", {}, None),
        ("/sandboxes-of-others", {}, None),
        ("/execute", {b"e2b-sandbox-port": b"49999"}, None),
        ("/execute", {**ENVD, b"e2b-sandbox-port": b"no"}, None),
    ],
)
def test_requests_of_the_sdk_get_the_prefix(
    path: str, headers: dict[bytes, bytes], own: str | None
) -> None:
    assert e2b_path(path, headers) == own


def test_ids_have_no_dash() -> None:
    assert e2b_id("sandbox-5a7afa86d151") == "sandbox5a7afa86d151"
    assert id_of_e2b("sandbox5a7afa86d151") == "sandbox-5a7afa86d151"
    assert id_of_e2b("sandbox5a7afa86d151-client") == "sandbox-5a7afa86d151"


def request(path: str, **headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "path": path, "headers": named, "query_string": b""})


def test_the_key_and_the_token_of_a_request() -> None:
    key = "a" * 64
    assert E2B.credential(request("/e2b/v2/sandboxes", x_api_key=f"e2b_{key}")) == f"sk-sbx-{key}"
    with pytest.raises(Denied) as raised:
        E2B.credential(request("/e2b/v2/sandboxes", x_api_key="e2b_short"))
    assert raised.value.code == "malformed_key"
    inside: Any = {"e2b_sandbox_id": "sandbox1"}
    for header in ("x_access_token", "e2b_traffic_access_token"):
        link = E2B.link(request("/e2b/49999/execute", **inside, **{header: "t"}))
        assert link == ("t", "sandbox-1", None)
    assert E2B.link(request("/e2b/ports/80/", **inside, x_access_token="t")) == (
        "t",
        "sandbox-1",
        80,
    )
    assert E2B.link(request("/e2b/49999/execute", **inside)) is None
    assert E2B.link(request("/e2b/v2/sandboxes", **inside, x_access_token="t")) is None


def test_error_bodies_of_each_plane() -> None:
    error: dict[str, Any] = {
        "code": "not_found",
        "message": "gone",
        "details": {"sandbox_id": "sandbox-1"},
    }

    def body(path: str, status: int) -> Any:
        surface = surface_of({"path": path})
        assert surface is not None
        return surface.error_body(error, status)

    plain = {"code": 404, "message": "gone", "sandboxId": "sandbox1"}
    assert body("/e2b/sandboxes/x", 404) == plain
    assert body("/e2b/49983/files", 404) == plain
    assert body("/e2b/49983/process.Process/List", 404)["code"] == "not_found"
    assert body("/e2b/49983/filesystem.Filesystem/Stat", 502)["code"] == "unavailable"
    assert body("/e2b/49999/execute", 404) == "gone"


@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.parametrize(("operation", "write"), [("read", False), ("write", True)])
def test_a_signature_is_that_of_the_sdk(user: str, operation: Any, write: bool) -> None:
    theirs = get_signature("/a ü", operation, user or None, "token")
    assert signature_of(hashed("/a ü", user, write=write), "token", None) == theirs["signature"]
    theirs = get_signature("/a ü", operation, user or None, "token", 60)
    end = str(theirs["expiration"])
    assert signature_of(hashed("/a ü", user, write=write), "token", end) == theirs["signature"]


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "absolute", "inside"),
    [
        (None, "/home/user", "/workspace"),
        ("a/../b", "/home/user/b", "/workspace/b"),
        ("~", "/home/user", "/workspace"),
        ("~/x", "/home/user/x", "/workspace/x"),
        ("/home/user/x", "/home/user/x", "/workspace/x"),
        ("/home/user2", "/home/user2", "/home/user2"),
        ("//tmp//x/", "/tmp/x", "/tmp/x"),
        ("../../etc", "/etc", "/etc"),
        ("/workspace/x", "/workspace/x", "/workspace/x"),
    ],
)
def test_paths(path: str | None, absolute: str, inside: str) -> None:
    assert paths.absolute(path) == absolute
    assert paths.inside(absolute) == inside


@pytest.mark.parametrize("path", ["~root/x", "a\0b"])
def test_paths_that_are_none(path: str) -> None:
    with pytest.raises(InvalidPath):
        paths.absolute(path)


def test_a_path_is_shown_as_it_was_named() -> None:
    assert paths.shown("/workspace/a/b", "/home/user/a") == "/home/user/a/b"
    assert paths.shown("/workspace/a/b", "/workspace/a") == "/workspace/a/b"
    assert paths.shown("/workspaces", "/home/user") == "/workspaces"
    assert paths.shown("/tmp/x", "/home/user/link") == "/tmp/x"


def test_a_link_has_the_type_of_its_target() -> None:
    link = InnerEntry(
        path="/workspace/l", kind="symlink", size=3, modified_s=0.0, created_s=0.0, mode=0o777,
        owner="sandbox", group="sandbox", target="/workspace/d", target_kind="directory",
        target_mode=0o755,
    )  # fmt: skip
    assert shown(link, "/home/user") == {
        "name": "l",
        "type": "FILE_TYPE_DIRECTORY",
        "path": "/home/user/l",
        "size": "3",
        "mode": 0o755,
        "permissions": "Lrwxrwxrwx",
        "owner": "sandbox",
        "group": "sandbox",
        "modifiedTime": "1970-01-01T00:00:00Z",
        "isSymlink": True,
        "symlinkTarget": "/home/user/d",
    }


# -- the Connect protocol --------------------------------------------------------------------------


def streamed(*chunks: bytes) -> Request:
    messages = [
        {"type": "http.request", "body": chunk, "more_body": at + 1 < len(chunks)}
        for at, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def contents(*chunks: bytes) -> list[bytes]:
    return [each async for each in connect.messages(streamed(*chunks))]


def test_an_envelope_has_flags_and_a_length() -> None:
    assert connect.envelope({}) == b"\0\0\0\0\x02{}"
    assert connect.envelope({"a": "ü"}, 2) == b"\x02\0\0\0\x0e" + b'{"a":"\\u00fc"}'


@given(st.lists(st.text(max_size=20), max_size=5), st.data())
def test_messages_arrive_in_any_pieces(texts: list[str], data: st.DataObject) -> None:
    body = b"".join(connect.envelope({"t": text}) for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    bounds = list(zip([0, *cuts], [*cuts, len(body)], strict=True))
    received = asyncio.run(contents(*(body[a:b] for a, b in bounds)))
    assert [json.loads(each)["t"] for each in received] == texts


@pytest.mark.parametrize(
    "body",
    [b"\0\0\0", b"\0\0\0\0\x05{}", b"\x01\0\0\0\x02{}", struct.pack(">BI", 0, 1 << 30)],
    ids=["short head", "short message", "compressed", "large"],
)
async def test_messages_that_are_none(body: bytes) -> None:
    with pytest.raises(BadRequest):
        await contents(body)


@pytest.mark.parametrize("message", [connect.envelope({}), b"\0\0\0\0\0", b"\x02\0\0\0\0"])
async def test_other_tasks_run_between_tiny_messages(message: bytes) -> None:
    """Each message copied the rest of its chunk, and empty ones let no other task run: 60,000 of
    them in one chunk stopped the service for 100 ms."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await contents(message * 1000)
    counting.cancel()
    assert turns >= 1000


async def test_one_message_is_needed() -> None:
    class Named(connect.Message):
        some_name: str = ""

    one = connect.envelope({"someName": "x", "unknown": 1})
    assert (await connect.first(streamed(one), Named)).some_name == "x"
    assert connect.parse(b'{"some_name": "y"}', Named).some_name == "y"
    for body in (b"", one + one):
        with pytest.raises(BadRequest):
            await connect.first(streamed(body), Named)
    for content in (b"[]", b"{", b'{"someName": 1}'):
        with pytest.raises(BadRequest):
            connect.parse(content, Named)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1500", 1.5), ("", None), ("-1", None), ("x", None)]
)
def test_the_time_out_of_a_call(text: str, seconds: float | None) -> None:
    headers = [(b"connect-timeout-ms", text.encode())]
    assert connect.timeout_s(Request({"type": "http", "headers": headers})) == seconds


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (ProcessEnd(0), {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        (
            ProcessEnd(3),
            {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"},
        ),
        (
            ProcessEnd(signal=9),
            {
                "exitCode": -1,
                "exited": False,
                "status": "signal: killed",
                "error": "signal: killed",
            },
        ),
    ],
)
def test_the_end_of_a_process(end: ProcessEnd, message: dict[str, Any]) -> None:
    assert end_message(end) == message


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"), [("'a'", "a"), ('"a"', "a"), ("'", "'"), ("'a\"", "'a\""), ("[1]", "[1]")]
)
def test_the_quotes_of_a_result(text: str, shown: str) -> None:
    assert result_line({"text/plain": text}, is_main=True)["text"] == shown


def test_unknown_types_of_a_result_are_extra() -> None:
    assert result_line({"image/png": "cG5n", "x/y": 1}, is_main=False) == {
        "type": "result",
        "is_main_result": False,
        "png": "cG5n",
        "extra": {"x/y": 1},
    }


async def unzipped(body: bytes, size: int) -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return b"".join([piece async for piece in files._unzipped(chunks())])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("end", [b"", bytes(5)])
async def test_a_gzip_body_with_several_members_is_complete(size: int, end: bytes) -> None:
    """All members but the first were lost, and the reply was 200."""
    contents = [b"first\n", b"", b"second\n" * 100]
    body = b"".join(map(gzip.compress, contents)) + end
    assert await unzipped(body, size) == b"".join(contents)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (gzip.compress(b"first") + b"garbage", "validation_error"),
        (gzip.compress(b"first") + gzip.compress(b"second")[:-3], "truncated_body"),
        (gzip.compress(b"first")[:-1], "truncated_body"),
        (b"", "truncated_body"),
        (b"\0" + gzip.compress(b"first"), "validation_error"),
    ],
    ids=["garbage", "cut off", "cut off at once", "empty", "zeros"],
)
async def test_a_gzip_body_with_another_end_is_refused(body: bytes, code: str, size: int) -> None:
    with pytest.raises(BadRequest) as raised:
        await unzipped(body, size)
    assert raised.value.code == code


async def test_empty_members_are_unpacked_in_small_parts() -> None:
    """256 KiB of empty members stopped the event loop for 80 ms."""
    turns = 0

    async def body() -> AsyncIterator[bytes]:
        yield gzip.compress(b"") * 12_000 + gzip.compress(b"end")

    async def run() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    try:
        assert b"".join([piece async for piece in files._unzipped(body())]) == b"end"
    finally:
        task.cancel()
    assert turns >= 4
