"""Workspaces that linux itself holds to their size, and what says so."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from quota_disk import MIB, mounted

from sbx import Runtime, Settings
from sbx.errors import CannotEnforce, Unavailable
from sbx.policy import Policy, load
from sbx.protocol.runs import Status
from sbx.runtime.sandbox import AsyncSandbox

FILL = """
with open({path!r}, 'wb', 0) as file:
    for _ in range(20):
        file.write(bytes(1 << 20))
"""
FILES = """
import os
for number in range(200):
    os.mkdir(str(number))
"""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(tmp_path_factory) as place:
        yield place


def small(**changes: object) -> Policy:
    """Landlock as this host has it: a user-mode linux, where the tests find quotas, has none."""
    policy = load("default")
    limits = policy.limits.model_copy(update={"workspace_max": 8 * MIB, "workspace_files": 100})
    walls = policy.walls.model_copy(update={"landlock": "best-effort"})
    return policy.model_copy(update={"limits": limits, "walls": walls, **changes})


def wall(box: AsyncSandbox) -> str:
    assert box.receipt is not None
    return next(str(one["means"]) for one in box.receipt.walls if one["name"] == "disk")


async def test_a_run_meets_the_limit_as_an_error_and_its_kernel_lives(disk: Path) -> None:
    settings = Settings(data_dir=disk / "a", disk_quota="required", start_timeout=120)
    async with Runtime(settings) as runtime, await runtime.create(small()) as box:
        await box.run("x = 41")
        for path in ("big", "uploads/generated/big"):
            done = await box.run(FILL.format(path=path))
            assert done.status is Status.ERROR
            assert done.error is not None
            assert "Disk quota exceeded" in done.error.value
            await box.run(f"os = __import__('os'); os.unlink({path!r})")
        done = await box.run(FILES)
        assert done.error is not None
        assert "Disk quota exceeded" in done.error.value
        assert (await box.run("x + 1")).result == "42"
        assert wall(box) == (
            "quota, hard: project quota of ext4, 8388608 bytes, 100 files and directories"
        )


async def test_the_host_writes_into_it_and_uploads_are_not_charged(disk: Path) -> None:
    settings = Settings(data_dir=disk / "b", start_timeout=120)
    async with Runtime(settings) as runtime, await runtime.create(small()) as box:
        await box.files.write("in.bin", bytes(6 * MIB))
        await box.uploads.put_bytes("up.bin", bytes(6 * MIB))
        assert "uploads/temparea/up.bin" in (await box.shell("ls uploads/temparea/*")).stdout
        done = await box.run(FILL.format(path="big"))
        assert done.error is not None
        assert "Disk quota exceeded" in done.error.value
        assert (await box.shell("mv in.bin a && mkdir d && mv a d/b && mv d e")).exit_code == 0


async def test_what_conversations_share_has_a_limit_of_its_own(disk: Path) -> None:
    settings = Settings(data_dir=disk / "c", start_timeout=120)
    async with Runtime(settings) as runtime, await runtime.create(small(shared=True)) as box:
        done = await box.run(FILL.format(path="shared/big"))
        assert done.error is not None
        assert "Disk quota exceeded" in done.error.value


async def test_off_leaves_it_to_the_watcher(disk: Path) -> None:
    settings = Settings(data_dir=disk / "d", disk_quota="off", start_timeout=120)
    async with Runtime(settings) as runtime, await runtime.create(small()) as box:
        await box.run("1")
        assert wall(box).startswith("watched")
        done = await box.run(FILL.format(path="big") + "\nimport time; time.sleep(60)")
        assert (done.status, str(done.cause)) == (Status.KILLED, "disk")


async def test_required_refuses_a_directory_of_the_host(disk: Path, tmp_path: Path) -> None:
    own = disk / "e"
    async with Runtime(Settings(data_dir=own, disk_quota="required")) as runtime:
        with pytest.raises((CannotEnforce, Unavailable)) as raised:
            await runtime.create(small(), workspace=_owned(tmp_path))
        assert raised.value.details["layer"] == "disk"


def _owned(path: Path) -> Path:
    os.chown(path, 12345, 12345)
    return path
