"""What a commit intends, on the disk before the first of its steps: after a kill it is undone.

    begun       a stage is there, or soon will be, and is to be removed
    intended    the steps, and all that is to come, are on the disk: now they may be done
    settled     they were done and are on the disk, or were undone: as when it was begun
    forgotten   the stage is removed

A journal lies in a conversation's staging directory, which no code inside sees, so it is believed.
The tree that it tells of is not: it is gone through as by a commit, beneath one fd, step by step.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sbx.linux.syncfs import syncfs
from sbx.workspace.intents import Intent, from_json, to_json
from sbx.workspace.streams import Owner

_NAME = re.compile(r"journal-[0-9a-f]{32}")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Journal:
    """Where commits to a tree are written down, and staged: the directory fd `directory` (O_PATH
    will do), which is in no view. Where the tree is on another mount they are staged `in_tree`,
    under a temporary name. `host` is the path of a tree that is the host's."""

    directory: int
    in_tree: bool = False
    host: Path | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One commit. `stage` is the name of its stage, `inode` that of the tree."""

    stage: str
    in_tree: bool
    inode: int
    host: str | None
    owner: Owner | None
    intents: Sequence[Intent] = ()


class Entry:
    """One commit in its journal. All methods raise OSError."""

    def __init__(self, directory: int, name: str) -> None:
        self._directory = directory
        self._name = name
        self._settled = f"{name}.settled"
        self._half = f"{name}.half"

    @classmethod
    def begin(cls, journal: Journal, record: Record) -> Self:
        """Nothing is left where it raises. The entry has its name once it is whole on the disk."""
        entry = cls(journal.directory, f"journal-{secrets.token_hex(16)}")
        try:
            entry._write(record, entry._settled)  # now: later there may be no room for it
            entry._write(record, entry._half, sync=True)
            entry._rename(entry._half)
        except BaseException:
            with suppress(OSError):
                entry.forget()
            raise
        return entry

    def intend(self, record: Record, intents: Sequence[Intent], stage: int) -> None:
        """All of it is on the disk when it returns, with what lies in the directory fd `stage`."""
        self._write(replace(record, intents=intents), self._half, sync=True)
        syncfs(stage)
        self._rename(self._half)

    def settle(self, stage: int) -> None:
        """Where it raises, it is undone by who comes next."""
        syncfs(stage)
        self._rename(self._settled)

    def is_empty(self) -> bool:
        """Return whether it was never written, as an entry of an older version may be: nothing was
        staged for it."""
        return os.stat(self._name, dir_fd=self._directory, follow_symlinks=False).st_size == 0

    def forget(self) -> None:
        for name in (self._half, self._settled, self._name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)

    def read(self) -> Record:
        """Raises ValueError, TypeError and LookupError, too, for what is no entry of ours."""
        flags = os.O_RDONLY | os.O_NOFOLLOW
        with open(os.open(self._name, flags, dir_fd=self._directory), "rb") as file:
            told: dict[str, Any] = json.load(file)
        if told["version"] != _VERSION:
            raise ValueError(f"it has the version {told['version']}")
        return Record(
            stage=told["stage"],
            in_tree=told["in_tree"],
            inode=told["inode"],
            host=told["host"],
            owner=None if told["owner"] is None else (told["owner"][0], told["owner"][1]),
            intents=from_json(told["intents"]),
        )

    def _write(self, record: Record, name: str, *, sync: bool = False) -> None:
        told = {
            "version": _VERSION,
            "stage": record.stage,
            "in_tree": record.in_tree,
            "inode": record.inode,
            "host": record.host,
            "owner": record.owner,
            "intents": to_json(record.intents),
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        made = os.open(name, flags, 0o600, dir_fd=self._directory)
        with open(made, "w", encoding="ascii") as file:
            json.dump(told, file)
            if sync:
                file.flush()
                os.fsync(made)

    def _rename(self, name: str) -> None:
        os.rename(name, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        with _listed(self._directory) as fd:
            os.fsync(fd)


def unforgotten(directory: int) -> list[Entry]:
    """The commits that a kill cut off, the last one first. Raises OSError."""
    with _listed(directory) as fd:
        names = [name for name in os.listdir(fd) if _NAME.fullmatch(name)]
        ages = {name: os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns for name in names}
    return [Entry(directory, name) for name in sorted(names, key=ages.__getitem__, reverse=True)]


@contextmanager
def _listed(directory: int) -> Iterator[int]:
    """Open for reading what is held by O_PATH only."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
