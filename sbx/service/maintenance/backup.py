"""A copy of the store while the service runs, and another store in the place of the present one.

A store is put in its place in an order that a kill at any moment leaves refused, and not lost:

    1  the new file is complete on the disk, with a generation that is above all others
    2  the data directory has that generation: the present store is `store_older` from now on
    3  unclaimed directories that the new store knows are moved to where they were
    4  the present store and its log get another name, in addition to their own
    5  the log is removed, which SQLite would take for that of the new store
    6  the new file gets the name of the store
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from msgspec import Struct

from sbx.errors import BadRequest, Conflict, NotFound, SbxError, Unavailable
from sbx.linux.renameat2 import rename_new
from sbx.service.maintenance import place
from sbx.service.maintenance.check import Directories, known_directories, missing_in, on_disk
from sbx.store import FILE_NAME, database, marks
from sbx.store.marks import Mark
from sbx.store.migrations import APPLICATION_ID, BACKUP_ID, shipped
from sbx.workspace import unclaimed

_PAGES = 256  # copied at once
_BUSY_S = 0.01
_ATTEMPTS = 5
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BackupReport(Struct, frozen=True):
    file: Path
    bytes: int
    mark: Mark | None


class ReplacedStore(Struct, frozen=True):
    """`kept`: the store that was there before. `unknown`: how many directories the new one does not
    know; `brought_back`: the ids of unclaimed directories that it knows."""

    mark: Mark
    kept: Path | None
    unknown: int
    brought_back: tuple[str, ...]


def backup(data: Path, target: Path, *, force: bool) -> BackupReport:
    """Write a copy of the store to `target`, mode 0600, whole or not at all. The service may run
    and write meanwhile.

    Raises Conflict `file_exists` without `force`, and with it for a target that is not a regular
    file; Conflict `backup_running`, BadRequest for a target in the data directory, Unavailable for
    a store that cannot be read.
    """
    if os.path.lexists(target) and not (force and S_ISREG(target.lstat().st_mode)):
        raise _exists(target)
    if Path(os.path.realpath(target.parent)).is_relative_to(os.path.realpath(data)):
        raise BadRequest(
            f"{target} lies in the data directory, whose files the service uses",
            code="usage",
            hint="choose a place outside, best on another disk",
        )
    with ExitStack() as stack:
        stack.enter_context(place.backing_up(data))
        with place.as_owner(data):
            snapshot = data / f".{FILE_NAME}.backup-copy"
            with database.translating(data / FILE_NAME):
                database.remove(snapshot)  # of a backup that was killed
            try:
                mark = _snapshot(data / FILE_NAME, snapshot)
                source = stack.enter_context(_opened(snapshot))
            finally:
                database.remove(snapshot)
        with database.translating(target):
            size = _write(source, target, force=force, of=data)
    return BackupReport(target, size, mark)


def restore(data: Path, source: Path | None, *, force: bool) -> ReplacedStore:
    """Put a backup in the place of the store; without `source` an empty one.

    Raises Conflict `service_running`, NotFound `backup_not_found`, BadRequest `backup_unusable`,
    Conflict `backup_of_another` without `force`.
    """
    with ExitStack() as stack:
        parts = {} if source is None else _parts(stack, source)
        stack.enter_context(place.as_owner(data))
        stack.enter_context(place.ended(data))
        fresh = stack.enter_context(new_file(data))
        mark = None
        if source is not None:
            for ending, part in parts.items():
                _pour(part, os.open(f"{fresh}{ending}", _WRITE, 0o600))
            mark = _examined(fresh, source)
            directory = marks.read_from_directory(data)
            if mark and directory and mark.id != directory.id and not force:
                raise Conflict(
                    f"{source} is a backup of another data directory",
                    code="backup_of_another",
                    hint="choose a backup of this one, or add --force: directories that it does not"
                    " know are kept apart",
                )
        else:
            database.make(fresh, shipped())
        return replace(data, fresh, mark, "store.restore", source=str(source or "empty"))


def replace(
    data: Path, fresh: Path, mark: Mark | None, act: str, **details: object
) -> ReplacedStore:
    """Put the store `fresh` in place, see the module; `mark` is the one that it has. `act` is for
    the audit log. The caller holds the lock."""
    path = data / FILE_NAME
    latest = _latest(data, mark)
    with database.translating(path):
        with closing(database.open_writing(fresh, shipped())) as on:
            on.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            marks.write_to_store(on, latest)
            recorded = known_directories(on)
            # Fails on a full disk, which the end of a connection does not.
            on.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        marks.sync(fresh)
        kept = _name_of_kept(path)
        place.record(data, act, FILE_NAME, generation=latest.generation, kept=kept.name, **details)
        marks.write_to_directory(data, latest)
        brought_back = _brought_back(data, recorded)
        unknown = len(missing_in(recorded, on_disk(data)))
        is_there = os.path.lexists(path)
        for ending in ("", "-wal"):  # a second name: no kill parts the store from its log
            with suppress(FileNotFoundError):
                os.link(f"{path}{ending}", f"{kept}{ending}", follow_symlinks=False)
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
        fresh.replace(path)
        marks.sync(data)
    return ReplacedStore(latest, kept if is_there else None, unknown, brought_back)


@contextmanager
def new_file(data: Path) -> Iterator[Path]:
    """Give the name for a store that is being made; remove any file of that name before and
    after."""
    fresh = data / f".{FILE_NAME}.replacement"
    database.remove(fresh)
    try:
        yield fresh
    finally:
        database.remove(fresh)


def copy(path: Path, target: Path) -> None:
    """Copy a store to the new file `target`. Raises sqlite3.Error, OSError."""
    os.close(os.open(target, _WRITE, 0o600))
    with database.only_looking(path) as source, closing(database.connect(str(target))) as to:
        source.execute("BEGIN")  # one state of it, so that no write starts the copy again
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(to, pages=_PAGES, sleep=_BUSY_S)


def _snapshot(path: Path, target: Path) -> Mark | None:
    """Make a complete copy that is marked as a backup; return the mark of the store. A store
    without a log is read as a file that does not change: if a service has started meanwhile, copy
    it again."""
    if database.is_missing(path):
        raise NotFound(f"store {path} does not exist", code="store_missing")
    with database.translating(path):
        for _ in range(_ATTEMPTS):
            before = _state(path)
            copy(path, target)
            if before is None or before == _state(path):
                break
            database.remove(target)
        else:
            raise Conflict(f"the store {path} did not hold still", hint="try again")
        mark = database.examine(target, shipped()[-1].version, backup=True).mark
        with closing(database.connect(str(target))) as on:
            on.execute("PRAGMA journal_mode = DELETE")  # one file, without a log
            on.execute(f"PRAGMA application_id = {BACKUP_ID}")
        return mark


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return values that change when a store without a log is written; None for one that has a
    log."""
    if database.has_log(path):
        return None
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _parts(stack: ExitStack, source: Path) -> dict[str, BinaryIO]:
    """Return the file, and the log of one that was copied by other means. Raises NotFound
    `backup_not_found`, BadRequest `backup_unusable`."""
    parts: dict[str, BinaryIO] = {}
    for ending in ("", "-wal"):
        try:
            if not ending or database.has_log(source):
                parts[ending] = stack.enter_context(open(f"{source}{ending}", "rb"))  # noqa: SIM115
        except FileNotFoundError:
            if not ending:
                raise NotFound(f"backup {source} does not exist", code="backup_not_found") from None
        except OSError as error:
            raise BadRequest(
                f"the backup {source} cannot be read: {error.strerror}", code="backup_unusable"
            ) from error
    return parts


def _examined(fresh: Path, source: Path) -> Mark | None:
    """Return the mark of a copy of `source`. Raises BadRequest `backup_unusable`."""
    try:
        with database.translating(fresh):
            contents = database.examine(fresh, shipped()[-1].version, backup=True)
            if contents.version == 0:
                raise Unavailable("it is empty")
            return contents.mark
    except SbxError as error:
        raise BadRequest(
            f"{source} cannot be restored: {error.message.replace(str(fresh), str(source))}",
            code="backup_unusable",
            hint="choose another backup; the present store is as it was",
        ) from error


def _latest(data: Path, mark: Mark | None) -> Mark:
    """Return a mark that is later than those of the directory, the present store and the new
    one."""
    present = None
    with suppress(SbxError, sqlite3.Error, OSError):
        path = data / FILE_NAME
        present = database.examine(path, shipped()[-1].version, backup=True).mark
    return marks.following(marks.read_from_directory(data), present, mark)


def _name_of_kept(path: Path) -> Path:
    moment = datetime.fromtimestamp(time.time(), UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in count():
        kept = path.with_name(f"{path.stem}-{moment}{f'-{number}' if number else ''}{path.suffix}")
        if not any(os.path.lexists(f"{kept}{ending}") for ending in ("", "-wal")):
            return kept
    raise AssertionError("numbers do not end")


def _brought_back(data: Path, recorded: Directories) -> tuple[str, ...]:
    """Move the unclaimed directories that are known to where they were; their ids."""
    items = unclaimed.items(data)
    # Sandboxes first: a conversation may be one of a sandbox that was moved later.
    items.sort(key=lambda item: item.conversation is not None)
    return tuple(
        item.id
        for item in items
        if item.sandbox in recorded
        and (item.conversation is None or item.conversation in recorded[item.sandbox])
        and unclaimed.bring_back(data, item)
    )


def _write(source: BinaryIO, target: Path, *, force: bool, of: Path) -> int:
    """Write the new file under one name for all backups of a data directory. There is one backup at
    a time, so each removes the file of a killed one."""
    fresh = target.with_name(f".{FILE_NAME}.backup-{os.stat(of).st_ino:x}")
    fresh.unlink(missing_ok=True)
    parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        size = _pour(source, os.open(fresh, _WRITE, 0o600))
        if force:
            fresh.replace(target)
        else:
            try:
                rename_new(parent, os.fsencode(fresh.name), parent, os.fsencode(target.name))
            except FileExistsError:  # it came meanwhile
                raise _exists(target) from None
        os.fsync(parent)
    finally:
        os.close(parent)
        fresh.unlink(missing_ok=True)
    return size


def _pour(source: BinaryIO, fd: int) -> int:
    with os.fdopen(fd, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _exists(target: Path) -> Conflict:
    return Conflict(
        f"{target} is there already",
        code="file_exists",
        hint="choose another name, or add --force, which replaces a regular file",
    )
