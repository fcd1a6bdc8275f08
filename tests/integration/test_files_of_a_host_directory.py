"""A directory of the host as workspace: the same calls, and nothing of ours left in it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sbx import Runtime
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core


@pytest.fixture
async def box(runtime: Runtime, tmp_path: Path) -> AsyncIterator[AsyncSandbox]:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "a.txt").write_text("hello\n")
    if os.geteuid() == 0:
        for path in (directory, directory / "a.txt"):
            os.chown(path, 4321, 4321)
    async with await runtime.create(workspace=directory) as box:
        yield box


@pytest.mark.full_tier
async def test_what_is_found_is_told_where_it_is_seen_inside(box: AsyncSandbox) -> None:
    """Uploads lie at /uploads then, and were told at /workspace/uploads/temparea."""
    await box.uploads.put_bytes("u.txt", b"hello")
    assert [entry.path for entry in await box.files.list(max_depth=9)] == ["/workspace/a.txt"]
    assert [match.path for match in await box.files.grep("hello")] == ["/workspace/a.txt"]
    found = await box.files.grep("hello", "/uploads")
    assert [match.path for match in found] == ["/uploads/u.txt"]
    run = await box.run(f"open({found[0].path!r}).read()")
    assert run.result == "'hello'"


async def test_copies_moves_and_archives_leave_nothing_beside(
    box: AsyncSandbox, tmp_path: Path
) -> None:
    assert (await box.files.copy("a.txt", "d/b.txt")).complete
    assert (await box.files.copy("d", "e")).files == 1
    await box.files.move("e", "f")
    await box.files.replace("f/b.txt", "hello", "bye")
    packed = b"".join([piece async for piece in box.files.archive("f")])
    assert (await box.files.unpack(packed, "g")).entries == 1
    assert await box.files.read("g/b.txt") == "bye\n"
    assert sorted(entry.name for entry in (tmp_path / "project").iterdir()) == [
        "a.txt",
        "d",
        "f",
        "g",
    ]
