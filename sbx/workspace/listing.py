"""List a directory in bounded time and memory, with names that fit into JSON."""

import os
import stat
from collections import deque

from sbx.linux.descriptors import closing
from sbx.protocol.files import FileEntry, Kind, Listing
from sbx.workspace.errors import translate
from sbx.workspace.safe_open import Opener


def entry_of(path: str, status: os.stat_result) -> FileEntry:
    kind = _kind(status.st_mode)
    size = status.st_size if kind == "file" else None
    return FileEntry(path.rpartition("/")[2], path, kind, size, status.st_mtime)


def shown(view: str, relative: tuple[str, ...]) -> str:
    """Return the path as the code inside sees it, in valid UTF-8 for messages."""
    path = "/".join((view, *relative))
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def list_directory(
    opener: Opener,
    root: int,
    relative: tuple[str, ...],
    *,
    view: str,
    max_entries: int,
    max_depth: int,
) -> Listing:
    """List a directory breadth first: a listing that `max_entries` cuts off has the upper levels.

    Raises for `relative` itself only. Directories below it that disappear in the meantime are
    skipped. Directories that cannot be read make the listing incomplete.
    """
    listing = Listing()
    pending = deque([(relative, 1)])
    while pending:
        where, depth = pending.popleft()
        try:
            below = _scan(opener, root, where, view, max_entries, listing)
        except OSError as error:
            if where == relative:
                raise translate(error, shown(view, relative)) from error
            if not isinstance(error, FileNotFoundError):
                listing.complete = False
            continue
        if depth < max_depth:
            pending.extend((directory, depth + 1) for directory in below)
    listing.sort(key=lambda entry: entry.path)
    return listing


def _scan(
    opener: Opener,
    root: int,
    where: tuple[str, ...],
    view: str,
    max_entries: int,
    listing: Listing,
) -> list[tuple[str, ...]]:
    """Add the entries of one directory to `listing`, and return its subdirectories."""
    directories: list[tuple[str, ...]] = []
    with (
        closing(opener(root, where, os.O_RDONLY | os.O_DIRECTORY)) as fd,
        os.scandir(fd) as entries,
    ):
        for entry in entries:
            if len(listing) >= max_entries:
                listing.complete = False
                break
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
            listing.append(entry_of(shown(view, (*where, name)), status))
            if stat.S_ISDIR(status.st_mode):
                directories.append((*where, name))
    return directories


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"
