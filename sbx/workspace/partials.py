"""Uploads that come in pieces: each piece is checked, and what is here is found again by its name.

They lie in a conversation's staging directory, which no code inside sees and which is emptied after
a crash. A piece that did not come whole, or is not what its checksum says, leaves nothing.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

from sbx.errors import BadRequest, Conflict, TooLarge
from sbx.workspace.paths import check_name
from sbx.workspace.refusals import too_large, translated
from sbx.workspace.streams import CHUNK, Intake

PIECE_MAX = 16 << 20  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")


def new_name() -> str:
    return f".sbx-partial-{secrets.token_hex(16)}"


def make(staging: int, name: str) -> None:
    """An empty one of that name in the directory fd `staging`."""
    with translated("the upload"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        os.close(os.open(name, flags, 0o600, dir_fd=staging))


def appending(staging: int, name: str, offset: int, size: int, sha256: str) -> Intake[int]:
    """Take a piece in at `offset`, where the last one ended, of an upload that has `size` bytes in
    all; the new offset.

    Raises TooLarge `piece_too_large`, BadRequest `checksum_mismatch`.
    """
    with translated("the upload"):
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=staging)
    try:
        digest = hashlib.sha256()
        end = offset
        whole = False
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
            whole = True
            return end
        finally:
            if not whole:
                with suppress(OSError):
                    os.ftruncate(fd, offset)
    finally:
        os.close(fd)


def content(staging: int, name: str, size: int, sha256: str) -> Iterator[bytes]:
    """All of it, in pieces. The last is given only when it is what `sha256` says: an intake that is
    fed by this is never complete with something else. Raises BadRequest `checksum_mismatch`."""
    digest = hashlib.sha256()
    held = b""
    with translated("the upload"), _opened(staging, name) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise Conflict("not all of the upload is here", code="upload_incomplete")
        while piece := file.read(CHUNK):
            digest.update(piece)
            if held:
                yield held
            held = piece
    if digest.hexdigest() != sha256:
        raise checksum_mismatch("the upload", digest.hexdigest())
    yield held


def remove(staging: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=staging)


def check_sha256(text: str) -> str:
    """Raises BadRequest `invalid_checksum`."""
    if not _SHA256.fullmatch(text):
        raise BadRequest(
            "a checksum is the SHA-256 in 64 lower hexadecimal digits",
            code="invalid_checksum",
            hint="sha256sum FILE tells it",
        )
    return text


def checksum_mismatch(what: str, found: str) -> BadRequest:
    return BadRequest(
        f"{what} is not what its checksum says",
        code="checksum_mismatch",
        hint="send it again",
        details={"sha256": found},
    )


def upload_name(name: str) -> str:
    """Raises InvalidPath."""
    return check_name(name)


def file_too_large(path: str, most: int) -> TooLarge:
    return too_large(path, most)


def _opened(staging: int, name: str) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=staging), "rb", 0)


def _write_at(fd: int, data: bytes, position: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, position)
        position += done
        rest = rest[done:]


def _too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the piece has more than the {most} bytes that are left for it",
        code="piece_too_large",
        hint="ask for the offset, and send smaller pieces",
        details={"limit": most},
    )
