"""What a start without a data directory removes: what a killed runtime left, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sbx import Runtime

HOLD = """
import asyncio, sys
from sbx import Runtime
async def main():
    async with Runtime() as runtime:
        print(runtime.data.path, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
JOURNAL = {
    "version": 1, "stage": ".sbx-" + "c" * 32, "in_tree": False, "inode": 2, "host": "/",
    "owner": None, "intents": [[1, "TARGET", ["file", 420, 13, 0], None, True, 5, 0, 0]],
}  # fmt: skip


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("temporary", "data"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "temporary"


def killed() -> Path:
    """The temporary directory of a runtime that was killed."""
    program = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with program.stdout as said:
        path = Path(said.readline().strip())
        program.send_signal(signal.SIGKILL)
        program.wait()
    return path


@pytest.mark.full_tier
async def test_what_a_killed_runtime_left_is_removed_with_its_record(top: Path) -> None:
    left = killed()
    assert left.is_dir()
    async with Runtime() as runtime:
        assert os.listdir(top) == [runtime.data.path.name]
    assert os.listdir(top) == []
    assert os.listdir(top.parent / "data/sbx/temporary") == []


async def test_a_directory_that_only_looks_like_one_stays(top: Path) -> None:
    """Code in a sandbox made it, or a user, for whom it holds other things."""
    place = top / "sbx-demo"
    conversation = place / "sandboxes" / ("a" * 32) / ("b" * 32)
    stage = conversation / "staging" / (".sbx-" + "c" * 32)
    for path in (conversation / "files", stage):
        path.mkdir(parents=True)
    (stage / "1.old").write_text("planted")
    target = str(top.parent / "planted").removeprefix("/")
    text = json.dumps(JOURNAL).replace("TARGET", target)
    (conversation / "staging" / ("journal-" + "d" * 32)).write_text(text)
    for name in ("lock", "thesis.txt"):
        (place / name).write_text("")
    async with Runtime():
        pass
    assert (place / "thesis.txt").exists()
    assert (stage / "1.old").exists()
    assert not (top.parent / "planted").exists()


async def test_a_directory_that_took_the_place_of_one_stays(top: Path) -> None:
    left = killed()
    left.rename(top / "moved")
    left.mkdir()
    (left / "lock").write_text("")
    async with Runtime():
        pass
    assert (left / "lock").exists()


async def test_without_a_place_for_the_record_a_runtime_starts(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/nowhere")
    async with Runtime() as runtime:
        assert runtime.data.path.parent == top
    assert os.listdir(top) == []
