"""Sandboxes without asyncio: an event loop in a thread, and synchronous faces of what lives on it.

The faces know only that a conversation has these methods, not whether it is in this process or in
a service: so the embedded and the connected `Sandbox` are one class. Calls may come from any
thread. Imports sbx.protocol and sbx.errors.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from sbx.aio import Loop
from sbx.protocol.files import (
    Copied,
    FileEntry,
    FileEvent,
    Kind,
    Listing,
    Matches,
    Unpacked,
    Upload,
)
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run
from sbx.protocol.usage import SandboxUsage

if TYPE_CHECKING:
    from sbx.sync.commands import AsyncCommands, BlockingCommands
    from sbx.sync.contexts import AsyncContexts, BlockingContexts
    from sbx.sync.dry_runs import (
        AsyncCheckpoint,
        AsyncDryRun,
        BlockingCheckpoint,
        BlockingDryRun,
    )
    from sbx.sync.terminals import AsyncTerminals, BlockingTerminals

T = TypeVar("T")
OnInput = Callable[[str], str | Awaitable[str]]


# -- what the faces stand before -------------------------------------------------------------------


class AsyncRun(Protocol):
    """A run that goes on by itself."""

    def events(self) -> AsyncGenerator[Event, None]: ...


class AsyncFiles(Protocol):
    """The files of a conversation."""

    async def read(self, path: str) -> str: ...
    async def read_bytes(self, path: str) -> bytes: ...
    async def write(self, path: str, content: str | bytes) -> int: ...
    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing: ...
    async def stat(self, path: str) -> FileEntry: ...
    async def delete(self, path: str) -> bool: ...
    async def make_directory(self, path: str) -> None: ...
    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing: ...
    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        include: str | None = None,
        max_matches: int = 1000,
    ) -> Matches: ...
    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None: ...
    async def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied: ...
    async def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int: ...
    async def chmod(self, path: str, mode: int) -> None: ...
    def watch(
        self, path: str = ".", *, recursive: bool = True
    ) -> AsyncGenerator[FileEvent, None]: ...
    def archive(
        self, path: str = ".", *, format: Literal["tar.gz", "zip"] = "tar.gz"
    ) -> AsyncGenerator[bytes, None]: ...
    async def unpack(self, source: bytes | AsyncIterable[bytes], path: str = ".") -> Unpacked: ...


class AsyncUploads(Protocol):
    """The uploads of a conversation."""

    async def put(self, path: str | Path, name: str | None = None) -> Upload: ...
    async def put_bytes(self, name: str, content: bytes) -> Upload: ...
    async def list(self) -> tuple[Upload, ...]: ...
    async def read_bytes(self, name: str) -> bytes: ...
    async def delete(self, name: str) -> None: ...


class AsyncKernel(Protocol):
    """What runs code, here or in a service."""

    async def read_receipt(self) -> Receipt | None: ...
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
    async def stop(self) -> None: ...


class AsyncConversation(AsyncKernel, Protocol):
    """A workspace with a kernel, here or in a service."""

    @property
    def files(self) -> AsyncFiles: ...
    @property
    def uploads(self) -> AsyncUploads: ...
    @property
    def contexts(self) -> "AsyncContexts": ...
    @property
    def commands(self) -> "AsyncCommands": ...
    @property
    def terminals(self) -> "AsyncTerminals": ...
    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> "AsyncDryRun": ...
    async def checkpoint(self) -> "AsyncCheckpoint": ...
    async def write_stdin(self, run_id: str, text: str | None) -> None: ...
    async def usage(self) -> SandboxUsage: ...
    def stream_usage(self, interval_s: float = 1.0) -> AsyncGenerator[SandboxUsage, None]: ...
    def start_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> AsyncRun: ...
    async def run_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Run: ...
    def start_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> AsyncRun: ...
    async def start(self) -> Receipt: ...


async def _given_to(source: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The caller's own iterator, asked in a worker thread: it may block."""
    while (piece := await asyncio.to_thread(next, source, None)) is not None:
        yield piece


# -- the faces -------------------------------------------------------------------------------------


class BlockingFiles:
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied where the policy offers no `filesystem`.
    """

    def __init__(self, loop: Loop, inner: AsyncFiles) -> None:
        self._loop = loop
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

    def stat(self, path: str) -> FileEntry:
        """What a name stands for."""
        return self._call(self._inner.stat(path))

    def delete(self, path: str) -> bool:
        """Delete a file, or a directory with all below it; False if that goes on later."""
        return self._call(self._inner.delete(path))

    def make_directory(self, path: str) -> None:
        """Make a directory, with those it lies in."""
        self._call(self._inner.make_directory(path))

    def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """What lies below a directory and has a name, or with a `/` in the pattern a path, like
        `*.py` or `src/**/test_*`; `complete` is False where a limit cut it."""
        return self._call(self._inner.find(pattern, path, kind=kind, max_results=max_results))

    def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        include: str | None = None,
        max_matches: int = 1000,
    ) -> Matches:
        """The lines of text files that have `pattern`: plain text, or with `regex` an expression of
        RE2's. `include`: only files whose name, or path, is like this. See `Matches`."""
        return self._call(
            self._inner.grep(
                pattern,
                path,
                regex=regex,
                ignore_case=ignore_case,
                include=include,
                max_matches=max_matches,
            )
        )

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move or rename. `overwrite`: a file may replace a file. Raises Conflict `file_exists`."""
        self._call(self._inner.move(source, target, overwrite=overwrite))

    def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied:
        """Copy a file, or a directory with all below it. Raises as `move`, and TooLarge."""
        return self._call(self._inner.copy(source, target, overwrite=overwrite))

    def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int:
        """Replace a text that the file has `count` times (None: once at least), in one step; how
        often it was. Raises Conflict `replace_count`, `file_changed`."""
        return self._call(self._inner.replace(path, old, new, count=count))

    def chmod(self, path: str, mode: int) -> None:
        """Set permissions, 0 to 0o777. Raises Denied `set_id_refused`, `file_not_permitted`."""
        self._call(self._inner.chmod(path, mode))

    def watch(self, path: str = ".", *, recursive: bool = True) -> Iterator[FileEvent]:
        """What changes in a directory, and with `recursive` below it, from the `started` on that
        comes first, until the conversation ends. Raises Unavailable `too_many_watches`."""
        return self._loop.each(self._inner.watch(path, recursive=recursive))

    def archive(
        self, path: str = ".", *, format: Literal["tar.gz", "zip"] = "tar.gz"
    ) -> Iterator[bytes]:
        """The bytes of an archive of a directory, as they are packed, inside. An end without an
        error is a whole archive. Starts the kernel; raises Denied `processes_denied`."""
        return self._loop.each(self._inner.archive(path, format=format))

    def unpack(self, source: bytes | Iterable[bytes], path: str = ".") -> Unpacked:
        """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside; files of the same
        names are replaced. Starts the kernel; raises Denied `processes_denied`, BadRequest
        `not_an_archive`, TooLarge `archive_too_large`; what was unpacked until then stays."""
        if isinstance(source, bytes | bytearray | memoryview):
            return self._call(self._inner.unpack(bytes(source), path))
        return self._call(self._inner.unpack(_given_to(iter(source)), path))


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

    def write_stdin(self, run_id: str, text: str | None) -> None:
        """Feed a command of `stream_shell` that was started with `stdin_open`, by the id of its
        run; None closes it. Raises Conflict `stdin_full` while the command does not read,
        `stdin_closed`, NotFound."""
        self._loop.call(self._inner.write_stdin(run_id, text))

    @property
    def commands(self) -> "BlockingCommands":
        """Background commands: they go on when the call that started them is over."""
        from sbx.sync.commands import BlockingCommands

        return BlockingCommands(self._loop, self._inner.commands)

    @property
    def terminals(self) -> "BlockingTerminals":
        """Terminals: a shell or a command on a pty, and any number of clients on each."""
        from sbx.sync.terminals import BlockingTerminals

        return BlockingTerminals(self._loop, self._inner.terminals)

    def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> "BlockingDryRun":
        """Run a shell command on a frozen copy of the files, in a jail of its own and without
        network: what it printed, and what it would change. `commit` makes that real, all or none.

        Raises Conflict `too_many_dry_runs`, TooLarge `workspace_too_large`.
        """
        from sbx.sync.dry_runs import BlockingDryRun

        made = self._loop.call(self._inner.dry_run(command, timeout=timeout, cwd=cwd))
        return BlockingDryRun(self._loop, made)

    def checkpoint(self) -> "BlockingCheckpoint":
        """The files as they are now; `restore` makes them so again, all or none. The last few are
        kept. Raises TooLarge `workspace_too_large`."""
        from sbx.sync.dry_runs import BlockingCheckpoint

        return BlockingCheckpoint(self._loop, self._loop.call(self._inner.checkpoint()))

    def usage(self) -> SandboxUsage:
        """What the sandbox uses now, and the disk of this conversation; nothing starts for it."""
        return self._loop.call(self._inner.usage())

    def stream_usage(self, interval_s: float = 1.0) -> Iterator[SandboxUsage]:
        """The same now and after each interval (0.2 to 3600 seconds), until it is closed."""

        return self._loop.each(self._inner.stream_usage(interval_s))

    @property
    def contexts(self) -> "BlockingContexts":
        """Named kernels side by side over the same files."""
        from sbx.sync.contexts import BlockingContexts

        return BlockingContexts(self._loop, self._inner.contexts)

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
        stdin_open: bool = False,
    ) -> Iterator[Event]:
        """Run a shell command and follow it live; as `stream` does. With `stdin_open` it also reads
        what `write_stdin` is given, after `stdin`."""
        return self._follow(
            lambda: self._inner.start_shell(
                command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, stdin_open=stdin_open
            )
        )

    def run_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Run:
        """Run a script of `bash`, `javascript`, `typescript`, `java` or `go` inside, beside a busy
        cell, and wait for its result.

        It keeps nothing but what it writes to files. Packages are those of the workspace:
        `node_modules`, jars in `lib` or `jars`, a `go.mod` with `vendor`. Raises BadRequest
        `unknown_language` and `language_unavailable`, whose hint says what to install.
        """
        return self._loop.call(
            self._inner.run_script(
                code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd
            )
        )

    def stream_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Iterator[Event]:
        """Run a script and follow it live; as `stream` does."""
        return self._follow(
            lambda: self._inner.start_script(
                code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd
            )
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
        """Which walls stand around the live kernel, read back from it now; None while there is
        none."""
        return self.read_receipt()

    def read_receipt(self) -> Receipt | None:
        """The same. What it says otherwise than at the start of the kernel is in `changed`."""
        return self._loop.call(self._inner.read_receipt())

    def _follow(self, begin: Callable[[], AsyncRun]) -> Iterator[Event]:
        return followed(self._loop, self._inner, begin)


def followed(loop: Loop, kernel: AsyncKernel, begin: Callable[[], AsyncRun]) -> Iterator[Event]:
    """Start a run now, and give its events as they are asked for."""

    async def begun() -> AsyncRun:
        return begin()

    return _events(loop, kernel, loop.call(begun()))


def _events(loop: Loop, kernel: AsyncKernel, run: AsyncRun) -> Iterator[Event]:
    try:
        yield from loop.each(run.events())
    except KeyboardInterrupt:
        loop.call(kernel.give_up(run))
        raise


def beneath(conversation: BlockingConversation) -> tuple[Loop, AsyncConversation]:
    """The asynchronous face of a conversation, and the loop that it lives on; for what is written
    for asyncio once and serves both."""
    return conversation._loop, conversation._inner
