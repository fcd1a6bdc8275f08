"""Files that are taken in and given out a piece at a time, in a real workspace."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sbx import Runtime
from sbx.errors import BadRequest, Closed, InvalidPath, NotFound, TooLarge
from sbx.runtime.conversation import Conversation
from sbx.runtime.sandbox import AsyncSandbox
from sbx.workspace.uploads import UploadLimits

BIG = bytes(range(256)) * 8192  # 2 MiB
SHA = hashlib.sha256(BIG).hexdigest()


async def pieces(body: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def failing(body: bytes) -> AsyncIterator[bytes]:
    async for piece in pieces(body):
        yield piece
    raise BadRequest("the sender went away", code="truncated_body")


class Stalled:
    """A source that gives some bytes, says so, and then nothing for ever."""

    def __init__(self, body: bytes = BIG) -> None:
        self.begun = asyncio.Event()
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in pieces(self._body):
            yield piece
        self.begun.set()
        await asyncio.Event().wait()


async def staged(talk: Conversation) -> list[str]:
    """What lies in the staging directory of a conversation, half written."""
    opened = await talk.opened()
    return sorted(path.name for path in Path(opened.own.path, "staging").iterdir())  # noqa: ASYNC240


async def test_an_upload_comes_back_byte_for_byte_and_in_ranges(box: AsyncSandbox) -> None:
    made = await box.uploads.put_stream("a.bin", pieces(BIG))
    assert (made.size, made.sha256) == (len(BIG), hashlib.sha256(BIG).hexdigest())
    assert made.path == "/workspace/uploads/temparea/a.bin"
    async with await box.uploads.open_stream("a.bin") as stream:
        assert stream.upload == made
        assert (stream.size, stream.entry.name) == (len(BIG), "a.bin")
        assert b"".join([piece async for piece in stream.chunks()]) == BIG
        assert b"".join([piece async for piece in stream.chunks(300_001)]) == BIG[300_001:]
        assert b"".join([piece async for piece in stream.chunks(5, 1_000_000)]) == BIG[5:1_000_005]
        assert [piece async for piece in stream.chunks(len(BIG))] == []
        assert [piece async for piece in stream.chunks(0, 0)] == []
        await box.uploads.put_stream("a.bin", pieces(b"new"))
        assert b"".join([piece async for piece in stream.chunks()]) == BIG  # of its moment
    assert await box.uploads.read_bytes("a.bin") == b"new"
    with pytest.raises(NotFound):
        await box.uploads.open_stream("b.bin")


async def test_a_file_is_written_and_read_as_a_stream(box: AsyncSandbox) -> None:
    assert await box.files.write_stream("deep/er/a.bin", pieces(BIG)) == len(BIG)
    async with await box.files.open_stream("/workspace/deep/er/a.bin") as stream:
        assert stream.entry.path == "/workspace/deep/er/a.bin"
        assert b"".join([piece async for piece in stream.chunks()]) == BIG
    assert await box.files.write_stream("empty", pieces(b"")) == 0
    assert await box.files.read_bytes("empty") == b""
    with pytest.raises(TooLarge):
        await box.files.write_stream("deep/er/a.bin", pieces(BIG + b"x"), max_bytes=len(BIG))
    assert (await box.files.stat("deep/er/a.bin")).size == len(BIG)
    with pytest.raises(InvalidPath):
        await box.files.write_stream("uploads/temparea/x", pieces(b"x"))
    with pytest.raises(InvalidPath):
        await box.files.write_stream("../x", pieces(b"x"))


async def resumed(talk: Conversation, path: str, *, upload: bool = False) -> tuple[str, int]:
    """Send BIG in two pieces. Return the id, and the inode of the file that holds the pieces."""
    partials = talk.files.partials
    begun = await partials.begin(path, len(BIG), upload=upload)
    half = len(BIG) // 2
    await partials.append(begun.id, 0, None, pieces(BIG[:half]))
    with pytest.raises(BadRequest, match="went away"):
        await partials.append(begun.id, half, None, failing(BIG[half:]))
    await partials.append(begun.id, half, None, pieces(BIG[half:]))
    opened = await talk.opened()
    (name,) = await staged(talk)
    return begun.id, Path(opened.own.path, "staging", name).stat().st_ino  # noqa: ASYNC240


async def test_a_resumed_file_is_moved_without_a_copy(box: AsyncSandbox) -> None:
    talk = box.conversation("default")
    opened = await talk.opened()
    id, inode = await resumed(talk, "a.bin", upload=True)
    with pytest.raises(TooLarge):
        await talk.uploads.put_partial(talk.files.partials, id, SHA, UploadLimits(max_file_size=9))
    assert len(await staged(talk)) == 1  # nothing is lost: it can be finished again
    upload = await talk.uploads.put_partial(talk.files.partials, id, SHA)
    assert (upload.size, upload.sha256) == (len(BIG), SHA)
    assert await talk.uploads.read_bytes("a.bin") == BIG
    assert (opened.uploads_path / "a.bin").stat().st_ino == inode
    assert await staged(talk) == []

    id, inode = await resumed(talk, "d/b.bin")
    size = await talk.files.partials.finish(
        id, SHA, lambda at, path, file: at.files.place(path, file)
    )
    assert size == len(BIG)
    assert (opened.files_path / "d/b.bin").stat().st_ino == inode
    assert await staged(talk) == []
    run = await box.run("import os; s = os.stat('d/b.bin'); (s.st_size, s.st_uid == os.getuid())")
    assert run.result == f"({len(BIG)}, True)"


async def test_a_resumed_file_of_a_host_directory_is_copied(
    runtime: Runtime, tmp_path: Path
) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 4321, 4321)
    async with await runtime.create(workspace=directory) as box:
        talk = box.conversation("default")
        id, _ = await resumed(talk, "a.bin")
        await talk.files.partials.finish(id, SHA, lambda at, path, file: at.files.place(path, file))
        assert await box.files.read_bytes("a.bin") == BIG
        assert await staged(talk) == []
    assert [path.name for path in directory.iterdir()] == ["a.bin"]


async def test_a_stream_that_is_left_early_waits_for_the_piece_that_is_read_ahead(
    box: AsyncSandbox,
) -> None:
    await box.files.write_stream("a.bin", pieces(BIG * 2))
    stream = await box.files.open_stream("a.bin")
    chunks = stream.chunks()
    first = await anext(chunks)
    others = stream.chunks(5, 10)  # the first range was not read to its end
    assert b"".join([piece async for piece in others]) == BIG[5:15]
    await stream.aclose()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await anext(stream.chunks())
    await chunks.aclose()
    assert BIG.startswith(first)


async def test_a_source_that_fails_leaves_what_was_there(box: AsyncSandbox) -> None:
    talk = box.conversation("default")
    await box.uploads.put_bytes("a.bin", b"old")
    await box.files.write("a.bin", b"old")
    with pytest.raises(BadRequest, match="went away"):
        await box.uploads.put_stream("a.bin", failing(BIG))
    with pytest.raises(BadRequest, match="went away"):
        await box.files.write_stream("a.bin", failing(BIG))
    for limits in (UploadLimits(max_file_size=len(BIG) - 1), UploadLimits(max_total_bytes=9)):
        with pytest.raises(TooLarge):
            await box.uploads.put_stream("a.bin", pieces(BIG), limits)
    assert await box.uploads.read_bytes("a.bin") == b"old"
    assert await box.files.read_bytes("a.bin") == b"old"
    assert await staged(talk) == []


async def test_a_cancelled_stream_leaves_nothing(box: AsyncSandbox) -> None:
    talk = box.conversation("default")
    source = Stalled()
    putting = asyncio.create_task(box.uploads.put_stream("a.bin", source))
    await source.begun.wait()
    assert len(await staged(talk)) == 1
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await staged(talk) == []
    assert await box.uploads.list() == ()


async def test_streams_that_stall_keep_no_thread_from_others(box: AsyncSandbox) -> None:
    sources = [Stalled() for _ in range(60)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(box.uploads.put_stream(f"{n}.bin", source))
            for n, source in enumerate(sources)
        ]
        for source in sources:
            await source.begun.wait()
        async with asyncio.timeout(60):
            assert await box.uploads.list() == ()
            await box.uploads.put_bytes("quick", b"x")
        for task in tasks:
            task.cancel()
    assert [one.name for one in await box.uploads.list()] == ["quick"]


async def test_a_stream_ends_with_its_conversation(runtime: Runtime) -> None:
    box = await runtime.create()
    source = Stalled()
    putting = asyncio.create_task(box.uploads.put_stream("a.bin", source))
    await source.begun.wait()
    async with asyncio.timeout(60):
        await box.close()
    with pytest.raises(Closed):
        await putting


async def test_two_streams_of_one_name_leave_one_of_them_whole(box: AsyncSandbox) -> None:
    bodies = [bytes([n]) * 700_000 for n in range(8)]
    await asyncio.gather(*(box.uploads.put_stream("a", pieces(body)) for body in bodies))
    assert await box.uploads.read_bytes("a") in bodies
