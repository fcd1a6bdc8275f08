"""A connection in a separate thread, which does queued work in order."""

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from msgspec import Struct

from sbx.errors import BadRequest, Broken, Closed, SbxError, Unavailable
from sbx.store.errors import is_full, translated

T = TypeVar("T")
WRITE = "BEGIN IMMEDIATE"
_TOGETHER_MAX = 64  # writes in one transaction
_WAIT_S = 30.0  # a working disk needs far less; also the busy time-out of SQLite
_log = logging.getLogger(__name__)


class _Job(Struct, frozen=True):
    act: Callable[[sqlite3.Connection], Any]
    begin: str | None  # None: one query, which is a transaction by itself
    reply: "asyncio.Future[Any] | None"  # None: no caller waits


class Worker:
    def __init__(
        self,
        connection: sqlite3.Connection,
        name: str,
        on_full: Callable[[], bool] | None = None,
        *,
        threaded: bool = True,
    ) -> None:
        """`on_full` makes room on a full disk, and returns whether to try again. Without a thread,
        an act runs at once in the event loop.

        `failures` counts the attempts that SQLite refused, at COMMIT too, and the groups of writes
        that were rolled back. An act that was repeated after one is done twice in memory, and once
        in the store. `damaged`: SQLite has met a damaged page.
        """
        self.failures = 0
        self.damaged = False
        self._connection = connection
        self._on_full = on_full
        self._refused = ""  # the code of the last failure of `later`
        self._path = str(connection.execute("PRAGMA database_list").fetchone()[2])
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()

    async def run(self, act: Callable[[sqlite3.Connection], T], *, begin: str | None = None) -> T:
        """Run `act` in the thread, in the transaction that `begin` opens, and return its result.

        Raise Unavailable `store_busy` if the disk does not answer; `act` may still run later.
        """
        if self._closed:
            raise Closed("the store was closed")
        if self._thread is None:
            return self._do_now(act, begin)
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(act, begin, reply))
        try:
            async with asyncio.timeout(_WAIT_S):
                return await reply
        except TimeoutError:
            raise Unavailable(
                f"the store did not answer within {_WAIT_S:g} seconds", code="store_busy"
            ) from None

    def later(self, act: Callable[[sqlite3.Connection], object], *, begin: str) -> None:
        if self._closed:
            _log.error("a write after the end of the store is lost")
            return
        job = _Job(act, begin, None)
        if self._thread is None:
            self._answer(job)
        else:
            self._jobs.put(job)

    async def close(self) -> None:
        if self._thread is None:
            self._closed = True
            self._connection.close()
            return
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, _WAIT_S)
        if self._thread.is_alive():
            _log.error("the disk does not answer; queued writes of the store may be lost")

    def _do_now(self, act: Callable[[sqlite3.Connection], T], begin: str | None) -> T:
        try:
            result: T = self._tried(_Job(act, begin, None))
        except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            failure = self._translate(error)
        else:
            return result
        raise failure

    def _serve(self) -> None:
        waiting = deque[_Job | None]()
        while True:
            while not waiting or (len(waiting) < _TOGETHER_MAX and not self._jobs.empty()):
                waiting.append(self._jobs.get())
            job = waiting.popleft()
            if job is None:
                break
            jobs = [job]
            while waiting and (behind := waiting[0]) and behind.begin == job.begin == WRITE:
                jobs.append(behind)
                waiting.popleft()
            if len(jobs) == 1 or not self._answer_together(jobs):
                for job in jobs:
                    self._answer(job)
            del job, jobs  # otherwise their objects would live until the next job
        self._connection.close()

    def _answer_together(self, jobs: Sequence[_Job]) -> bool:
        """Do several writes in one transaction. Return False if the store has none of them, because
        one failed.

        With 100 clients, a transaction for each run makes SQLite write five times as many pages,
        and all of them wait for each checkpoint.
        """
        try:
            self._connection.execute(WRITE)
            results = [job.act(self._connection) for job in jobs]
            self._connection.execute("COMMIT")
        except BaseException:  # noqa: BLE001  # each is repeated alone, and raises its own error
            self.failures += 1
            with suppress(sqlite3.Error):  # the next job tries again
                self._connection.execute("ROLLBACK")
            return False
        self._refused = ""
        for job, result in zip(jobs, results, strict=True):
            _deliver(job, _result, result)
        return True

    def _answer(self, job: _Job) -> None:
        try:
            result = self._tried(job)
        except BaseException as error:  # noqa: BLE001  # passed to the caller that waits
            self._failed(job, error)
        else:
            if job.begin is not None:
                self._refused = ""
            _deliver(job, _result, result)

    def _tried(self, job: _Job) -> Any:
        while True:
            try:
                return self._do(job)
            except sqlite3.Error as error:
                self.failures += 1
                if self._on_full is None or not is_full(error) or not self._on_full():
                    raise

    def _do(self, job: _Job) -> Any:
        if job.begin is None:
            return job.act(self._connection)
        if self._connection.in_transaction:  # the rollback of the last one failed
            self._connection.execute("ROLLBACK")
        self._connection.execute(job.begin)
        try:
            result = job.act(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have rolled it back already
                self._connection.execute("ROLLBACK")
            raise
        return result

    def _failed(self, job: _Job, error: BaseException) -> None:
        error = self._translate(error)
        if job.reply is None:
            self._log_lost(error)
        else:
            _deliver(job, _error, error)

    def _log_lost(self, error: BaseException) -> None:
        """Log a lost write. Log a store that refuses every write once."""
        refused = error.code if isinstance(error, Unavailable) else ""
        if not refused or refused != self._refused:
            where = self._path
            _log.error("a queued write to %s failed: %s", where, error, exc_info=error)
        self._refused = refused

    def _translate(self, error: BaseException) -> BaseException:
        ours: SbxError
        match error:
            case sqlite3.Error():
                ours = translated(error)
                if ours.code == "store_corrupt" and not self.damaged:
                    self.damaged = True
                    _log.error("the store %s is damaged: %s", self._path, error)
            case OverflowError() | UnicodeEncodeError():  # a row cannot store the number or text
                ours = BadRequest(f"a value cannot be stored: {error}")
            case StopIteration():  # no future can carry it
                ours = Broken("a query of the store failed")
            case _:
                return error
        ours.__cause__ = error
        return ours


def _deliver(job: _Job, how: Callable[..., None], what: Any) -> None:
    if job.reply is not None:
        try:
            job.reply.get_loop().call_soon_threadsafe(how, job.reply, what)
        except RuntimeError:
            _log.debug("the loop ended before the reply of the store")


def _result(reply: "asyncio.Future[Any]", result: Any) -> None:
    if not reply.done():
        reply.set_result(result)


def _error(reply: "asyncio.Future[Any]", error: BaseException) -> None:
    if not reply.done():
        reply.set_exception(error)
