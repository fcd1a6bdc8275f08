"""Directories for sockets and data of a service under test."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the name of a socket (108 bytes, unix(7)), and that
    other uids may pass through."""
    directory = Path(tempfile.mkdtemp(prefix="live-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of this size (tmpfs(5)) for the data of a service. Needs root."""
    with short_directory() as directory:
        disk = directory / "disk"
        disk.mkdir()
        options = f"size={size},mode=0755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True)
        try:
            yield disk
        finally:
            subprocess.run(["umount", str(disk)], check=True)


OWNER, STRANGER = 4242, 4243  # an account that the operator names, and another one


@contextlib.contextmanager
def project_directories() -> Iterator[Path]:
    """Directories below `work` of root, of OWNER and of STRANGER, and a link out of it."""
    with short_directory() as top:
        for name in ("work/root/.git/hooks", "work/other", "work/strange", "elsewhere", "run"):
            (top / name).mkdir(parents=True)
        (top / "work/root/.git/config").write_text("")
        (top / "work/link").symlink_to(top / "elsewhere")
        for name, uid in (("other", OWNER), ("strange", STRANGER)):
            (top / "work" / name).chmod(0o700)
            os.chown(top / "work" / name, uid, uid)
        yield top
