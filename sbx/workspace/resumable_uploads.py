"""Uploads in pieces: check each piece, and keep the received part under a name.

The parts are in the staging directory of a conversation. No code inside sees it, and it is emptied
after a crash. An incomplete piece, or a piece with another checksum, is discarded.
"""

import hashlib
import os
import re
import secrets
from contextlib import suppress
from typing import Any

from sbx.errors import BadRequest, TooLarge
from sbx.linux.descriptors import closing
from sbx.workspace.errors import translated
from sbx.workspace.streams import FileWriter

PIECE_MAX = 16 << 20  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")


def new_name() -> str:
    return f".sbx-partial-{secrets.token_hex(16)}"


def make(staging: int, name: str) -> None:
    """Create an empty partial upload of that name in the directory fd `staging`."""
    with translated("the upload"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        os.close(os.open(name, flags, 0o600, dir_fd=staging))


def appending(
    staging: int, name: str, offset: int, size: int, sha256: str | None, before: Any
) -> FileWriter[tuple[int, Any]]:
    """Receive a piece of an upload at `offset`, the end of the last piece. Return the new offset,
    and the SHA-256 object of the upload so far, which for the last piece was `before`.

    `size` is the size of the whole upload, and `sha256` the checksum of the piece, if it has its
    own. Raises TooLarge `piece_too_large`, BadRequest `checksum_mismatch`. The file is not synced,
    because a crash discards it.
    """
    with translated("the upload"):
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=staging)
    with closing(fd):
        digest = None if sha256 is None else hashlib.sha256()
        so_far = before.copy()
        end = offset
        is_complete = False
        try:
            while (chunk := (yield)) is not None:
                if end + len(chunk) - offset > PIECE_MAX or end + len(chunk) > size:
                    raise _too_large(min(PIECE_MAX, size - offset))
                with translated("the upload"):
                    _write_at(fd, chunk, end)
                if digest is not None:
                    digest.update(chunk)
                so_far.update(chunk)
                end += len(chunk)
            if digest is not None and digest.hexdigest() != sha256:
                raise checksum_mismatch("the piece", digest.hexdigest())
            # Linux begins to write these pages to the disk now, so the sync at the end is short.
            os.posix_fadvise(fd, offset, end - offset, os.POSIX_FADV_DONTNEED)
            is_complete = True
            return end, so_far
        finally:
            if not is_complete:
                with suppress(OSError):
                    os.ftruncate(fd, offset)


def remove(staging: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=staging)


def check_sha256(text: str) -> str:
    """Return `text` if it is a SHA-256. Raises BadRequest `invalid_checksum`."""
    if not _SHA256.fullmatch(text):
        raise BadRequest(
            "a checksum must be a SHA-256 of 64 lower-case hexadecimal digits",
            code="invalid_checksum",
            hint="sha256sum FILE prints it",
        )
    return text


def checksum_mismatch(what: str, sha256: str) -> BadRequest:
    return BadRequest(
        f"the content of {what} does not match its checksum",
        code="checksum_mismatch",
        hint="send it again",
        details={"sha256": sha256},
    )


def _write_at(fd: int, data: bytes, position: int) -> None:
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(fd, remaining, position)
        position += written
        remaining = remaining[written:]


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the piece is larger than the {limit} bytes that it may have",
        code="piece_too_large",
        hint="request the offset, and send smaller pieces",
        details={"limit": limit},
    )
