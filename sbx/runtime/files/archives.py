"""Archives of a directory, packed and unpacked inside the walls by a command of the guest.

The host never parses an archive. The bytes cross as text on the streams of the command (see
sbx/guest/tools/archive.py) at the pace of the reader. So there is no file in between that needs a
limit, or that a crash would leave. The replies of the command are bounded and checked, as all data
from inside.
"""

import asyncio
import base64
import binascii
import json
import signal
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Literal

from msgspec import Struct

from sbx import errors
from sbx.aio import run_to_completion
from sbx.isolation.launch_plan import GUEST
from sbx.kernels import frames
from sbx.kernels.command import Command, KernelDied
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.protocol.files import Unpacked
from sbx.runtime.run.checks import require_capability, require_processes
from sbx.workspace.errors import invalid_path, not_found

ArchiveFormat = Literal["tar.gz", "zip"]
Beside = Callable[[], AbstractAsyncContextManager[Kernel]]

FORMATS = ("tar.gz", "zip")
PACKED_MAX = 64 << 30  # bytes of content
_ENTRIES_MAX = 1_000_000
_BLOCK = 48 * 1024  # bytes, as the guest takes them
_LINE_MAX = 128 * 1024
_WINDOW = 1 << 20  # bytes of text on their way out
_AHEAD = 16  # blocks on their way in
_COUNT_MAX = 1 << 53  # of a report: the largest exact integer in JSON of all clients
_SILENCE_S = 60.0  # of the guest, while it has something to do


class ArchiveLimits(Struct, frozen=True):
    """The limits of one archive: all bytes of its files, its entries, the bytes of one file."""

    bytes: int
    entries: int
    file_bytes: int

    @property
    def words(self) -> tuple[str, str, str]:
        return str(self.bytes), str(self.entries), str(self.file_bytes)

    def exceeded(self, name: object) -> errors.TooLarge:
        """Return the error for the limit of this name, which comes from inside: only the name is
        used."""
        match name:
            case "entries":
                message, limit = f"more than {self.entries} entries", self.entries
            case "file_bytes":
                message, limit = f"a file of more than {self.file_bytes} bytes", self.file_bytes
            case _:
                name, message, limit = "bytes", f"more than {self.bytes} bytes", self.bytes
        return errors.TooLarge(
            f"the archive holds {message}",
            code="archive_too_large",
            hint="send or ask for a smaller directory, or use a policy with higher limits",
            details={"limit": limit, "limit_name": name},
        )


class Archives:
    """Packs and unpacks in one conversation. `beside` lends the kernel in whose jail this
    happens."""

    def __init__(self, policy: Policy, beside: Beside) -> None:
        self._policy = policy
        self._beside = beside

    def check(self, form: str = "tar.gz") -> None:
        """Raise Denied `processes_denied`, `capability_not_supported`, BadRequest
        `unknown_format`."""
        require_capability(self._policy, "filesystem")
        require_processes(self._policy)
        if form not in FORMATS:
            raise errors.BadRequest(
                f"an archive is one of {', '.join(FORMATS)}, not {form[:20]!r}",
                code="unknown_format",
                hint="tar.gz keeps symlinks and permissions",
                details={"field": "format"},
            )

    async def pack(self, path: str, form: ArchiveFormat) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an archive of the directory `path` (as the code inside sees it).

        Raise NotFound, InvalidPath `not_a_directory`, Conflict `stopped`, and any other error if
        the archive is not complete.
        """
        limits = ArchiveLimits(PACKED_MAX, _ENTRIES_MAX, PACKED_MAX)
        words = ("pack", path, form, *limits.words)
        async with (
            self._command(words, stdin="", window=_WINDOW) as command,
            aclosing(_lines(command)) as lines,
        ):
            whole = True
            async for line in lines:
                if line.startswith("{"):
                    _told(line, path, limits)
                    return
                piece = _decoded(line)
                # Only the last block may be short: a flood of lines would bring next to nothing.
                if not whole or len(piece) > _BLOCK:
                    raise _failed("it sent an invalid block")
                whole = len(piece) == _BLOCK
                yield piece
        raise _failed("it ended without a report")

    async def unpack(
        self, path: str, chunks: AsyncIterable[bytes], room: int | None = None
    ) -> Unpacked:
        """Unpack `chunks` into the directory `path`, and create the directory if it is missing.
        `room`: the bytes that the workspace has left.

        A failure leaves the files that were unpacked before. Raise BadRequest `not_an_archive`,
        TooLarge `archive_too_large`, Denied `file_not_permitted`, Unavailable `no_space`, Conflict
        `stopped`.
        """
        most = self._policy.limits
        total = most.workspace_max if room is None else min(room, most.workspace_max)
        limits = ArchiveLimits(total, most.workspace_files, most.file_size_max)
        words = ("unpack", path, *limits.words)
        async with self._command(words, stdin=None, window=_WINDOW) as command:
            ahead = asyncio.BoundedSemaphore(_AHEAD)
            sending = asyncio.ensure_future(_send(command, chunks, ahead))
            try:
                return await _taken(command, sending, ahead, path, limits)
            finally:
                sending.cancel()
                await asyncio.wait([sending])

    @asynccontextmanager
    async def _command(
        self, words: tuple[str, ...], *, stdin: str | None, window: int
    ) -> AsyncGenerator[Command, None]:
        async with self._beside() as kernel:
            interpreter = kernel.jail.plan.command[0]
            argv = [interpreter, "-I", f"{GUEST}/sbx/guest/tools/archive.py", *words]
            command = await kernel.spawn(argv, "/", {}, stdin=stdin, window=window)
            try:
                yield command
            except KernelDied:
                raise errors.Conflict(
                    "the kernel ended before the archive did",
                    code="stopped",
                    hint="try again; a workspace beyond its limits also ends its kernel",
                ) from None
            finally:
                await run_to_completion(command.signal(signal.SIGKILL))


async def _send(command: Command, chunks: AsyncIterable[bytes], ahead: asyncio.Semaphore) -> None:
    """Feed all of `chunks`, a block at a time, as far ahead as it may be."""
    pending = bytearray()

    async def block(data: bytes) -> None:
        await ahead.acquire()
        await command.write(base64.b64encode(data).decode("ascii") + "\n")

    async for chunk in chunks:
        pending += chunk
        while len(pending) >= _BLOCK:
            await block(bytes(pending[:_BLOCK]))
            del pending[:_BLOCK]
    if pending:
        await block(bytes(pending))
    await command.write("\n")


async def _taken(
    command: Command,
    sending: "asyncio.Future[None]",
    ahead: asyncio.Semaphore,
    path: str,
    limits: ArchiveLimits,
) -> Unpacked:
    """Read until the command reports its work. A sender that fails ends this; the caller limits the
    time of a slow one."""
    async with aclosing(_lines(command, sending)) as lines:
        async for line in lines:
            if line == "+":
                try:
                    ahead.release()
                except ValueError:
                    raise _failed("it acknowledged data that was not sent") from None
            elif line.startswith("{"):
                report = _told(line, path, limits)
                return Unpacked(report["entries"], report["bytes"], report["skipped"])
            else:
                raise _failed("it sent an unexpected line")
    raise _failed("it ended without a report")


async def _lines(
    command: Command, sending: "asyncio.Future[None] | None" = None
) -> AsyncGenerator[str, None]:
    """Yield the lines of the command up to its end. It may be silent while `sending` waits for the
    sender. Raise the error of `sending`, KernelDied, Conflict `archive_failed`."""
    rest = ""
    while (frame := await _heard(command, sending)) is not None:
        await command.took(len(frame.text.encode()))
        if frame.name != "stdout":
            continue
        rest += frame.text
        *lines, rest = rest.split("\n")
        if len(rest) > _LINE_MAX:
            raise _failed("it sent a line that is too long")
        for line in lines:
            yield line


async def _heard(
    command: Command, sending: "asyncio.Future[None] | None"
) -> frames.OutputFrame | None:
    """Return the next output; None at the end."""
    hearing = asyncio.ensure_future(command.next())
    try:
        if sending is not None:
            either: set[asyncio.Future[Any]] = {hearing, sending}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        if not hearing.done():
            await asyncio.wait({hearing}, timeout=_SILENCE_S)
        if not hearing.done():
            raise _failed(f"it was silent for {_SILENCE_S:g} s")
        frame = hearing.result()
        return None if isinstance(frame, frames.Exited) else frame
    finally:
        if not hearing.done():
            hearing.cancel()
            await asyncio.wait({hearing})


def _decoded(line: str) -> bytes:
    try:
        return base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        raise _failed("it sent invalid base64") from None


def _told(line: str, path: str, limits: ArchiveLimits) -> dict[str, Any]:
    """Return the report of the command. Raise its failure as an error with our own words only."""
    try:
        report = json.loads(line)
        if "error" not in report:
            counted = {name: int(report[name]) for name in ("entries", "bytes", "skipped")}
            return {name: min(max(0, count), _COUNT_MAX) for name, count in counted.items()}
        word = str(report["error"])
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _failed("it sent an invalid report") from None
    match word:
        case "not_found":
            raise not_found(path)
        case "not_a_directory":
            raise invalid_path("not_a_directory", f"'{path}' is not a directory")
        case "not_permitted":
            raise errors.Denied(
                f"'{path}' or something in it does not permit that",
                code="file_not_permitted",
                hint="uploads are read-only inside; choose another directory",
            )
        case "too_large":
            raise limits.exceeded(report.get("limit"))
        case "not_an_archive":
            raise errors.BadRequest(
                "the data is not a readable archive, or not a complete one",
                code="not_an_archive",
                hint="send a tar, tar.gz, tar.bz2, tar.xz or zip",
            )
        case "no_space":
            raise errors.Unavailable("the disk has no space left for the archive", code="no_space")
    raise _failed("the work inside failed")


def _failed(why: str) -> errors.Conflict:
    return errors.Conflict(
        f"the archive could not be finished: {why}",
        code="archive_failed",
        hint="the code inside may have been in its way; try again",
    )
