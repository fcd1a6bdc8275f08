"""Files that take the place of others: open(2) with O_EXCL, for a rename(2) or a link(2)."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_file_beside(path: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a file in the directory of `path`, for the caller to write, and to rename or link. At
    the end its own name is removed, if it still exists. Raise OSError."""
    fresh = path.with_name(f".sbx-{secrets.token_hex(8)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            yield fresh, file
    finally:
        with suppress(OSError):
            fresh.unlink()
