"""Sandboxes without asyncio: an event loop in a thread, and synchronous faces of what lives on it.

The faces know only that a conversation has these methods, not whether it is in this process or in
a service: so the embedded and the connected `Sandbox` are one class. Calls may come from any
thread. Imports sbx.protocol and sbx.errors.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sbx import errors
from sbx.protocol.files import Entry, Listing, Upload
from sbx.protocol.handles import check_process
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run

T = TypeVar("T")
OnInput = Callable[[str], str | Awaitable[str]]
_END_S = 15.0


# -- what the faces stand before -------------------------------------------------------------------


class AsyncRun(Protocol):
    """A run that goes on by itself."""

    def events(self) -> AsyncIterator[Event]: ...


class AsyncFiles(Protocol):
    """The files of a conversation."""

    async def read(self, path: str) -> str: ...
    async def read_bytes(self, path: str) -> bytes: ...
    async def write(self, path: str, content: str | bytes) -> int: ...
    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing: ...
    async def stat(self, path: str) -> Entry: ...
    async def delete(self, path: str) -> bool: ...
    async def make_directory(self, path: str) -> None: ...


class AsyncUploads(Protocol):
    """The uploads of a conversation."""

    async def put(self, path: str | Path, name: str | None = None) -> Upload: ...
    async def put_bytes(self, name: str, content: bytes) -> Upload: ...
    async def list(self) -> tuple[Upload, ...]: ...
    async def read_bytes(self, name: str) -> bytes: ...
    async def delete(self, name: str) -> None: ...


class AsyncConversation(Protocol):
    """A workspace with a kernel, here or in a service."""

    @property
    def files(self) -> AsyncFiles: ...
    @property
    def uploads(self) -> AsyncUploads: ...
    @property
    def receipt(self) -> Receipt | None: ...
    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run: ...
    async def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run: ...
    def start_run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncRun: ...
    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> AsyncRun: ...
    async def give_up(self, run: Any, /) -> None: ...
    async def interrupt(self) -> bool: ...
    async def start(self) -> Receipt: ...
    async def stop(self) -> None: ...


# -- the loop --------------------------------------------------------------------------------------


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
            except BaseException as error:  # noqa: BLE001  # carried to whoever waits
                done.set_exception(error)
            return done


class Loop:
    """An event loop in a thread of its own. After a fork the child has no such thread: calls there
    raise Broken `used_after_fork`."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._workers = _Workers(thread_name_prefix="sbx-worker")
        self._loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is this process's, and not ended."""
        return self.pid == os.getpid() and not self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait. An interrupted wait (Ctrl-C) cancels the work."""
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
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

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
        """What still runs now was started by nobody who waits: an abandoned stream, at most."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


# -- the faces -------------------------------------------------------------------------------------


class BlockingFiles:
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied where the policy offers no `filesystem`.
    """

    def __init__(self, loop: Loop, inner: AsyncFiles) -> None:
        self._call = loop.call
        self._inner = inner

    def read(self, path: str) -> str:
        """The text of a file. Raises BadRequest `not_text` when it is not UTF-8."""
        return self._call(self._inner.read(path))

    def read_bytes(self, path: str) -> bytes:
        """All bytes of a file."""
        return self._call(self._inner.read_bytes(path))

    def write(self, path: str, content: str | bytes) -> int:
        """Write a file in one step, with the directories it needs; its size in bytes."""
        return self._call(self._inner.write(path, content))

    def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        """What lies in a directory, by path."""
        return self._call(self._inner.list(path, max_depth=max_depth))

    def stat(self, path: str) -> Entry:
        """What a name stands for."""
        return self._call(self._inner.stat(path))

    def delete(self, path: str) -> bool:
        """Delete a file, or a directory with all below it; False if that goes on later."""
        return self._call(self._inner.delete(path))

    def make_directory(self, path: str) -> None:
        """Make a directory, with those it lies in."""
        self._call(self._inner.make_directory(path))


class BlockingUploads:
    """What a user put in, read-only inside at /workspace/uploads/temparea."""

    def __init__(self, loop: Loop, inner: AsyncUploads) -> None:
        self._call = loop.call
        self._inner = inner

    def put(self, path: str | Path, name: str | None = None) -> Upload:
        """Copy a file of the host in, under its own name or another; the same name replaces."""
        return self._call(self._inner.put(path, name))

    def put_bytes(self, name: str, content: bytes) -> Upload:
        """Store these bytes as an upload."""
        return self._call(self._inner.put_bytes(name, content))

    def list(self) -> tuple[Upload, ...]:
        """All uploads, by name."""
        return self._call(self._inner.list())

    def read_bytes(self, name: str) -> bytes:
        """All bytes of an upload."""
        return self._call(self._inner.read_bytes(name))

    def delete(self, name: str) -> None:
        """Raises NotFound `file_not_found`."""
        self._call(self._inner.delete(name))


class BlockingConversation:
    """One conversation of a sandbox."""

    def __init__(
        self,
        loop: Loop,
        inner: AsyncConversation,
        files: BlockingFiles | None = None,
        uploads: BlockingUploads | None = None,
    ) -> None:
        self._loop = loop
        self._inner = inner
        self.files = files or BlockingFiles(loop, inner.files)
        self.uploads = uploads or BlockingUploads(loop, inner.uploads)

    def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Ctrl-C interrupts the cell.

        `timeout` in seconds; `on_input` is called with the prompt of each `input()`. Code that
        fails is a result, with `status`, `error` and `state_lost`; errors are raised for calls
        that were wrong and for machines that cannot.
        """
        return self._loop.call(self._inner.run(code, timeout=timeout, on_input=on_input))

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Iterator[Event]:
        """Run a cell and follow it live; the last event carries the result. Ctrl-C interrupts it;
        a caller that merely stops to listen does not."""
        return self._follow(lambda: self._inner.start_run(code, timeout=timeout, on_input=on_input))

    def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run `/bin/bash -c command` inside, beside a busy cell, and wait for its result."""
        return self._loop.call(
            self._inner.shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        )

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Iterator[Event]:
        """Run a shell command and follow it live; as `stream` does."""
        return self._follow(
            lambda: self._inner.start_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
        )

    def interrupt(self) -> bool:
        """Interrupt the cell that runs now, from another thread; False when none does."""
        return self._loop.call(self._inner.interrupt())

    def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; which walls stand around it."""
        return self._loop.call(self._inner.start())

    def stop(self) -> None:
        """End the kernel; files stay, and the next run starts another one."""
        self._loop.call(self._inner.stop())

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        check_process(self._loop.pid)
        if (ask := getattr(self._inner, "read_receipt", None)) is not None:  # it is in a service
            told: Receipt | None = self._loop.call(ask())
            return told
        return self._inner.receipt

    def _follow(self, begin: Callable[[], AsyncRun]) -> Iterator[Event]:
        """Start a run now, and give its events as they are asked for."""

        async def begun() -> AsyncRun:
            return begin()

        return self._events(self._loop.call(begun()))

    def _events(self, run: AsyncRun) -> Iterator[Event]:
        events = run.events()

        async def following() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._loop.call(following())) is not None:
                yield event
        except KeyboardInterrupt:
            self._loop.call(self._inner.give_up(run))
            raise
