"""A file system with project quotas, mounted for one module of tests, where this linux has them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


def run(*words: object) -> str | None:
    """What a program said as it failed; None when it did not."""
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    return ended.stderr.strip() or f"status {ended.returncode}" if ended.returncode else None


@contextmanager
def mounted(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Skips where there is none to be had."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    top = factory.mktemp("disk")
    for above in (top, *top.parents[:-1]):
        if above.stat().st_uid == 0 and "pytest" in str(above):
            above.chmod(0o755)
    image, place = top / "image", top / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    made = run("mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota", image)
    if made is not None:
        pytest.skip(f"no ext4 with quotas can be made: {made}")
    if (failed := run("mount", "-o", "loop,prjquota", image, place)) is not None:
        pytest.skip(f"this linux mounts no ext4 with project quotas: {failed}")
    try:
        yield place
    finally:
        assert run("umount", place) is None
