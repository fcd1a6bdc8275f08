"""Directories for `sbx cp -r`: into a sandbox as one archive, out of it file by file.

What goes in is the caller's own, packed here and unpacked inside the walls. What comes out was made
by the code inside, and no archive of that is opened on this side: each file is written under a name
that was looked at, into directories made here, and links are left where they are. A file that a
program of the host would obey is left out, unless the caller takes it all the same.
"""

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sbx.errors import BadRequest, Conflict
from sbx.protocol.files import Entry

if TYPE_CHECKING:
    from sbx.cli.host_executables import LeftOut
    from sbx.client.conversation import RemoteConversation

_CHUNK = 256 * 1024
_DEPTH_MAX = 100


@dataclass(slots=True)
class Tally:
    """What a copy took. `left_out`: host executables that it did not take."""

    files: int = 0
    size: int = 0
    skipped: int = 0
    left_out: "list[LeftOut]" = field(default_factory=list)


async def put_tree(where: "RemoteConversation", source: Path, target: str) -> Tally:
    """Copy the directory `source` to `target`, which then has its content. Raises as `unpack`."""
    tally = Tally()
    done = await where.files.unpack(_apart(_tar(source, tally)), target)
    tally.skipped += done.skipped
    return tally


async def get_tree(
    where: "RemoteConversation",
    source: str,
    target: Path,
    *,
    with_host_executables: bool = False,
) -> Tally:
    """Copy the directory `source` of a sandbox to `target`, made where it is missing. Raises
    Conflict `listing_incomplete`, BadRequest."""
    from sbx.cli.host_executables import Arrivals  # not for `sbx --help`

    listing = await where.files.list(source, max_depth=_DEPTH_MAX)
    base = (await where.files.stat(source)).path
    if not listing.complete:
        raise Conflict(
            f"{source} has more than can be listed, or parts that cannot be read",
            code="listing_incomplete",
            hint="copy its directories one by one",
        )
    tally = Tally()
    placed = [(entry, below(target, base, entry)) for entry in listing]
    arrivals = Arrivals([relative_to(base, entry) for entry in listing], target)
    _make(target)
    for entry, local in placed:  # by path: a directory comes before its entries
        if not (with_host_executables or arrivals.permits(relative_to(base, entry))):
            continue
        if entry.kind == "directory":
            _make(local)
        elif entry.kind == "file":
            tally.size += await where.files.download(entry.path, local)
            tally.files += 1
        else:
            tally.skipped += 1
    tally.left_out += arrivals.left_out
    return tally


def relative_to(base: str, entry: Entry) -> str:
    """The path of an entry below `base`."""
    return entry.path.removeprefix(f"{base}/")


def _make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)


def below(target: Path, base: str, entry: Entry) -> Path:
    """Where an entry below `base` in a sandbox belongs below `target` here. Raises BadRequest for
    what does not lie below `base`, and for a directory here that is a link."""
    relative = relative_to(base, entry)
    parts = relative.split("/")
    if relative == entry.path or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise BadRequest(f"the service told of a path that is none: {entry.path[:200]!r}")
    above = target
    for part in parts[:-1]:
        above = above / part
        if above.is_symlink():
            raise BadRequest(f"{above} is a link, and would lead elsewhere", hint="remove it")
    return above / parts[-1]


def _tar(source: Path, tally: Tally) -> Iterator[bytes]:
    """The tar of a directory's content, as it is read."""
    pending = [""]
    while pending:
        above = pending.pop()
        for entry in sorted(os.scandir(source / above), key=lambda one: one.name):
            name = f"{above}{entry.name}"
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                pending.append(f"{name}/")
                yield _head(name, found, tarfile.DIRTYPE)
            elif stat.S_ISLNK(found.st_mode):
                yield _head(name, found, tarfile.SYMTYPE, link=os.readlink(source / name))
            elif stat.S_ISREG(found.st_mode):
                yield from _file(source / name, name)
                tally.files += 1
                tally.size += found.st_size
            else:
                tally.skipped += 1
    yield bytes(2 * tarfile.BLOCKSIZE)


def _file(path: Path, name: str) -> Iterator[bytes]:
    """So many bytes as its head says, whatever becomes of it meanwhile."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        yield _head(name, found, tarfile.REGTYPE)
        left = found.st_size
        while left:
            piece = file.read(min(_CHUNK, left))
            if not piece:
                raise Conflict("the file became shorter while it was read", code="file_changed")
            left -= len(piece)
            yield piece
        yield bytes(-found.st_size % tarfile.BLOCKSIZE)


def _head(name: str, found: os.stat_result, kind: bytes, *, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    member.mode = stat.S_IMODE(found.st_mode) & 0o777
    member.mtime = int(found.st_mtime)
    member.size = found.st_size if kind == tarfile.REGTYPE else 0
    return member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")


async def _apart(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read in worker threads, several small ones at once."""

    def gathered() -> bytes:
        held = bytearray()
        for piece in pieces:
            held += piece
            if len(held) >= _CHUNK:
                break
        return bytes(held)

    while piece := await asyncio.to_thread(gathered):
        yield piece
