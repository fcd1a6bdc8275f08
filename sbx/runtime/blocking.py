"""The same without asyncio: `Sandbox`, over one runtime that all of them in a process share.

The runtime lives on an event loop in a thread of its own, started by the first `Sandbox` and ended
by `close()` or with the process. Calls may come from any thread. After a fork the child has no such
thread: its copies of the parent's sandboxes raise Broken `used_after_fork`, and a `Sandbox` that it
makes itself starts a runtime of its own.
"""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sbx import errors
from sbx.isolation.forked import check_process
from sbx.isolation.receipt import Receipt
from sbx.policy import Policy
from sbx.protocol.runs import Event, Run
from sbx.runtime.conversation import Conversation
from sbx.runtime.files import WorkspaceFiles, WorkspaceUploads
from sbx.runtime.live import LiveRun
from sbx.runtime.questions import OnInput
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import DEFAULT_CONVERSATION, AsyncSandbox
from sbx.runtime.settings import Settings
from sbx.workspace import Entry, Listing, Upload

T = TypeVar("T")
_CLOSE_S = 15.0


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


class _Shared:
    """The runtime of this process, on its loop, in its thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._workers = _Workers(thread_name_prefix="sbx-worker")
        self.loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self._serve, name="sbx-runtime", daemon=True)
        self._thread.start()
        try:
            self.runtime = self.call(Runtime(Settings()).start())
        except BaseException:
            self._end()
            raise

    @property
    def alive(self) -> bool:
        return not self.loop.is_closed() and self.runtime.alive

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait. An interrupted wait (Ctrl-C) cancels the work."""
        if threading.current_thread() is self._thread:
            work.close()
            raise errors.BadRequest(
                "a synchronous call from sbx's own event loop would wait for itself",
                code="would_block",
                hint="in an async on_input, do it in a thread: await asyncio.to_thread(…)",
            )
        if os.getpid() != self.pid or self.loop.is_closed():
            work.close()
            check_process(self.pid)
            raise errors.Closed("sbx was closed", hint="make a new Sandbox")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def close(self) -> None:
        if self.pid == os.getpid() and not self.loop.is_closed():
            future = asyncio.run_coroutine_threadsafe(self.runtime.close(), self.loop)
            try:
                future.result(_CLOSE_S)
            finally:
                self._end()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        with self._workers:
            self.loop.run_forever()
            self.loop.run_until_complete(self._finish())
        self.loop.close()

    async def _finish(self) -> None:
        """What still runs now was started by nobody who waits: an abandoned stream, at most."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.loop.shutdown_asyncgens()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_S)


_shared: _Shared | None = None
_starting = threading.Lock()


def _shared_runtime() -> _Shared:
    global _shared  # noqa: PLW0603  # one per process is the promise
    with _starting:
        if _shared is not None and _shared.pid == os.getpid() and not _shared.alive:
            _shared.close()  # its broker died, and every sandbox with it
            _shared = None
        if _shared is None or _shared.pid != os.getpid():
            _shared = _Shared()
            atexit.register(close)
        return _shared


def close() -> None:
    """End every `Sandbox` of this process and what they share; called by itself at exit."""
    global _shared
    shared, _shared = _shared, None
    atexit.unregister(close)
    if shared is not None:
        shared.close()


def _reset_after_fork() -> None:
    """A lock that another thread held when this process was forked would never be released."""
    global _starting  # noqa: PLW0603
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


class _Blocking:
    """The methods that a sandbox and its conversations have alike."""

    def __init__(self, shared: _Shared, conversation: Conversation) -> None:
        self._shared = shared
        self._inner = conversation
        self.files = BlockingFiles(shared, conversation.files)
        self.uploads = BlockingUploads(shared, conversation.uploads)

    def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result. Ctrl-C interrupts the cell.

        `timeout` in seconds; `on_input` is called with the prompt of each `input()`. Code that
        fails is a result, with `status`, `error` and `state_lost`; errors are raised for calls
        that were wrong and for machines that cannot.
        """
        return self._shared.call(self._inner.run(code, timeout=timeout, on_input=on_input))

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
        return self._shared.call(
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
        return self._shared.call(self._inner.interrupt())

    def start(self) -> Receipt:
        """Start the kernel now instead of with the first run; which walls stand around it."""
        return self._shared.call(self._inner.start())

    def stop(self) -> None:
        """End the kernel; files stay, and the next run starts another one."""
        self._shared.call(self._inner.stop())

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel; None while there is none."""
        check_process(self._shared.pid)
        return self._inner.receipt

    def _follow(self, begin: Callable[[], LiveRun]) -> Iterator[Event]:
        """Start a run now, and give its events as they are asked for."""

        async def begun() -> LiveRun:
            return begin()

        return self._events(self._shared.call(begun()))

    def _events(self, live: LiveRun) -> Iterator[Event]:
        events = live.events()

        async def following() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._shared.call(following())) is not None:
                yield event
        except KeyboardInterrupt:
            self._shared.call(self._inner.give_up(live))
            raise


async def _named(box: AsyncSandbox, name: str) -> Conversation:
    return box.conversation(name)


def _abandon(shared: _Shared, box: AsyncSandbox) -> None:
    """Close a sandbox that nobody holds any more, without waiting."""
    if os.getpid() == shared.pid and not shared.loop.is_closed():
        asyncio.run_coroutine_threadsafe(box.close(), shared.loop)


class BlockingConversation(_Blocking):
    """One conversation of a sandbox."""


class Sandbox(_Blocking):
    """A sandbox: `with Sandbox(policy="data-science") as box`.

    `policy` is a name, the Path of a file, or a value; `narrower` tightens it, for instance
    `{"limits": {"memory_max": "64MiB"}}`; `env` adds environment variables; `workspace` is a
    directory of the host to be /workspace, `uploads` one to be the read-only uploads.

    Raises NotFound `policy_not_found`, PolicyError, BadRequest `limit_widened`, CannotEnforce for
    a wall that this host cannot give, Denied `workspace_owned_by_root`.
    """

    def __init__(
        self,
        policy: str | Path | Policy = "default",
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        workspace: str | Path | None = None,
        uploads: str | Path | None = None,
    ) -> None:
        shared = _shared_runtime()
        self._box = shared.call(
            shared.runtime.create(
                policy, narrower=narrower, env=env, workspace=workspace, uploads=uploads
            )
        )
        super().__init__(shared, shared.call(_named(self._box, DEFAULT_CONVERSATION)))
        # A sandbox that its program forgets must not keep its jail until the program's end.
        self._forgotten = weakref.finalize(self, _abandon, shared, self._box)
        self._forgotten.atexit = False  # then `close` ends all of them in order

    @property
    def id(self) -> str:
        return self._box.id

    @property
    def policy(self) -> Policy:
        return self._box.policy

    def conversation(self, name: str) -> BlockingConversation:
        """A conversation by name, with files and variables of its own; made when there is none."""
        return BlockingConversation(self._shared, self._shared.call(_named(self._box, name)))

    def close(self) -> None:
        """End everything inside and remove every file; a second call does nothing."""
        if not self._shared.loop.is_closed():
            self._shared.call(self._box.close())
        self._forgotten.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shared.pid == os.getpid():
            self.close()


class BlockingFiles:
    """The files as the code inside sees them; see `WorkspaceFiles` for paths and errors."""

    def __init__(self, shared: _Shared, inner: WorkspaceFiles) -> None:
        self._call = shared.call
        self._inner = inner

    def read(self, path: str) -> str:
        return self._call(self._inner.read(path))

    def read_bytes(self, path: str) -> bytes:
        return self._call(self._inner.read_bytes(path))

    def write(self, path: str, content: str | bytes) -> int:
        return self._call(self._inner.write(path, content))

    def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return self._call(self._inner.list(path, max_depth=max_depth))

    def stat(self, path: str) -> Entry:
        return self._call(self._inner.stat(path))

    def delete(self, path: str) -> bool:
        return self._call(self._inner.delete(path))

    def make_directory(self, path: str) -> None:
        self._call(self._inner.make_directory(path))


class BlockingUploads:
    """What a user put in, read-only inside at /workspace/uploads/temparea."""

    def __init__(self, shared: _Shared, inner: WorkspaceUploads) -> None:
        self._call = shared.call
        self._inner = inner

    def put(self, path: str | Path, name: str | None = None) -> Upload:
        """Copy a file of the host in, under its own name or another; the same name replaces."""
        return self._call(self._inner.put(path, name))

    def put_bytes(self, name: str, content: bytes) -> Upload:
        return self._call(self._inner.put_bytes(name, content))

    def list(self) -> tuple[Upload, ...]:
        return self._call(self._inner.list())

    def read_bytes(self, name: str) -> bytes:
        return self._call(self._inner.read_bytes(name))

    def delete(self, name: str) -> None:
        self._call(self._inner.delete(name))
