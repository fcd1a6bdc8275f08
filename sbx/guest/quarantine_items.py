"""The path guard's side of the quarantine: `sbx.workspace.quarantine` has the layout on the host.

An item is recorded first, then created, then linked to from its place. Landlock lets the jail write
below `items` and only the guard below `records`.
"""

import errno
import json
import os
import secrets

from sbx.guest import hard_links
from sbx.guest.guarded_paths import ITEMS, RECORDS, ResolvedPath
from sbx.guest.path_rules import RuleMatch

_ITEMS_MAX = 1_000


class Items:
    """Creates items. Every method raises OSError, for example ENOSPC beyond `_ITEMS_MAX` items."""

    def open(self, target: ResolvedPath, match: RuleMatch, flags: int, mode: int) -> int:
        """Create a file and return its descriptor."""
        item = _record(target, match, "file")
        fd = os.open(item, flags, mode)
        try:
            os.symlink(item, target.name, dir_fd=target.parent)
        except OSError:
            os.close(fd)
            raise
        return fd

    def mkdir(self, target: ResolvedPath, match: RuleMatch, mode: int) -> None:
        item = _record(target, match, "directory")
        os.mkdir(item, mode)
        os.symlink(item, target.name, dir_fd=target.parent)

    def copy(self, source: ResolvedPath, target: ResolvedPath, match: RuleMatch) -> None:
        """Copy a regular file. Raise OSError EXDEV for anything else, or a large one."""
        item = _record(target, match, "file")
        _copy(source, item, os.O_EXCL)
        os.symlink(item, target.name, dir_fd=target.parent)

    def move(
        self, source: ResolvedPath, target: ResolvedPath, match: RuleMatch | None, item: str | None
    ) -> None:
        """Move a regular file to a new item, or over the content of an existing `item`."""
        if item is not None:
            _copy(source, item, os.O_TRUNC)
        else:
            assert match is not None  # a free name is renamed instead
            self.copy(source, target, match)
        os.unlink(source.name, dir_fd=source.parent)


def recorded_name(item: str) -> str:
    """Return the entry of the table that an item was recorded for."""
    with open(f"{RECORDS}/{item.rpartition('/')[2]}.json", "rb") as file:
        return str(json.loads(file.read())["name"])


def _record(target: ResolvedPath, match: RuleMatch, kind: str) -> str:
    """Record a new item and return its path inside."""
    if len(os.listdir(RECORDS)) >= _ITEMS_MAX:
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


def _copy(source: ResolvedPath, item: str, flag: int) -> None:
    reading = source.hold()
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flag
        hard_links.check_copied(reading)
        writing = os.open(item, flags, os.fstat(reading).st_mode & 0o777)
        try:
            hard_links.copy(reading, writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
