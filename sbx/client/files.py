"""The files of a conversation over there; streamed, so that any size takes as little memory."""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from sbx import errors
from sbx.client import checks
from sbx.client.errors import failure
from sbx.client.http import CHUNK, HttpClient, StreamedReply, connection_lost, query, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.transfers import RESUMABLE_MIN, UploadTarget, send_in_pieces
from sbx.protocol.files import (
    Copied,
    FileEntry,
    FileEvent,
    Kind,
    Listing,
    Match,
    Matches,
    Unpacked,
    Upload,
)

OnProgress = Callable[[int, int | None], object]
"""Called with the bytes that are done, and with how many there are, where that is known."""

_WHOLE_MAX = 1 << 30  # bytes that `read_bytes` takes into memory


class RemoteFiles:
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied where the policy offers no `filesystem`.
    """

    def __init__(self, wire: HttpClient, check: Callable[[], None], path: str) -> None:
        self._wire = wire
        self._check = check
        self._path = path

    async def read(self, path: str) -> str:
        """The text of a file. Raises BadRequest `not_text` when it is not UTF-8."""
        content = await self.read_bytes(path)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise errors.BadRequest(
                f"{path} is not UTF-8 text ({len(content)} bytes)",
                code="not_text",
                hint="use read_bytes",
            ) from None

    async def read_bytes(self, path: str) -> bytes:
        """All bytes of a file."""
        return await _whole(self._wire, self._at("files", path=path))

    async def write(self, path: str, content: str | bytes) -> int:
        """Write a file in one step, with the directories it needs; its size in bytes."""
        data = checks.content(content)
        return await self.write_stream(path, _pieces(data), size=len(data))

    @asynccontextmanager
    async def open_stream(self, path: str) -> AsyncIterator[StreamedReply]:
        """A file of any size, to be read in pieces: `.size` and `.chunks()`."""
        async with _reading(self._wire, self._at("files", path=path)) as incoming:
            yield incoming

    async def write_stream(
        self, path: str, chunks: AsyncIterable[bytes], *, size: int | None = None
    ) -> int:
        """`write`, from a source of any size; failed, it leaves what was there."""
        reply = await self._wire.send("PUT", self._at("files", path=path), chunks, size=size)
        return int(reply.json()["size"])

    async def upload(
        self, source: str | Path, path: str, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy a file of this host to `path`; its size in bytes. A large one goes in pieces, which
        survive a lost connection."""
        at = self._at("files", path=path)
        target = UploadTarget(f"{self._path}/partials", checks.path(path), upload=False)
        return int((await _sent(self._wire, at, Path(source), target, on_progress))["size"])

    async def download(
        self, path: str, to: str | Path, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy a file to this host, whole or not at all; its size in bytes."""
        return await _fetched(self._wire, self._at("files", path=path), Path(to), on_progress)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        """What lies in a directory, by path."""
        reply = await self._wire.call("GET", self._at("list", path=path, max_depth=max_depth))
        told = reply.json()
        listing = Listing(FileEntry(**entry) for entry in told["entries"])
        listing.complete = told["complete"]
        return listing

    async def stat(self, path: str) -> FileEntry:
        """What a name stands for."""
        return FileEntry(**(await self._wire.call("GET", self._at("stat", path=path))).json())

    async def delete(self, path: str) -> bool:
        """Delete a file, or a directory with all below it; False if that goes on later."""
        reply = await self._wire.call("DELETE", self._at("files", path=path), again=False)
        return bool(reply.json()["deleted"])

    async def make_directory(self, path: str) -> None:
        """Make a directory, with those it lies in."""
        self._check()
        body = json.dumps({"path": checks.path(path)}).encode("ascii")
        await self._wire.call("POST", f"{self._path}/directories", body=body)

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """What lies below a directory and has a name, or with a `/` in the pattern a path, like
        `*.py` or `src/**/test_*`; `complete` is False where a limit cut it."""
        more = {"pattern": checks.path(pattern), "kind": kind, "max_results": max_results}
        told = (await self._wire.call("GET", self._at("find", path=path, **more))).json()
        listing = Listing(FileEntry(**entry) for entry in told["entries"])
        listing.complete = told["complete"]
        return listing

    async def grep(
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
        at = self._at(
            "grep",
            path=path,
            pattern=checks.path(pattern),
            regex=regex,
            ignore_case=ignore_case,
            include=include,
            max_matches=max_matches,
        )
        told = (await self._wire.call("GET", at)).json()
        matches = Matches(Match(**match) for match in told["matches"])
        matches.complete = told["complete"]
        matches.files, matches.skipped = told["files"], told["skipped"]
        return matches

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move or rename. `overwrite`: a file may replace a file. Raises Conflict `file_exists`."""
        way = {"source": checks.path(source), "target": checks.path(target)}
        await self._ask("move", {**way, "overwrite": overwrite})

    async def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied:
        """Copy a file, or a directory with all below it. Raises as `move`, and TooLarge."""
        way = {"source": checks.path(source), "target": checks.path(target)}
        return Copied(**await self._ask("copy", {**way, "overwrite": overwrite}))

    async def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int:
        """Replace a text that the file has `count` times (None: once at least), in one step; how
        often it was. Raises Conflict `replace_count`, `file_changed`."""
        checks.content(old + new)
        texts = {"old": old, "new": new}
        told = await self._ask("replace", {"path": checks.path(path), **texts, "count": count})
        return int(told["replaced"])

    async def chmod(self, path: str, mode: int) -> None:
        """Set permissions, 0 to 0o777. Raises Denied `set_id_refused`, `file_not_permitted`."""
        if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
            raise errors.BadRequest("a mode is a number from 0 to 0o777", code="invalid_mode")
        await self._ask("chmod", {"path": checks.path(path), "mode": mode})

    async def watch(
        self, path: str = ".", *, recursive: bool = True
    ) -> AsyncGenerator[FileEvent, None]:
        """What changes in a directory, and with `recursive` below it, from the `started` on that
        comes first, until the conversation ends. Raises Unavailable `too_many_watches`."""
        at = self._at("watch", path=path, recursive=recursive)
        try:
            async with aclosing(self._wire.events("GET", at)) as events:
                async for _, kind, data in events:
                    if kind == "failure":
                        raise failure(data)
                    told = json.loads(data)
                    yield FileEvent(told["type"], told["path"])
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, str(lost)) from lost

    async def archive(
        self, path: str = ".", *, format: Literal["tar.gz", "zip"] = "tar.gz"
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of an archive of a directory, as they are packed, inside. An end without an
        error is a whole archive. Starts the kernel; raises Denied `processes_denied`."""
        at = self._at("archive", path=path, format=format)
        try:
            async with (
                self._wire.opened("GET", at) as incoming,
                aclosing(incoming.chunks()) as pieces,
            ):
                async for piece in pieces:
                    yield piece
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, str(lost)) from lost

    async def unpack(self, source: bytes | AsyncIterable[bytes], path: str = ".") -> Unpacked:
        """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside; files of the same
        names are replaced. Starts the kernel; raises Denied `processes_denied`, BadRequest
        `not_an_archive`, TooLarge `archive_too_large`; what was unpacked until then stays."""
        at = self._at("archive", path=path)
        if isinstance(source, bytes | bytearray | memoryview):
            data = bytes(source)
            reply = await self._wire.send("PUT", at, _pieces(data), size=len(data))
        else:
            reply = await self._wire.send("PUT", at, source)
        return Unpacked(**reply.json())

    async def _ask(self, what: str, asked: dict[str, Any]) -> Any:
        self._check()
        body = json.dumps(asked).encode("ascii")
        return (await self._wire.call("POST", f"{self._path}/{what}", body=body)).json()

    def _at(self, what: str, *, path: str, **more: Any) -> str:
        self._check()
        return f"{self._path}/{what}{query({'path': checks.path(path), **more})}"


class RemoteUploads:
    """What a user put into the conversation, read-only inside at /workspace/uploads/temparea."""

    def __init__(self, wire: HttpClient, check: Callable[[], None], path: str) -> None:
        self._wire = wire
        self._check = check
        self._conversation = path
        self._path = f"{path}/uploads"

    async def put(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> Upload:
        """Copy a file of this host in, under its own name or another; the same name replaces.

        Raises NotFound, InvalidPath, and for each limit an error that names it.
        """
        source = Path(path)
        at = self._at(name := source.name if name is None else name)
        target = UploadTarget(f"{self._conversation}/partials", name, upload=True)
        told = await _sent(self._wire, at, source, target, on_progress)
        return Upload(**told.get("upload", told))

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        """Store these bytes as an upload."""
        data = checks.content(content)
        return await self.put_stream(name, _pieces(data), size=len(data))

    async def put_stream(
        self, name: str, chunks: AsyncIterable[bytes], *, size: int | None = None
    ) -> Upload:
        """Store what `chunks` brings, of any size."""
        reply = await self._wire.send("PUT", self._at(name), chunks, size=size)
        return Upload(**reply.json())

    async def list(self) -> tuple[Upload, ...]:
        """All uploads, by name."""
        self._check()
        reply = await self._wire.call("GET", self._path)
        return tuple(Upload(**one) for one in reply.json()["items"])

    async def read_bytes(self, name: str) -> bytes:
        """All bytes of an upload."""
        return await _whole(self._wire, self._at(name))

    async def download(
        self, name: str, to: str | Path, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy an upload to this host, whole or not at all; its size in bytes."""
        return await _fetched(self._wire, self._at(name), Path(to), on_progress)

    async def delete(self, name: str) -> None:
        """Raises NotFound `file_not_found`."""
        await self._wire.call("DELETE", self._at(name), again=False)

    def _at(self, name: str) -> str:
        self._check()
        return self._path + target(checks.name(name))


# -- in and out ------------------------------------------------------------------------------------


@asynccontextmanager
async def _reading(wire: HttpClient, at: str) -> AsyncIterator[StreamedReply]:
    try:
        async with wire.opened("GET", at) as incoming:
            yield incoming
    except ConnectionLost as lost:
        raise connection_lost(wire.address, str(lost)) from lost


async def _whole(wire: HttpClient, at: str) -> bytes:
    async with _reading(wire, at) as incoming:
        held = bytearray()
        async for piece in incoming.chunks():
            held += piece
            if len(held) > _WHOLE_MAX:
                raise errors.TooLarge(
                    f"the file is larger than {_WHOLE_MAX} bytes",
                    hint="use download",
                    details={"limit": _WHOLE_MAX},
                )
        return bytes(held)


async def _sent(
    wire: HttpClient, at: str, source: Path, target: UploadTarget, on_progress: OnProgress | None
) -> Any:
    file, size = await asyncio.to_thread(_opened, source)
    try:
        if size >= RESUMABLE_MIN:
            return await send_in_pieces(wire, target, file, size, on_progress)
        return (await wire.send("PUT", at, _read(file, size, on_progress), size=size)).json()
    finally:
        await asyncio.to_thread(file.close)


async def _fetched(wire: HttpClient, at: str, to: Path, on_progress: OnProgress | None) -> int:
    """Under a name of its own until it is whole."""
    partial = to.with_name(f".{to.name[:200]}.{secrets.token_hex(6)}.part")
    async with _reading(wire, at) as incoming:
        try:
            file = await asyncio.to_thread(open, partial, "xb")
            try:
                done = 0
                async for piece in _gathered(incoming.chunks()):
                    await asyncio.to_thread(file.write, piece)
                    done += len(piece)
                    if on_progress is not None:
                        on_progress(done, incoming.size)
            finally:
                await asyncio.to_thread(file.close)
            await asyncio.to_thread(os.replace, partial, to)
        except OSError as error:
            raise _local(error, to) from error
        finally:
            with suppress(OSError):
                await asyncio.to_thread(partial.unlink)
    return done


async def _read(
    file: IO[bytes], size: int, on_progress: OnProgress | None
) -> AsyncGenerator[bytes, None]:
    """`size` bytes and no more: that many were announced."""
    done = 0
    while done < size and (piece := await asyncio.to_thread(file.read, min(CHUNK, size - done))):
        yield piece
        done += len(piece)
        if on_progress is not None:
            on_progress(done, size)
    if done < size:
        raise errors.Conflict("the file became shorter while it was read", code="file_changed")


async def _gathered(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """In larger pieces: each is written by a worker thread."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= 4 * CHUNK:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _pieces(data: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(data)
    for start in range(0, len(data), CHUNK):
        yield bytes(view[start : start + CHUNK])


def _opened(path: Path) -> tuple[IO[bytes], int]:
    """Raises NotFound, InvalidPath, Denied."""
    try:
        if not path.is_file():
            path.stat()
            raise errors.InvalidPath(
                f"{path} is not a regular file",
                hint="name a file",
                details={"field": "path", "reason": "not_a_file"},
            )
        file = path.open("rb")
        return file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _local(error, path) from error
    except ValueError as error:  # a NUL
        raise errors.InvalidPath(str(error), details={"reason": "null_byte"}) from error


def _local(error: OSError, path: Path) -> errors.SbxError:
    """What this host said of a file of its own."""
    said = f"{path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return errors.NotFound(said, code="file_not_found", hint="look at the name")
    if isinstance(error, PermissionError):
        return errors.Denied(said, code="file_not_permitted", hint="use a file you may use")
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        return errors.InvalidPath(said, hint="name a file", details={"reason": "not_a_file"})
    return errors.Unavailable(said, code="io_error", hint="look at the disk of this host")
