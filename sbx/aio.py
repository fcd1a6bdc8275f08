"""asyncio: work that must end, worker threads, event loops in threads, their lag, and the clock.

Some work would leave something behind if its caller were cancelled. A thread cannot be stopped, and
no caller owns the descriptors that it opens before it returns. An incomplete clean-up is worse than
a late one. So a cancelled caller of `run_to_completion` waits for the work, which has a time limit.
"""

import asyncio
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from sbx import errors

T = TypeVar("T")
_END_S = 15.0
_STACK_MAX = 40  # frames
_READ_MIN, _READ_MAX = 512, 16 << 10  # bytes
_SLOW_S = 0.0002  # for the messages of one read
_LONG_CALLS, _LONG_CALL_WAIT_S = 3, 30.0  # at once; asyncio has five worker threads at least
CALLER: ContextVar[str] = ContextVar("caller", default="")  # the owner that a service works for


async def run_to_completion(work: Awaitable[T]) -> T:
    """Wait until `work` has ended, even if the caller is cancelled, and return its result."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # the caller is cancelled: mark the error as seen
    raise cancelled


async def outcome(task: asyncio.Task[T], discard: Callable[[T], Awaitable[None]]) -> T | None:
    """Wait for a task and return its result; None if another task cancelled it. If the waiter is
    cancelled, cancel the task, and discard the result that it may have by then."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        waiter = asyncio.current_task()
        assert waiter is not None
        if task.cancelled() and not waiter.cancelling():
            return None
        task.cancel()
        await run_to_completion(asyncio.wait([task]))
        if not task.cancelled() and task.exception() is None:
            await run_to_completion(discard(task.result()))
        raise


async def in_thread(act: Callable[..., T], *arguments: Any) -> T:
    """`act(*arguments)` in a worker thread of the loop, to its end."""
    return await run_to_completion(
        asyncio.get_running_loop().run_in_executor(None, act, *arguments)
    )


async def joined(chunks: AsyncIterable[bytes], size: int) -> AsyncGenerator[bytes, None]:
    """Yield the bytes in pieces of at least `size`: each call of a thread costs the same."""
    pending, pending_size = list[bytes](), 0
    async for chunk in chunks:
        pending.append(chunk)
        pending_size += len(chunk)
        if pending_size >= size:
            yield b"".join(pending)
            pending, pending_size = [], 0
    if pending_size:
        yield b"".join(pending)


def kept_with(owner: object, make: Callable[..., T], *arguments: Any) -> T:
    """Return the object that `make(*arguments)` created for `owner` at the first call. In a weak
    dictionary neither would end if the object refers to its owner, as a lock to its loop."""
    kept: dict[Callable[..., T], T] = vars(owner).setdefault("_kept_by_sbx", {})
    return kept[make] if make in kept else kept.setdefault(make, make(*arguments))


@asynccontextmanager
async def long_call() -> AsyncIterator[None]:
    """Limit the calls that take seconds in a worker thread: short calls need threads too. One
    CALLER leaves a turn to the others. Raise Unavailable `too_many_searches`."""
    loop, owner = asyncio.get_running_loop(), CALLER.get()
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_LONG_CALL_WAIT_S):
                if owner:
                    owners = kept_with(loop, WeakValueDictionary[str, asyncio.Semaphore])
                    own = owners.setdefault(owner, asyncio.Semaphore(_LONG_CALLS - 1))
                    await stack.enter_async_context(own)
                await stack.enter_async_context(kept_with(loop, asyncio.Semaphore, _LONG_CALLS))
        except TimeoutError:
            raise errors.Unavailable(
                f"{_LONG_CALLS} searches, copies or similar calls run, and none of them has ended",
                code="too_many_searches",
                hint="try again, with a narrower path",
                details={"retry_after_s": 5},
            ) from None
        yield


@dataclass(slots=True, eq=False)
class WorkerThreads:
    """Calls in worker threads that use the resources of one object. The object must not close them
    while it has `users` or `working` calls."""

    working: set[asyncio.Future[Any]] = field(init=False, default_factory=set)
    users: int = field(init=False, default=0)

    async def call(self, act: Callable[[], T]) -> T:
        """Run `act` in a worker thread. A cancelled call leaves its thread at work. The resources
        stay open for it: a descriptor that is closed too early soon belongs to another file."""
        work = asyncio.get_running_loop().run_in_executor(None, act)
        self.working.add(work)
        work.add_done_callback(self.working.discard)
        return await asyncio.shield(work)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1


async def call_in_daemon_thread(fn: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """Call a function of the user, which may be a coroutine function. Another function runs in a
    daemon thread: a person may never answer, and that must not keep the program from ending."""
    if inspect.iscoroutinefunction(fn):
        return cast("T", await fn(*arguments))
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = fn(*arguments)
        except Exception as raised:  # noqa: BLE001  # carried to the task that waits
            error = raised
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="sbx-on-input", daemon=True).start()
    value = await result
    return cast("T", await value if inspect.isawaitable(value) else value)


def check_process(pid: int, what: str = "sandbox") -> None:
    """Raise Broken `used_after_fork` unless this is the process `pid`, which created the handle."""
    if os.getpid() != pid:
        raise errors.Broken(
            f"this {what} belongs to the process from which this process was forked",
            code="used_after_fork",
            hint=f"create the {what} in the process that uses it",
        )


class Clock:
    """Seconds of the epoch, and waiting for them to pass. Tests derive one that they move."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SmallReads(asyncio.BufferedProtocol):
    """Passes received bytes to a protocol of stream data in pieces that its parser handles fast.

    A parser takes 2 µs for each empty message of a WebSocket, of 2 bytes. uvloop reads 250 KB for
    it at once, and libuv reads up to 32 times before it lets anything else run.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._buffer = memoryview(bytearray(_READ_MAX))
        self._size = _READ_MIN
        self._feed = protocol.data_received
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._size]

    def buffer_updated(self, nbytes: int) -> None:
        began = time.perf_counter()
        self._feed(bytes(self._buffer[:nbytes]))
        is_slow = time.perf_counter() - began > _SLOW_S
        self._size = _READ_MIN if is_slow else min(2 * self._size, _READ_MAX)


class LoopMonitor:
    """Measures how late the running loop is. Close it.

    A timer of the loop is due every `period_s`, and its delay is the lag: a stall that is shorter
    may lie between two of them. While a delay is longer than `stall_s`, a thread passes the stack
    of the loop to `on_stall`, once for each stall.
    """

    def __init__(
        self,
        on_lag: Callable[[float], None],
        on_stall: Callable[[float, str], None],
        *,
        period_s: float = 0.1,
        stall_s: float = 0.25,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._on_lag, self._on_stall = on_lag, on_stall
        self._period_s, self._stall_s = period_s, stall_s
        self._closed = threading.Event()
        self._due = time.monotonic() + period_s
        self._timer = self._loop.call_later(period_s, self._beat)
        self._thread = threading.Thread(target=self._watch, name="sbx-loop-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._timer.cancel()
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        now = time.monotonic()
        self._on_lag(max(0.0, now - self._due))
        self._due = now + self._period_s
        self._timer = self._loop.call_later(self._period_s, self._beat)

    def _watch(self) -> None:
        wait_s, reported = self._stall_s, 0.0
        while not self._closed.wait(wait_s):
            due = self._due
            late = time.monotonic() - due
            if late >= self._stall_s and due != reported:
                reported = due
                frame = sys._current_frames().get(self._ident)
                self._on_stall(late, "".join(traceback.format_stack(frame, _STACK_MAX)))
            # asleep until the next timer would be too late, whatever happens before
            wait_s = self._stall_s - late if late < self._stall_s else self._stall_s


class _Workers(ThreadPoolExecutor):
    """Worker threads, and at the end of the process none: Python refuses new ones before it calls
    what `atexit` holds, and closing has files to remove. Then the work is done in place."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[Any] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # carried to the waiter
                done.set_exception(error)
            return done


def _shortened(error: errors.SbxError) -> errors.SbxError:
    """Remove the frames below the call, some 20 of sbx and asyncio, from the traceback that a user
    reads. With SBX_DEBUG, and for a bug of sbx, they stay."""
    if not isinstance(error, errors.Broken) and not os.environ.get("SBX_DEBUG"):
        shown: BaseException | None = error
        while shown is not None:
            shown.__traceback__ = None
            shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return error


class Loop:
    """An event loop in a separate thread. A forked child does not have this thread: calls there
    raise Broken `used_after_fork`."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._sources: set[AsyncGenerator[Any, None]] = set()
        self._workers = _Workers(thread_name_prefix="sbx-worker")
        self._loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self.pid == os.getpid() and not self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait. An interrupted wait (Ctrl-C) cancels the work."""
        future = self._begun(work)
        try:
            return future.result()
        except errors.SbxError as error:
            raise _shortened(error) from error.__cause__
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    async def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, awaited on another one. A cancelled wait cancels the work."""
        return await asyncio.wrap_future(self._begun(work))

    def _begun(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        if threading.current_thread() is self._thread:
            work.close()
            raise errors.BadRequest(
                "a synchronous call from sbx's own event loop would wait for itself",
                code="would_block",
                hint="in an async on_input, do it in a thread: await asyncio.to_thread(…)",
            )
        if not self.running:
            work.close()
            check_process(self.pid)
            raise errors.Closed("sbx was closed", hint="make a new Sandbox")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def each(self, source: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous generator as the caller consumes them. Close the
        generator when the caller stops, or with the loop."""
        end: Any = object()

        async def following() -> T:
            self._sources.add(source)
            return await anext(source, end)

        try:
            while (item := self.call(following())) is not end:
                yield item
        finally:
            with suppress(errors.SbxError):  # the loop has ended, and the generator with it
                self.call(self._close(source))

    async def _close(self, source: AsyncGenerator[Any, None]) -> None:
        self._sources.discard(source)
        await source.aclose()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Run on the loop, and do not wait; nothing is done where the loop has ended."""
        if self.running:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            work.close()

    def end(self, last: Coroutine[Any, Any, object]) -> None:
        """Run `last`, then end the loop and its thread; again does nothing."""
        if not self.running:
            last.close()
            return
        future = asyncio.run_coroutine_threadsafe(last, self._loop)
        try:
            future.result(_END_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        with self._workers:
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        """Cancel the remaining tasks. No caller waits for them; most are abandoned streams."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        # asyncio would close those within them at the same time, which none of them survives.
        await asyncio.gather(*map(self._close, list(self._sources)), return_exceptions=True)
        await self._loop.shutdown_asyncgens()
