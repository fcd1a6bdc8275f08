"""Copy directories for `sbx cp -r`: into a sandbox as one archive, out of it file by file.

Files that go in belong to the user. They are packed here and unpacked inside the walls.

Files that come out were written by the code inside, so this side never opens an archive of them.
Each file is written under a checked name, into directories created here. Links are skipped. Files
that a program of the host would obey are left out, unless the user asks for them.
"""

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiofiles.os

from sbx.errors import BadRequest, Conflict
from sbx.protocol.files import FileEntry

if TYPE_CHECKING:
    from sbx.cli.host_executables import LeftOut
    from sbx.client.conversation import RemoteConversation

_CHUNK = 256 * 1024
_DEPTH_MAX = 100


@dataclass(slots=True)
class CopyCount:
    """The totals of a copy. `left_out` are the host executables that were not copied."""

    files: int = 0
    size: int = 0
    skipped: int = 0
    left_out: "list[LeftOut]" = field(default_factory=list)


async def put_tree(where: "RemoteConversation", source: Path, target: str) -> CopyCount:
    """Copy the content of the directory `source` into `target`. Raise the errors of `unpack`."""
    tally = CopyCount()
    done = await where.files.unpack(_apart(_tar(source, tally)), target)
    tally.skipped += done.skipped
    return tally


async def get_tree(
    where: "RemoteConversation",
    source: str,
    target: Path,
    *,
    with_host_executables: bool = False,
) -> CopyCount:
    """Copy the directory `source` of a sandbox to `target`, which is created if it is missing.

    Raise Conflict `listing_incomplete`, BadRequest.
    """
    from sbx.cli.host_executables import Arrivals  # a lazy import keeps `sbx --help` fast

    listing = await where.files.list(source, max_depth=_DEPTH_MAX)
    base = (await where.files.stat(source)).path
    if not listing.complete:
        raise Conflict(
            f"{source} has too many entries to list, or unreadable parts",
            code="listing_incomplete",
            hint="copy its directories one by one",
        )
    tally = CopyCount()
    placed = [(entry, below(target, base, entry)) for entry in listing]
    arrivals = Arrivals([relative_to(base, entry) for entry in listing], target)
    await aiofiles.os.makedirs(target, exist_ok=True)
    for entry, local in placed:  # sorted by path: a directory comes before its entries
        if not (with_host_executables or arrivals.permits(relative_to(base, entry))):
            continue
        if entry.kind == "directory":
            await aiofiles.os.makedirs(local, exist_ok=True)
        elif entry.kind == "file":
            tally.size += await where.files.download(entry.path, local)
            tally.files += 1
        else:
            tally.skipped += 1
    tally.left_out += arrivals.left_out
    return tally


def relative_to(base: str, entry: FileEntry) -> str:
    """Return the path of an entry relative to `base`."""
    return entry.path.removeprefix(f"{base}/")


def below(target: Path, base: str, entry: FileEntry) -> Path:
    """Map an entry below `base` in a sandbox to its path below `target` here.

    Raise BadRequest for an entry that is not below `base`, and for a local directory that is
    a link.
    """
    relative = relative_to(base, entry)
    parts = relative.split("/")
    if relative == entry.path or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise BadRequest(f"the service sent an invalid path: {entry.path[:200]!r}")
    above = target
    for part in parts[:-1]:
        above = above / part
        if above.is_symlink():
            raise BadRequest(
                f"{above} is a link, and files would be written elsewhere", hint="remove it"
            )
    return above / parts[-1]


def _tar(source: Path, tally: CopyCount) -> Iterator[bytes]:
    """Yield the tar of a directory's content while it is read."""
    pending = [""]
    while pending:
        above = pending.pop()
        for entry in sorted(os.scandir(source / above), key=lambda item: item.name):
            name = f"{above}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append(f"{name}/")
                yield _head(name, status, tarfile.DIRTYPE)
            elif stat.S_ISLNK(status.st_mode):
                yield _head(name, status, tarfile.SYMTYPE, link=os.readlink(source / name))
            elif stat.S_ISREG(status.st_mode):
                yield from _file(source / name, name)
                tally.files += 1
                tally.size += status.st_size
            else:
                tally.skipped += 1
    yield bytes(2 * tarfile.BLOCKSIZE)


def _file(path: Path, name: str) -> Iterator[bytes]:
    """Yield a header and exactly as many bytes as it states, even if the file grows meanwhile.

    Raise Conflict if the file becomes shorter.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        yield _head(name, status, tarfile.REGTYPE)
        remaining = status.st_size
        while remaining:
            piece = file.read(min(_CHUNK, remaining))
            if not piece:
                raise Conflict("the file became shorter while it was read", code="file_changed")
            remaining -= len(piece)
            yield piece
        yield bytes(-status.st_size % tarfile.BLOCKSIZE)


def _head(name: str, status: os.stat_result, kind: bytes, *, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    member.mode = stat.S_IMODE(status.st_mode) & 0o777
    member.mtime = int(status.st_mtime)
    member.size = status.st_size if kind == tarfile.REGTYPE else 0
    return member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")


async def _apart(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read the pieces in worker threads, several small pieces at once."""

    def gathered() -> bytes:
        buffer = bytearray()
        for piece in pieces:
            buffer += piece
            if len(buffer) >= _CHUNK:
                break
        return bytes(buffer)

    while piece := await asyncio.to_thread(gathered):
        yield piece
