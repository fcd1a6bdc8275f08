"""Uploads in pieces: check each piece, and keep the received part under a name.

The parts are in the staging directory of a conversation. No code inside sees it, and it is emptied
after a crash. An incomplete piece, or a piece with another checksum, is discarded.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

from sbx.errors import BadRequest, Conflict, TooLarge
from sbx.linux.descriptors import closing
from sbx.workspace.errors import translated
from sbx.workspace.streams import CHUNK, FileWriter

PIECE_MAX = 16 << 20  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")


def new_name() -> str:
    return f".sbx-partial-{secrets.token_hex(16)}"


def make(staging: int, name: str) -> None:
    """Create an empty partial upload of that name in the directory fd `staging`."""
    with translated("the upload"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        os.close(os.open(name, flags, 0o600, dir_fd=staging))


def appending(staging: int, name: str, offset: int, size: int, sha256: str) -> FileWriter[int]:
    """Receive a piece of an upload at `offset`, the end of the last piece; return the new offset.

    `size` is the size of the whole upload. Raises TooLarge `piece_too_large`, BadRequest
    `checksum_mismatch`.
    """
    with translated("the upload"):
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=staging)
    with closing(fd):
        digest = hashlib.sha256()
        end = offset
        is_complete = False
        try:
            while (chunk := (yield)) is not None:
                if end + len(chunk) - offset > PIECE_MAX or end + len(chunk) > size:
                    raise _too_large(min(PIECE_MAX, size - offset))
                with translated("the upload"):
                    _write_at(fd, chunk, end)
                digest.update(chunk)
                end += len(chunk)
            if digest.hexdigest() != sha256:
                raise checksum_mismatch("the piece", digest.hexdigest())
            with translated("the upload"):
                os.fsync(fd)
            is_complete = True
            return end
        finally:
            if not is_complete:
                with suppress(OSError):
                    os.ftruncate(fd, offset)


def content(staging: int, name: str, size: int, sha256: str) -> Iterator[bytes]:
    """Yield the content of the upload in pieces, and the last piece only if the checksum matches.

    So an intake that reads from this never completes with another content. Raises BadRequest
    `checksum_mismatch`, Conflict `upload_incomplete`.
    """
    digest = hashlib.sha256()
    last = b""
    with translated("the upload"), _opened(staging, name) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise Conflict("the upload is not complete", code="upload_incomplete")
        while piece := file.read(CHUNK):
            digest.update(piece)
            if last:
                yield last
            last = piece
    if digest.hexdigest() != sha256:
        raise checksum_mismatch("the upload", digest.hexdigest())
    yield last


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


def _opened(staging: int, name: str) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=staging), "rb", 0)


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
