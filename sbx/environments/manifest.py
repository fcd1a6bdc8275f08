"""The files of a tree with their hashes, and the differences of two states of a tree."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from sbx.environments.record import ALGORITHM
from sbx.errors import Unavailable

_FILES_MAX = 1_000_000
_LISTED_MAX = 1000
_SET_ID = stat.S_ISUID | stat.S_ISGID


class FileHashes(Struct, frozen=True):
    """`entries`: a text for each path below the tree: the size, the executable bit and the hash of
    a file, or the target of a link."""

    entries: Mapping[str, str]
    files: int
    bytes: int


class Differences(Struct, frozen=True):
    """Paths, each list sorted. All lists are empty if the tree is unchanged."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def none(self) -> bool:
        return not (self.changed or self.missing or self.added)

    def to_dict(self) -> dict[str, Any]:
        """Return at most 1,000 paths of each kind."""
        return {
            "changed": self.changed[:_LISTED_MAX],
            "missing": self.missing[:_LISTED_MAX],
            "added": self.added[:_LISTED_MAX],
        }


def contents(top: str, go_on: Callable[[], bool] = lambda: True) -> FileHashes:
    """Read every file below `top`, and follow no links. Stop early if `go_on` returns False.
    Blocks.

    Raise OSError, and Unavailable `environment_too_large`.
    """
    entries: dict[str, str] = {}
    files = size = 0
    for path in _walk(top):
        if not go_on():
            break
        if len(entries) >= _FILES_MAX:
            raise Unavailable(
                f"{top} contains more than {_FILES_MAX:,} files", code="environment_too_large"
            )
        description, length = _entry(path)
        entries[_name(os.path.relpath(path, top))] = description
        files += 1
        size += length
    return FileHashes(dict(sorted(entries.items())), files, size)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> Differences:
    return Differences(
        changed=tuple(sorted(path for path in before.keys() & now if before[path] != now[path])),
        missing=tuple(sorted(before.keys() - now)),
        added=tuple(sorted(now.keys() - before)),
    )


def make_readable(top: str) -> None:
    """Let all users read the files below `top`, and only the owner write. Remove set-id bits.

    The jails of a root runtime have other uids, and root's umask may be strict.
    """
    _permit(top)
    for path in _walk(top, directories=True):
        _permit(path)


def _permit(path: str) -> None:
    current = os.lstat(path).st_mode
    if stat.S_ISLNK(current):
        return
    mode = stat.S_IMODE(current)
    runs = stat.S_ISDIR(current) or mode & 0o111
    allowed = (mode | (0o555 if runs else 0o444)) & ~(_SET_ID | 0o022)
    if allowed != mode:
        os.chmod(path, allowed)


def _entry(path: str) -> tuple[str, int]:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return f"link {_name(os.readlink(path))}", 0
    if not stat.S_ISREG(mode):
        return "neither a file nor a link", 0
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        digest = hashlib.file_digest(file, ALGORITHM).hexdigest()
        length = os.fstat(file.fileno()).st_size
    return f"file {length} {'x' if mode & 0o111 else '-'} {digest}", length


def _walk(top: str, *, directories: bool = False) -> Iterator[str]:
    waiting = [top]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    if directories:
                        yield entry.path
                else:
                    yield entry.path


def _name(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")
