"""Check a store before any change, and make it ready.

A new store is created under another name and then renamed, so the path has a complete store or
none. An existing store is examined read-only, with its log, before a connection that can write
opens it. The process that opens a store has the lock of its data directory, so no two do at once.
A store that is missing, or belongs to another data directory (marks.py), is refused likewise.
"""

import os
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from stat import S_IRWXG, S_IRWXO, S_ISREG

from msgspec import Struct

from sbx.errors import Unavailable, is_disk_full
from sbx.store import marks
from sbx.store.errors import no_space, translated
from sbx.store.marks import Mark, command, sync
from sbx.store.migrations import APPLICATION_ID, BACKUP_ID, Migration, migrate, version_of

_BUSY_S = 5.0
_CHECK_S = 5.0  # a longer check is ended; a store of 1 GB takes about one second
_CHECK_STEPS = 100_000  # of SQLite's virtual machine between two checks of the time
_FOLD_MS = 50  # for readers to end
_LOG_MAX = 64 * 1024 * 1024  # bytes of the log after it starts again
_MAGIC = b"SQLite format 3\0"
_HEADER = 100  # bytes of an SQLite file
_PROGRAM = slice(68, 72)  # its application_id
_OTHERS = S_IRWXG | S_IRWXO


def connections(
    path: Path, steps: Sequence[Migration], data: Path | None = None
) -> tuple[sqlite3.Connection, sqlite3.Connection, Mark | None]:
    """Return a connection that writes and one that reads and, with the data directory `data`, the
    new mark of both. Raise the errors of `Store.open`."""
    with translating(path):
        missing = is_missing(path)
        had = None if missing else examine(path, steps[-1].version)
        mark = None if data is None else _agreed(path, data, had)
        if missing:
            make(path, steps)
        writing = open_writing(path, steps)
        try:
            if data is not None and mark is not None:
                marks.write_to_store(writing, mark)
                marks.write_to_directory(data, mark)
            return writing, _reading(path), mark
        except BaseException:
            writing.close()
            raise


def _agreed(path: Path, data: Path, had: "StoreContents | None") -> Mark:
    """Return the next mark of a store and its directory. Raise Unavailable if they do not match."""
    store, directory = None if had is None else had.mark, marks.read_from_directory(data)
    verdict = marks.judge(
        store,
        directory,
        exists=had is not None and had.version > 0,
        has_sandboxes=marks.has_sandboxes(data),
    )
    if (refusal := marks.refusal(verdict, path, store, directory)) is not None:
        raise refusal
    return marks.following(directory, store)


def is_missing(path: Path) -> bool:
    """Return whether the store is missing. An empty file counts as missing, but not if its log has
    content: that store is damaged."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    if not S_ISREG(status.st_mode):
        raise _corrupt(path, "it is not a regular file")
    return status.st_size == 0 and not has_log(path)


def make(path: Path, steps: Sequence[Migration]) -> None:
    """Create a new store. Leave nothing behind on an error."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if has_log(path):  # SQLite would take it for the log of the new store
        raise _corrupt(path, "it is missing, and its log is there")
    fresh = path.with_name(f".{path.name}.new")
    remove(fresh)
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        open_writing(fresh, steps).close()
        fresh.replace(path)
        sync(path.parent)
    finally:
        remove(fresh)


class StoreContents(Struct, frozen=True):
    """The version and the mark of a store. `version` is 0 for an SQLite file without a schema."""

    version: int
    mark: Mark | None
    is_backup: bool = False


def examine(path: Path, newest: int, *, backup: bool = False) -> StoreContents:
    """Refuse a store that is damaged, newer, of another program, or without `backup` a backup.
    Change nothing."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise _corrupt(path, "it is not an SQLite file")
    with only_looking(path) as looking:
        version = version_of(looking)
        if version > newest:
            raise Unavailable(
                f"the store {path} has version {version}, and this sbx knows up to {newest}",
                code="store_newer",
                hint="use the sbx that wrote it, or another data directory",
            )
        program = looking.execute("PRAGMA application_id").fetchone()[0]
        if program == BACKUP_ID and not backup:
            raise Unavailable(
                f"the store {path} is a backup, which may be older than its data directory",
                code="store_is_backup",
                hint=f"{command('restore', path.parent)} {shlex.quote(str(path))}",
            )
        if program not in (APPLICATION_ID, BACKUP_ID) and (version or _has_tables(looking)):
            raise _corrupt(path, "it belongs to another program")
        if problem := _first_problem(looking) or _schema_problem(looking):
            raise _corrupt(path, problem)
        return StoreContents(version, _mark_of(looking, path), program == BACKUP_ID)


def _mark_of(connection: sqlite3.Connection, path: Path) -> Mark | None:
    try:
        return marks.read_from_store(connection)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            raise
        raise _corrupt(path, f"its mark cannot be read: {error}") from error  # no such column


@contextmanager
def only_looking(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that changes no byte. Without a log it opens the file as immutable. With a
    log, SQLite needs an index of it, which is removed if it did not exist."""
    log, index = has_log(path), _beside(path, "-shm")
    had_index = index.exists()
    how = "mode=ro" if log else "immutable=1"
    try:
        with closing(connect(f"{path.absolute().as_uri()}?{how}")) as looking:
            yield looking
    finally:
        if not had_index:
            with suppress(OSError):
                index.unlink(missing_ok=True)


def _has_tables(connection: sqlite3.Connection) -> bool:
    count: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return count > 0


def _first_problem(connection: sqlite3.Connection) -> str | None:
    deadline = time.monotonic() + _CHECK_S
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_STEPS)
    try:
        problem = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return None
    except UnicodeDecodeError:  # sqlite3 cannot decode SQLite's error message, which has the name
        return "a name in the schema is not UTF-8"
    finally:
        connection.set_progress_handler(None, 0)
    return None if problem == "ok" else problem


def _schema_problem(connection: sqlite3.Connection) -> str | None:
    """Return the first error in the statements of the schema. SQLite does not resolve their
    expressions (CHECK) for a connection that only reads: an invalid one is an error of the first
    connection that writes (measured with 3.40)."""
    statements = (
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        " ORDER BY type = 'table' DESC, rowid"
    )
    try:
        with closing(sqlite3.connect(":memory:")) as empty:
            for (statement,) in connection.execute(statements):
                if not statement.startswith("CREATE "):  # SQLite stores no others
                    raise ValueError(f"{statement[:40]!r} creates nothing")
                empty.execute(statement)
    except (sqlite3.Error, TypeError, ValueError) as error:  # it may be bytes, or have a NUL
        return f"its schema is invalid: {error}"
    return None


def open_writing(path: Path, steps: Sequence[Migration]) -> sqlite3.Connection:
    connection = connect(str(path))
    try:
        if path.stat().st_mode & _OTHERS:
            path.chmod(0o600)  # before SQLite creates the log with the same mode
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_MAX}")
        connection.execute("PRAGMA secure_delete = ON")  # zeroes deleted rows, and free pages
        connection.execute("BEGIN IMMEDIATE")  # fails now if nothing can be written
        connection.execute("ROLLBACK")
        migrate(connection, steps)
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def fold(connection: sqlite3.Connection) -> None:
    """Move the log into the file and empty it, unless a reader needs it."""
    connection.execute(f"PRAGMA busy_timeout = {_FOLD_MS}")
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")


def _reading(path: Path) -> sqlite3.Connection:
    connection = connect(str(path))
    connection.execute("PRAGMA query_only = ON")
    return connection


def connect(where: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        where,
        timeout=_BUSY_S,
        isolation_level=None,  # no BEGIN but ours
        check_same_thread=False,  # opened in one thread, then used in one other
        uri=where.startswith("file:"),
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def has_log(path: Path) -> bool:
    """Return whether a store has a log. A backup has none: a log next to it belongs to another
    store, and SQLite would apply it."""
    log = _beside(path, "-wal")
    return log.exists() and log.stat().st_size > 0 and not _is_backup(path)


def _is_backup(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
    except FileNotFoundError:
        return False
    return header.startswith(_MAGIC) and int.from_bytes(header[_PROGRAM]) == BACKUP_ID


def remove(path: Path) -> None:
    for ending in ("", "-wal", "-shm", "-journal"):
        _beside(path, ending).unlink(missing_ok=True)


def _corrupt(path: Path, why: str) -> Unavailable:
    return Unavailable(
        f"the store {path} cannot be used: {why}",
        code="store_corrupt",
        hint=marks.damaged_hint(path),
    )


@contextmanager
def translating(path: Path) -> Iterator[None]:
    """Translate errors of SQLite and of Linux at the store `path`."""
    try:
        yield
    except sqlite3.Error as error:
        raise translated(error, str(path)) from error
    except OSError as error:
        if is_disk_full(error):
            raise no_space(str(path)) from error
        raise Unavailable(
            f"the store {path} cannot be opened: {error.strerror or error}",
            code="store_unusable",
            hint="the service's user must own the file and its directory",
        ) from error
