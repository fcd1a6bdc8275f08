"""The files of the host by plain paths, for a project whose sandbox is off."""

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sbx import errors
from sbx.aio import in_thread, long_call
from sbx.linux.new_files import new_file_beside
from sbx.protocol.files import FileEntry, Kind, Listing, decode_text
from sbx.workspace.errors import is_a_directory, not_a_file, too_large, translated

_READ_MAX = 512 << 20
_ENTRIES_MAX = 10_000
_WALKED_MAX = 200_000
T = TypeVar("T")


class HostFiles:
    """The files of the host by plain paths. Linux alone refuses a call. Relative paths begin at the
    working directory.

    Each call runs in a worker thread. Calls raise NotFound `file_not_found`, InvalidPath, Denied
    `file_not_permitted`, TooLarge and Unavailable `no_space`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def read_bytes(self, path: str) -> bytes:
        return await self._call(path, _read)

    async def read(self, path: str) -> str:
        """Return the text of a file. Raise BadRequest `not_text`."""
        return decode_text(path, await self.read_bytes(path))

    async def write(self, path: str, content: str | bytes) -> int:
        """Write a file in one step, with its missing directories, and return its size in bytes.

        A symlink of that name is followed, and the file keeps its permissions.
        """
        data = content.encode() if isinstance(content, str) else bytes(content)
        return await self._call(path, lambda at: _write(at, data))

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return await self._call(path, lambda at: _list(at, max_depth), long=True)

    async def stat(self, path: str) -> FileEntry:
        """Return the entry at a path; of a symlink, the link itself."""
        return await self._call(path, lambda at: _entry(at, at.lstat()))

    async def make_directory(self, path: str) -> None:
        await self._call(path, lambda at: at.mkdir(parents=True, exist_ok=True))

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """Return the entries below a directory whose name matches, like `*.py`. A pattern with a
        `/`, like `src/*/test_*`, is compared with the path below it. `complete` is False if a limit
        cut the search."""
        limit = max(1, min(max_results, _ENTRIES_MAX))
        return await self._call(path, lambda at: _find(at, pattern, kind, limit), long=True)

    async def _call(self, path: str, fn: Callable[[Path], T], *, long: bool = False) -> T:
        def done() -> T:
            with translated(path):
                return fn(self._at(path))

        if not long:
            return await in_thread(done)
        async with long_call():
            return await in_thread(done)

    def _at(self, path: str) -> Path:
        if not path or "\0" in path:
            raise errors.InvalidPath("a path is text without NUL", details={"reason": "null_byte"})
        return Path(os.path.normpath(self._directory / Path(path).expanduser()))


def _read(at: Path) -> bytes:
    """Read a regular file only: a FIFO or a device might never end."""
    fd = os.open(at, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise is_a_directory(str(at))
        if not stat.S_ISREG(status.st_mode):
            raise not_a_file(str(at))
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(_READ_MAX + 1)
    finally:
        os.close(fd)
    if len(content) > _READ_MAX:
        raise too_large(str(at), _READ_MAX)
    return content


def _write(at: Path, data: bytes) -> int:
    at = Path(os.path.realpath(at))
    if at.is_dir():
        raise is_a_directory(str(at))
    at.parent.mkdir(parents=True, exist_ok=True)
    with new_file_beside(at, 0o666) as (fresh, file):
        file.write(data)
        file.flush()
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(at.stat().st_mode))
        os.fsync(file.fileno())
        fresh.replace(at)
    return len(data)


def _list(at: Path, max_depth: int) -> Listing:
    walk = _Walk(at, max_depth)
    return _listing(walk, (entry for _, entry in walk), _ENTRIES_MAX)


def _find(at: Path, pattern: str, kind: Kind | None, limit: int) -> Listing:
    walk = _Walk(at, None)
    matching = (
        entry
        for relative, entry in walk
        if kind in (None, entry.kind)
        and fnmatch.fnmatchcase(relative if "/" in pattern else entry.name, pattern)
    )
    return _listing(walk, matching, limit)


def _listing(walk: "_Walk", entries: Iterator[FileEntry], limit: int) -> Listing:
    listing = Listing(islice(entries, limit))
    listing.complete = walk.complete and len(listing) < limit
    listing.sort(key=lambda entry: entry.path)
    return listing


class _Walk:
    """The entries below a directory with their paths below it, breadth first; no symlink is
    followed. `complete` is False if a limit or an unreadable directory cut the walk."""

    def __init__(self, top: Path, max_depth: int | None) -> None:
        self._top = top
        self._max_depth = max_depth
        self.complete = True

    def __iter__(self) -> Iterator[tuple[str, FileEntry]]:
        pending, seen = [(self._top, 1)], 0
        for directory, depth in pending:
            try:
                with os.scandir(directory) as scan:
                    children = sorted(scan, key=lambda child: child.name)
            except OSError:
                if directory == self._top:
                    raise
                self.complete = False
                continue
            for child in children:
                seen += 1
                if seen > _WALKED_MAX:
                    self.complete = False
                    return
                with suppress(FileNotFoundError):
                    entry = _entry(Path(child.path), child.stat(follow_symlinks=False))
                    yield os.path.relpath(child.path, self._top), entry
                    if entry.kind == "directory" and depth != self._max_depth:
                        pending.append((Path(child.path), depth + 1))


def _entry(at: Path, status: os.stat_result) -> FileEntry:
    kinds: dict[int, Kind] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
    }
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    size = status.st_size if kind == "file" else None
    path = os.fsencode(at).decode("utf-8", "backslashreplace")
    return FileEntry(path.rpartition("/")[2], path, kind, size, status.st_mtime)
