"""The path guard's side of the quarantine: `sbx.workspace.quarantine` has the layout on the host.

An item is recorded first, then created, then linked to from its place. Landlock lets the jail write
below `items` and only the guard below `records`.

    records/ID.json      where the item belongs, and the entry of the table that it fits
    records/ID.copied    the jail has copied the link, so that the item outlives its first link

An item whose name begins with `-` has no link: the name of a link is an option, too. A hidden file
is often temporary: it leaves the quarantine when it is renamed to a free name, and ends with its
last link.
"""

import errno
import json
import os
import secrets
import stat
from contextlib import suppress

from sbx.guest import hard_links
from sbx.guest.guarded_paths import ITEMS, RECORDS, ResolvedPath
from sbx.guest.path_rules import HIDDEN, OPTION, RuleMatch

ITEMS_MAX = 1_000


class Items:
    """Creates items. Every method raises OSError, for example ENOSPC beyond `ITEMS_MAX` items.
    `content` is an O_PATH descriptor of a file."""

    def open(self, target: ResolvedPath, match: RuleMatch, flags: int, mode: int) -> int:
        """Create a file and return its descriptor."""
        item = _record(target, match, "file")
        fd = os.open(item, flags, mode)
        try:
            _link(item, target, match)
        except OSError:
            os.close(fd)
            raise
        return fd

    def mkdir(self, target: ResolvedPath, match: RuleMatch, mode: int) -> None:
        if match.name == OPTION:
            raise OSError(errno.EROFS, "without a link, nothing could be written below it")
        item = _record(target, match, "directory")
        os.mkdir(item, mode)
        _link(item, target, match)

    def copy(self, content: int, target: ResolvedPath, match: RuleMatch) -> None:
        """Copy a regular file. Raise OSError EXDEV for anything else, or a large one."""
        item = _record(target, match, "file")
        _copy(content, item, os.O_EXCL)
        _link(item, target, match)

    def move(
        self,
        content: int,
        source: ResolvedPath,
        target: ResolvedPath,
        match: RuleMatch | None,
        item: str | None,
    ) -> None:
        """Move a regular file to a new item, over the content of an existing `item`, or with
        neither out of the quarantine."""
        moved = source.item()
        if item is not None:
            _copy(content, item, os.O_TRUNC)
        elif match is not None:
            self.copy(content, target, match)
        else:
            hard_links.place_copy(content, target)
        os.unlink(source.name, dir_fd=source.parent)
        if moved is not None:
            discard(moved)


def content_of(item: str | None, link: int) -> int:
    """Return a new O_PATH descriptor of a file that was only new and hidden, else of its link."""
    if item is None or recorded_name(item) != HIDDEN:
        return os.dup(link)
    fd = os.open(item, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return os.dup(link)


def discard(item: str) -> None:
    """Remove a file of the quarantine whose last link is gone, and the record of it."""
    record = f"{RECORDS}/{item.rpartition('/')[2]}"
    with suppress(IsADirectoryError):  # `rm -r` removes the link only
        if not os.path.lexists(f"{record}.copied"):
            with suppress(FileNotFoundError):  # the jail may have removed it
                os.unlink(item)
            os.unlink(f"{record}.json")


def note_moved(item: str, target: ResolvedPath) -> None:
    """Record the new place of the link of an item."""
    record = f"{RECORDS}/{item.rpartition('/')[2]}.json"
    with open(record, "r+b") as file:
        content = {**json.load(file), "path": "/".join(target.parts)}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(content).encode())


def note_copied(item: str) -> None:
    """Record that the link of an item has a copy."""
    path = f"{RECORDS}/{item.rpartition('/')[2]}.copied"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def recorded_name(item: str) -> str:
    """Return the entry of the table that an item was recorded for."""
    with open(f"{RECORDS}/{item.rpartition('/')[2]}.json", "rb") as file:
        return str(json.loads(file.read())["name"])


def _link(item: str, target: ResolvedPath, match: RuleMatch) -> None:
    if match.name != OPTION:
        os.symlink(item, target.name, dir_fd=target.parent)


def _record(target: ResolvedPath, match: RuleMatch, kind: str) -> str:
    """Record a new item and return its path inside."""
    if len(os.listdir(RECORDS)) >= ITEMS_MAX:
        raise OSError(errno.ENOSPC, "the quarantine is full")
    item_id = secrets.token_hex(8)
    record = {
        "path": "/".join(target.parts),
        "name": match.name,
        "program": match.program,
        "kind": kind,
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(f"{RECORDS}/{item_id}.json", flags, 0o600)
    with open(fd, "wb") as file:
        file.write(json.dumps(record).encode())
    return f"{ITEMS}/{item_id}"


def _copy(content: int, item: str, flag: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flag
    hard_links.check_copied(content)
    writing = os.open(item, flags, os.fstat(content).st_mode & 0o777)
    try:
        hard_links.copy(content, writing)
    finally:
        os.close(writing)
