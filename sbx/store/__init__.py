"""The persistent state of a service: one SQLite file, one writer, and no call that blocks the loop.

    __init__.py    Store: open, read, write, close
    database.py    the checks before a file is changed; migration
    marks.py       whether it is the store of its data directory, and the latest one
    worker.py      a connection in a separate thread
    errors.py      translates errors of sqlite3
    pending.py     writes that must not be lost
    migrations.py  the numbered steps, NNNN.sql
    sandboxes.py   workspaces.py  conversations.py  runs.py  uploads.py  keys.py  tokens.py
    events.py      idempotency.py  chats.py  messages.py  agent_runs.py  approvals.py  projects.py
    console.py     the rows of each table, and every query on it

Why sqlite3 and not aiosqlite: a transaction must be one thread hop, because every run is recorded
within the time of one `1+1` over HTTP. aiosqlite hops for each statement, so BEGIN, INSERT, UPDATE,
COMMIT are four. Measured on two busy cores, with uvloop, p50: 0.12 ms (p99 0.33 ms) against 0.03 ms
(0.06 ms) for one hop. Also, four awaits need a lock around them, and a cancellation between two of
them leaves a transaction open.

Write-ahead log, `synchronous=NORMAL`: awaited writes survive the death of the process at any
moment. A power cut may lose the last moments, and never leaves a part of a transaction.
"""

import asyncio
import logging
import sqlite3
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from sbx.errors import SbxError, Unavailable
from sbx.store import database, marks
from sbx.store.marks import Mark
from sbx.store.migrations import Migration, migrate, shipped
from sbx.store.worker import WRITE, Worker

FILE_NAME = "store.sqlite"
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Store:
    """An open store. Use it from one event loop."""

    def __init__(
        self, path: Path, writer: Worker, reader: Worker, mark: Mark | None = None
    ) -> None:
        """`mark`: of the store of a data directory. `close` writes the next one."""
        self.path = path
        self._writer = writer
        self._reader = reader
        self._mark = mark

    @property
    def failures(self) -> int:
        """Return the number of writes that SQLite refused. Acts read it in the writer's thread."""
        return self._writer.failures

    @classmethod
    async def open_in(cls, data: Path, *, on_full: Callable[[], bool] | None = None) -> Self:
        """Open the store of a data directory, whose lock the caller holds.

        `on_full` is called, in any thread, when a write meets a full disk. It makes room, and
        returns whether to try the write again.

        Raise the errors of `open`, and Unavailable `store_missing`, `store_older`,
        `store_of_another`: the store does not know every sandbox with files in the directory.
        """
        return await cls._opened(data / FILE_NAME, shipped(), data, on_full)

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        migrations: Sequence[Migration] | None = None,
    ) -> Self:
        """Open the store at `path`, or create it (mode 0600, missing directories 0700); migrate it.

        A refused store stays unchanged, byte for byte. Raise Unavailable: `store_newer` (a later
        sbx wrote it), `store_corrupt` (damaged, or not a store of sbx), `store_is_backup`,
        `store_unusable` (cannot be read and written), `no_space`.
        """
        steps = shipped() if migrations is None else migrations
        return await cls._opened(path, steps, None, None)

    @classmethod
    def in_memory(cls) -> Self:
        """Open a store that ends with this object. It has no file and no thread: an act runs in the
        event loop, where it takes microseconds. Foreign keys are not enforced."""
        connection = database.connect(":memory:")
        migrate(connection, shipped())
        worker = Worker(connection, "", threaded=False)
        weakref.finalize(worker, connection.close)  # Python 3.13 warns of one that is not closed
        return cls(Path(":memory:"), worker, worker)

    @classmethod
    async def _opened(
        cls,
        path: Path,
        steps: Sequence[Migration],
        data: Path | None,
        on_full: Callable[[], bool] | None,
    ) -> Self:
        writing, reading, mark = await asyncio.to_thread(_connected, path, steps, data, on_full)
        writer = Worker(writing, "sbx-store-writer", on_full)
        return cls(path, writer, Worker(reading, "sbx-store-reader", on_full), mark)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Complete the queued writes, also those of `write_later`, and close the file. A second
        call does nothing."""
        await self._reader.close()
        mark, self._mark = self._mark, None
        if mark is not None:
            await self._leave(marks.following(mark))
        await self._writer.close()  # last, as the last connection folds the log into the file

    async def _leave(self, mark: Mark) -> None:
        """Write the mark of a clean end. The next start also works without it."""
        try:
            await self._writer.run(partial(marks.write_to_store, mark=mark))
            await asyncio.to_thread(marks.write_to_directory, self.path.parent, mark)
        except (SbxError, OSError) as error:
            _log.warning("the mark of a clean end could not be written: %s", error)

    @property
    def damaged(self) -> bool:
        """Return whether SQLite has met a damaged page since the start."""
        return self._reader.damaged or self._writer.damaged

    async def read(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Run several queries over one state of the store, in one hop. They cannot write.

        They see every write that was awaited before, and no queued one.
        """
        return await self._reader.run(act, begin="BEGIN")

    async def rows(self, sql: str, *args: Any, **named: Any) -> list[sqlite3.Row]:
        """Return all rows of one query. Use LIMIT if a caller can make it grow.

        `args` are the values of `?`, or `named` those of `:name`.
        """
        return await self._reader.run(lambda on: on.execute(sql, named or args).fetchall())

    async def row(self, sql: str, *args: Any, **named: Any) -> sqlite3.Row | None:
        def first(on: sqlite3.Connection) -> sqlite3.Row | None:
            row: sqlite3.Row | None = on.execute(sql, named or args).fetchone()
            return row

        return await self._reader.run(first)

    async def write(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Run `act` as one transaction, after all queued ones, and await its commit.

        `act` runs in the writer's thread: it must be short and use only the connection. Its errors
        roll back, and are raised here. Errors of sqlite3 are translated: BadRequest for a value
        that a row cannot store; Unavailable `no_space`, `store_busy`, `store_corrupt` or
        `store_unusable`; otherwise Broken. A cancelled caller does not stop the transaction.
        """
        return await self._writer.run(act, begin=WRITE)

    async def settled(self) -> None:
        await self._writer.run(lambda on: None)

    async def fold(self) -> None:
        """Move the log into the file and empty it, so that neither has deleted rows. A reader, such
        as a backup, may prevent it until the next call. Log errors: the rows are deleted anyway."""
        try:
            await self._writer.run(database.fold)
        except SbxError as error:
            _log.warning("the log of the store was not emptied: %s", error)

    def write_later(self, act: Callable[[sqlite3.Connection], object]) -> None:
        """Queue a write in the same order, without a caller that waits. A failure is logged."""
        self._writer.later(act, begin=WRITE)


def record(kind: type[T], row: sqlite3.Row, **changes: Any) -> T:
    """Return a record from the columns of a row; `changes` replace values."""
    columns = {*kind.__annotations__}.intersection(row.keys())
    return kind(**{name: row[name] for name in columns} | changes)


def _connected(
    path: Path,
    steps: Sequence[Migration],
    data: Path | None,
    on_full: Callable[[], bool] | None,
) -> tuple[sqlite3.Connection, sqlite3.Connection, Mark | None]:
    while True:
        try:
            return database.connections(path, steps, data)
        except Unavailable as error:
            if error.code != "no_space" or on_full is None or not on_full():
                raise
