"""A connection in a thread of its own: work goes in by a queue and is done in its order."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from sbx.errors import BadRequest, Broken, Closed, SbxError, Unavailable
from sbx.store.errors import is_full, translated

T = TypeVar("T")
_WAIT_S = 30.0  # far beyond what a working disk needs, and its busy time-out
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    act: Callable[[sqlite3.Connection], Any]
    begin: str | None  # None: one query, which is a transaction by itself
    asked: "asyncio.Future[Any] | None"  # None: nobody waits


class Worker:
    """Owns the connection and the thread; both end with `close`."""

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

        `failures` counts the attempts that SQLite refused, at COMMIT too. An act that was repeated
        after one is done twice in memory, and once in the store.
        """
        self.failures = 0
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
        """Do `act` in the thread, within a transaction where `begin` opens one; its result.

        Raises Unavailable `store_busy` when the disk does not answer; `act` may still be done then.
        """
        if self._closed:
            raise Closed("the store was closed")
        if self._thread is None:
            return self._do_now(act, begin)
        asked: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(act, begin, asked))
        try:
            async with asyncio.timeout(_WAIT_S):
                return await asked
        except TimeoutError:
            raise Unavailable(
                f"the store did not answer within {_WAIT_S:g} seconds", code="store_busy"
            ) from None

    def later(self, act: Callable[[sqlite3.Connection], object], *, begin: str) -> None:
        if self._closed:
            _log.error("a write came after the store was closed, and is lost")
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
            _log.error("the disk does not answer; what was queued for the store may be lost")

    def _do_now(self, act: Callable[[sqlite3.Connection], T], begin: str | None) -> T:
        try:
            result: T = self._tried(_Job(act, begin, None))
        except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            failure = self._in_our_words(error)
        else:
            return result
        raise failure

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._answer(job)
            del job  # or what it holds would live until the next one comes
        self._connection.close()

    def _answer(self, job: _Job) -> None:
        try:
            result = self._tried(job)
        except BaseException as error:  # noqa: BLE001  # carried to whoever waits
            self._failed(job, error)
        else:
            if job.begin is not None:
                self._refused = ""
            _tell(job, _result, result)

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
        if self._connection.in_transaction:  # the last one could not even be rolled back
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
        error = self._in_our_words(error)
        if job.asked is None:
            self._log_lost(error)
        else:
            _tell(job, _error, error)

    def _log_lost(self, error: BaseException) -> None:
        """A store that refuses every write is logged once."""
        refused = error.code if isinstance(error, Unavailable) else ""
        if not refused or refused != self._refused:
            where = self._path
            _log.error(
                "a write to %s that nobody waits for failed: %s", where, error, exc_info=error
            )
        self._refused = refused

    def _in_our_words(self, error: BaseException) -> BaseException:
        ours: SbxError
        match error:
            case sqlite3.Error():
                ours = translated(error)
            case OverflowError() | UnicodeEncodeError():  # a number or text that no row can hold
                ours = BadRequest(f"a value cannot be kept: {error}")
            case StopIteration():  # no future can carry it
                ours = Broken("a query of the store failed")
            case _:
                return error
        ours.__cause__ = error
        return ours


def _tell(job: _Job, how: Callable[..., None], what: Any) -> None:
    if job.asked is not None:
        try:
            job.asked.get_loop().call_soon_threadsafe(how, job.asked, what)
        except RuntimeError:
            _log.debug("the loop ended before its answer from the store")


def _result(asked: "asyncio.Future[Any]", result: Any) -> None:
    if not asked.done():
        asked.set_result(result)


def _error(asked: "asyncio.Future[Any]", error: BaseException) -> None:
    if not asked.done():
        asked.set_exception(error)
