"""Directories for sockets and data of a service under test."""

import contextlib
import shutil
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
