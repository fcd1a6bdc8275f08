"""Write the intents of a commit to the disk before its first step. After a kill it is undone.

    begun       the stage exists, or will soon, and must be removed
    intended    the steps and the new nodes are on the disk. The commit may execute the steps
    settled     the steps were executed and are on the disk, or they were undone: as in `begun`,
                only the stage must be removed
    forgotten   the stage is removed

The journal is in the staging directory of a conversation, which no code inside sees. So sbx trusts
it. sbx does not trust the tree: undoing accesses it as a commit does, beneath one fd, step by step.
"""

import json
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sbx.linux.descriptors import closing
from sbx.linux.syncfs import syncfs
from sbx.workspace.snapshots.journal_records import JournalStep, from_json, to_json
from sbx.workspace.streams import Owner

_NAME = re.compile(r"journal-[0-9a-f]{32}")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Journal:
    """The place of the journal entries and stages of a tree.

    It is the directory fd `directory` (O_PATH suffices), which no view contains. If the tree is on
    another mount, stages are `in_tree`, under a temporary name. `host` is the path of a host
    directory.
    """

    directory: int
    in_tree: bool = False
    host: Path | None = None


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """One commit. `stage` is the name of its stage, and `inode` the inode of the tree."""

    stage: str
    in_tree: bool
    inode: int
    host: str | None
    owner: Owner | None
    intents: Sequence[JournalStep] = ()


class JournalFile:
    """The journal entry of one commit. All methods raise OSError."""

    def __init__(self, directory: int, name: str) -> None:
        self._directory = directory
        self._name = name
        self._settled = f"{name}.settled"
        self._half = f"{name}.half"

    @classmethod
    def begin(cls, journal: Journal, record: JournalHeader) -> Self:
        """Write a new entry, or nothing if this raises. A named entry is complete on the disk."""
        entry = cls(journal.directory, f"journal-{secrets.token_hex(16)}")
        try:
            entry._write(record, entry._settled)  # now, because the disk may be full later
            entry._write(record, entry._half, sync=True)
            entry._rename(entry._half)
        except BaseException:
            with suppress(OSError):
                entry.forget()
            raise
        return entry

    def intend(self, record: JournalHeader, intents: Sequence[JournalStep], stage: int) -> None:
        """Write the intents and the directory fd `stage` to the disk before returning."""
        self._write(replace(record, intents=intents), self._half, sync=True)
        syncfs(stage)
        self._rename(self._half)

    def settle(self, stage: int) -> None:
        """Mark the commit as settled. If this raises, the next process undoes the commit."""
        syncfs(stage)
        self._rename(self._settled)

    def is_empty(self) -> bool:
        """Return whether the entry was never written. Older versions may leave such an entry, and
        nothing was staged for it."""
        return os.stat(self._name, dir_fd=self._directory, follow_symlinks=False).st_size == 0

    def forget(self) -> None:
        for name in (self._half, self._settled, self._name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)

    def read(self) -> JournalHeader:
        """Read the entry. Raises ValueError, TypeError or LookupError, too, if it is invalid."""
        flags = os.O_RDONLY | os.O_NOFOLLOW
        with open(os.open(self._name, flags, dir_fd=self._directory), "rb") as file:
            data: dict[str, Any] = json.load(file)
        if data["version"] != _VERSION:
            raise ValueError(f"it has the version {data['version']}")
        return JournalHeader(
            stage=data["stage"],
            in_tree=data["in_tree"],
            inode=data["inode"],
            host=data["host"],
            owner=None if data["owner"] is None else (data["owner"][0], data["owner"][1]),
            intents=from_json(data["intents"]),
        )

    def _write(self, record: JournalHeader, name: str, *, sync: bool = False) -> None:
        data = {
            "version": _VERSION,
            "stage": record.stage,
            "in_tree": record.in_tree,
            "inode": record.inode,
            "host": record.host,
            "owner": record.owner,
            "intents": to_json(record.intents),
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(name, flags, 0o600, dir_fd=self._directory)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(data, file)
            if sync:
                file.flush()
                os.fsync(fd)

    def _rename(self, name: str) -> None:
        os.rename(name, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        with _opened(self._directory) as fd:
            os.fsync(fd)


def unfinished(directory: int) -> list[JournalFile]:
    """Return the commits that a kill interrupted, the latest first. Raises OSError."""
    with _opened(directory) as fd:
        names = [name for name in os.listdir(fd) if _NAME.fullmatch(name)]
        ages = {name: os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns for name in names}
    return [
        JournalFile(directory, name) for name in sorted(names, key=ages.__getitem__, reverse=True)
    ]


def _opened(directory: int) -> closing:
    """Open the directory of an O_PATH fd for reading."""
    return closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory))
