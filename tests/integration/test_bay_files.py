"""/v1/…/filesystem, over the socket."""

import hashlib
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import made, refused
from live_app import Served


@pytest_asyncio.fixture(scope="module")
async def box(client: httpx.AsyncClient) -> str:
    return f"/v1/sandboxes/{(await made(client))['id']}"


async def wrote(client: httpx.AsyncClient, box: str, path: str, content: str) -> None:
    reply = await client.put(f"{box}/filesystem/files", json={"path": path, "content": content})
    assert reply.json() == {"status": "ok"}, reply.text


async def test_a_file_is_written_read_and_deleted(client: httpx.AsyncClient, box: str) -> None:
    await wrote(client, box, "notes/é.txt", "hi é\r\n")
    url, query = f"{box}/filesystem/files", {"path": "notes/../notes/./é.txt"}
    assert (await client.get(url, params=query)).json() == {"content": "hi é\r\n"}
    assert (await client.delete(url, params=query)).json() == {"status": "ok"}
    refused(await client.get(url, params=query), 404, "file_not_found")
    refused(await client.delete(url, params=query), 404, "file_not_found")
    assert (await client.delete(url, params={"path": "notes"})).json() == {"status": "ok"}


async def test_bytes_are_no_text_but_are_downloaded(client: httpx.AsyncClient, box: str) -> None:
    code = "open('raw', 'wb').write(b'\\xff\\xfe')"
    await client.post(f"{box}/python/exec", json={"code": code})
    reply = await client.get(f"{box}/filesystem/files", params={"path": "raw"})
    refused(reply, 400, "not_text")
    reply = await client.get(f"{box}/filesystem/download", params={"path": "raw"})
    assert reply.content == b"\xff\xfe"


async def test_a_directory_lists_directories_first(client: httpx.AsyncClient, box: str) -> None:
    for name in ("b.txt", "A.txt", ".hidden", "z/in.txt", "Y/in.txt"):
        await wrote(client, box, f"listed/{name}", "12345")
    url = f"{box}/filesystem/directories"
    answer = (await client.get(url, params={"path": "listed"})).json()
    assert [entry["name"] for entry in answer["entries"]] == ["Y", "z", "A.txt", "b.txt"]
    directory, file = answer["entries"][0], answer["entries"][2]
    assert set(file) == {"name", "path", "is_file", "is_dir", "size", "modified_time"}
    assert (file["path"], file["size"]) == ("/workspace/listed/A.txt", 5)
    assert (file["is_file"], file["is_dir"]) == (True, False)
    assert (directory["is_dir"], directory["size"]) == (True, None)
    assert file["modified_time"] > 1.6e9
    names = [entry["name"] for entry in (await client.get(url)).json()["entries"]]
    assert {"listed", "uploads"} <= set(names)
    refused(await client.get(url, params={"path": "nowhere"}), 404, "file_not_found")


# -- paths -----------------------------------------------------------------------------------------

WRONG = [
    ("", "empty_path"),
    ("/etc/passwd", "absolute_path"),
    ("/workspace/a", "absolute_path"),
    ("../a", "path_traversal"),
    ("a/../../b", "path_traversal"),
    ("a\u0000b", "null_byte"),
    ("a\nb", "control_character"),
    ("x" * 256, "name_too_long"),
    ("/".join(["x" * 200] * 30), "name_too_long"),
]


@pytest.mark.parametrize(("path", "reason"), WRONG)
async def test_a_wrong_path_says_its_reason(
    client: httpx.AsyncClient, box: str, path: str, reason: str
) -> None:
    files, query = f"{box}/filesystem/files", {"path": path}
    for reply in (
        await client.get(files, params=query),
        await client.delete(files, params=query),
        await client.put(files, json={"path": path, "content": "x"}),
        await client.get(f"{box}/filesystem/download", params=query),
        await client.get(f"{box}/filesystem/directories", params=query),
        await client.post(
            f"{box}/filesystem/upload", data={"path": path}, files={"file": ("a", b"x")}
        ),
    ):
        details = refused(reply, 400, "invalid_path")
        assert details == {"field": "path", "reason": reason}


@pytest.mark.parametrize("path", ["uploads", "."])
async def test_reserved_paths_stay(client: httpx.AsyncClient, box: str, path: str) -> None:
    files = f"{box}/filesystem/files"
    for reply in (
        await client.delete(files, params={"path": path}),
        await client.put(files, json={"path": path, "content": "x"}),
        await client.post(
            f"{box}/filesystem/upload", data={"path": path}, files={"file": ("a", b"x")}
        ),
    ):
        assert refused(reply, 400, "invalid_path")["reason"] == "reserved"


async def test_uploads_are_read_and_not_written(
    client: httpx.AsyncClient,
    box: str,
    served: Served,
) -> None:
    caller = served.service.access.from_peer(os.getuid())
    async with served.service.sandboxes.using(
        caller, box.split("/")[-1], scope="files:write"
    ) as use:
        await use.active.uploads.put_bytes("data.csv", b"a,b")
    files, path = f"{box}/filesystem/files", "uploads/temparea/data.csv"
    assert (await client.get(files, params={"path": path})).json() == {"content": "a,b"}
    for reply in (
        await client.put(files, json={"path": path, "content": "x"}),
        await client.delete(files, params={"path": path}),
        await client.post(
            f"{box}/filesystem/upload", data={"path": path}, files={"file": ("a", b"x")}
        ),
    ):
        assert refused(reply, 400, "invalid_path")["reason"] == "read_only"


async def test_a_link_is_not_followed_from_outside(client: httpx.AsyncClient, box: str) -> None:
    code = "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/', 'root')"
    await client.post(f"{box}/python/exec", json={"code": code})
    for path in ("link", "root/etc/passwd"):
        for route in ("files", "download"):
            reply = await client.get(f"{box}/filesystem/{route}", params={"path": path})
            assert refused(reply, 400, "invalid_path")["reason"] == "symlink"


# -- upload and download ---------------------------------------------------------------------------


async def test_what_goes_up_comes_down(client: httpx.AsyncClient, box: str) -> None:
    content = os.urandom(3 << 20)
    reply = await client.post(
        f"{box}/filesystem/upload", data={"path": "up/big.bin"}, files={"file": ("x", content)}
    )
    assert reply.json() == {"status": "ok", "path": "up/big.bin", "size": len(content)}
    reply = await client.get(f"{box}/filesystem/download", params={"path": "up/big.bin"})
    assert reply.headers["content-type"] == "application/octet-stream"
    assert 'filename="big.bin"' in reply.headers["content-disposition"]
    assert reply.headers["content-disposition"].startswith("attachment")
    assert hashlib.sha256(reply.content).digest() == hashlib.sha256(content).digest()


async def test_the_path_may_come_last(client: httpx.AsyncClient, box: str) -> None:
    form = {"file": ("x", b"12345"), "path": (None, b"late.txt")}
    reply = await client.post(f"{box}/filesystem/upload", files=form)
    assert reply.json() == {"status": "ok", "path": "late.txt", "size": 5}
    reply = await client.get(f"{box}/filesystem/files", params={"path": "late.txt"})
    assert reply.json() == {"content": "12345"}


@pytest.mark.parametrize(
    "form",
    [
        {"path": (None, b"a")},
        {"file": ("x", b"1")},
        {"path": (None, b"a"), "file": (None, b"1")},
        [("path", (None, b"a")), ("path", (None, b"b")), ("file", ("x", b"1"))],
        [("path", (None, b"a")), ("file", ("x", b"1")), ("file", ("x", b"2"))],
    ],
)
async def test_a_form_that_cannot_be_meant_is_refused(
    client: httpx.AsyncClient, box: str, form: Any
) -> None:
    reply = await client.post(f"{box}/filesystem/upload", files=form)
    refused(reply, 400, "validation_error")
    refused(
        await client.get(f"{box}/filesystem/files", params={"path": "a"}), 404, "file_not_found"
    )


async def test_an_upload_that_is_no_form_is_refused(client: httpx.AsyncClient, box: str) -> None:
    reply = await client.post(f"{box}/filesystem/upload", content=b"x")
    refused(reply, 415, "unsupported_media_type")


async def test_too_large_names_its_limit(client: httpx.AsyncClient) -> None:
    answer = await made(client, narrower={"limits": {"file_size_max": "1MiB"}})
    box = f"/v1/sandboxes/{answer['id']}"
    content = b"x" * ((1 << 20) + 1)
    for form in (
        {"path": (None, b"a"), "file": ("x", content)},
        {"file": ("x", content), "path": (None, b"a")},
    ):
        reply = await client.post(f"{box}/filesystem/upload", files=form)
        assert refused(reply, 413, "quota_exceeded")["limit"] == 1 << 20
    reply = await client.put(
        f"{box}/filesystem/files", json={"path": "a", "content": content.decode()}
    )
    assert refused(reply, 413, "quota_exceeded")["limit"] == 1 << 20
    refused(
        await client.get(f"{box}/filesystem/files", params={"path": "a"}), 404, "file_not_found"
    )


async def test_a_body_beyond_any_limit_is_413_at_once(client: httpx.AsyncClient, box: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * (1 << 20)

    reply = await client.put(
        f"{box}/filesystem/files",
        content=endless(),
        headers={"content-type": "application/json"},
    )
    refused(reply, 413, "body_too_large")
