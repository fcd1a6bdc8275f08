"""What is checked before a store is touched, and what makes it ready.

A new store is made under another name and then renamed, so what lies at the path is a whole store
or none. One that is there is examined read-only, its log included, before any connection that could
write opens it. Whoever opens a store holds the lock of its data directory, so no two come at once.
"""

import errno
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from stat import S_IRWXG, S_IRWXO, S_ISREG

from sbx.errors import Unavailable
from sbx.runtime.store.failures import translated
from sbx.runtime.store.migrations import APPLICATION_ID, Migration, migrate, version_of

_BUSY_S = 5.0
_CHECK_S = 5.0  # a check that takes longer is left; a store of 1 GB takes about one second
_CHECK_STEPS = 100_000  # of SQLite's virtual machine between two looks at the time
_LOG_MAX = 64 * 1024 * 1024  # bytes that the log keeps when it starts again
_MAGIC = b"SQLite format 3\0"
_OTHERS = S_IRWXG | S_IRWXO


def connections(
    path: Path, steps: Sequence[Migration]
) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """A connection that writes and one that reads; see `Store.open` for what is raised."""
    with _translated(path):
        if _is_missing(path):
            _make(path, steps)
        _examine(path, steps[-1].version)
        writing = _writing(path, steps)
        try:
            return writing, _reading(path)
        except BaseException:
            writing.close()
            raise


def _is_missing(path: Path) -> bool:
    """An empty file, as `touch` makes, is no store either; one whose log is full was damaged."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    if not S_ISREG(found.st_mode):
        raise _corrupt(path, "it is not a regular file")
    return found.st_size == 0 and not _has_log(path)


def _make(path: Path, steps: Sequence[Migration]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    _remove(fresh)
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        _writing(fresh, steps).close()
        fresh.replace(path)
        _sync_directory(path.parent)
    finally:
        _remove(fresh)


def _examine(path: Path, newest: int) -> None:
    """Refuse what is damaged, newer, or somebody else's; changes nothing."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise _corrupt(path, "it is not an SQLite file")
    with _only_looking(path) as looking:
        version = version_of(looking)
        if version > newest:
            raise Unavailable(
                f"the store {path} has version {version}, and this sbx knows up to {newest}",
                code="store_newer",
                hint="use the sbx that wrote it, or another data directory",
            )
        mark = looking.execute("PRAGMA application_id").fetchone()[0]
        if mark != APPLICATION_ID and (version or _has_tables(looking)):
            raise _corrupt(path, "it belongs to another program")
        if problem := _first_problem(looking):
            raise _corrupt(path, problem)


@contextmanager
def _only_looking(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that leaves every byte as it is. Without a log it takes the file for immutable;
    with one, SQLite needs its index of the log, which goes again if it was not there."""
    log, index = _has_log(path), _beside(path, "-shm")
    had_index = index.exists()
    how = "mode=ro" if log else "immutable=1"
    try:
        with closing(_connect(f"{path.absolute().as_uri()}?{how}")) as looking:
            yield looking
    finally:
        if not had_index:
            with suppress(OSError):
                index.unlink(missing_ok=True)


def _has_tables(connection: sqlite3.Connection) -> bool:
    found: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return found > 0


def _first_problem(connection: sqlite3.Connection) -> str | None:
    deadline = time.monotonic() + _CHECK_S
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_STEPS)
    try:
        found = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return None
    return None if found == "ok" else found


def _writing(path: Path, steps: Sequence[Migration]) -> sqlite3.Connection:
    connection = _connect(str(path))
    try:
        if path.stat().st_mode & _OTHERS:
            path.chmod(0o600)  # before SQLite gives the log the same mode
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_MAX}")
        connection.execute("BEGIN IMMEDIATE")  # fails now where nothing can be written
        connection.execute("ROLLBACK")
        migrate(connection, steps)
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _reading(path: Path) -> sqlite3.Connection:
    connection = _connect(str(path))
    connection.execute("PRAGMA query_only = ON")
    return connection


def _connect(where: str) -> sqlite3.Connection:
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


def _has_log(path: Path) -> bool:
    log = _beside(path, "-wal")
    return log.exists() and log.stat().st_size > 0


def _remove(path: Path) -> None:
    for ending in ("", "-wal", "-shm", "-journal"):
        _beside(path, ending).unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _corrupt(path: Path, why: str) -> Unavailable:
    return Unavailable(
        f"the store {path} cannot be used: {why}",
        code="store_corrupt",
        hint="it was left as it is; restore a copy, or move it away to begin with an empty one",
    )


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translated(error, str(path)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(
                "there is no space left for the store",
                code="no_space",
                hint=f"free some on the file system of {path}",
            ) from error
        raise Unavailable(
            f"the store {path} cannot be opened: {error.strerror or error}",
            code="store_unusable",
            hint="the service's user must own the file and its directory",
        ) from error
