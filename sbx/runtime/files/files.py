"""The files of a conversation for asyncio: every call in a worker thread, none blocks the loop."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
)
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from sbx import errors
from sbx.aio import long_call, run_to_completion
from sbx.policy import Policy
from sbx.protocol.files import (
    Copied,
    FileEntry,
    FileEvent,
    Kind,
    Listing,
    Matches,
    Unpacked,
    Upload,
    decode_text,
)
from sbx.runtime.files.archives import ArchiveFormat, Archives, Beside
from sbx.runtime.files.open_files import Identity, MountPoints, OpenFiles, open_files
from sbx.runtime.files.resumable_uploads import Partials
from sbx.runtime.files.streams import FileStream, opened_stream
from sbx.runtime.honeytokens import Honeytokens, look, reader_of
from sbx.runtime.run.checks import require_capability
from sbx.workspace.files import Files
from sbx.workspace.streams import OpenFile, ReceivedFile
from sbx.workspace.uploads import UploadLimits, Uploads
from sbx.workspace.watch import Watching

__all__ = [
    "Identity",
    "MountPoints",
    "OpenFiles",
    "WorkspaceFiles",
    "WorkspaceUploads",
    "open_files",
]

T = TypeVar("T")


class WorkspaceFiles:
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied where the policy offers no `filesystem`.
    """

    def __init__(
        self,
        open_files: Callable[[], Awaitable[OpenFiles]],
        policy: Policy,
        beside: Beside,
    ) -> None:
        """`beside` lends the kernel in whose jail archives are packed and unpacked."""
        self.honeytokens: Honeytokens | None = None
        self._open = open_files
        self._policy = policy
        self._archives = Archives(policy, beside)
        self.partials = Partials(self._opened, policy)

    async def read(self, path: str) -> str:
        """Return the text of a file. Raise BadRequest `not_text` if it is not UTF-8."""
        return decode_text(path, await self.read_bytes(path))

    async def read_bytes(self, path: str) -> bytes:
        content = await self._call(lambda files: files.read(path))
        await look(self.honeytokens, "a download", content)
        return content

    async def write(self, path: str, content: str | bytes) -> int:
        """Write a file in one step, with the directories it needs; its size in bytes."""
        data = _encoded(content)
        await look(self.honeytokens, "a file that came in", data)
        opened = await self._opened()
        async with _replacing(opened, path):
            return await opened.call(lambda: opened.files.write(path, data))

    async def open_stream(self, path: str) -> FileStream:
        """Open a file of any size to be read in pieces; the caller closes it."""
        opened = await self._opened()
        reader = await reader_of(self.honeytokens, "a download")
        with opened.in_use():
            return await opened_stream(opened, lambda: (opened.files.open(path), None), reader)

    async def write_stream(
        self, path: str, chunks: AsyncIterable[bytes], *, max_bytes: int | None = None
    ) -> int:
        """`write`, from a source of any size. A cancelled or failed call leaves the old file."""
        opened = await self._opened()
        reader = await reader_of(self.honeytokens, "a file that came in")
        intake = opened.files.writing(path, max_bytes=max_bytes)
        async with _replacing(opened, path):
            return await opened.intakes.fill(
                opened, intake, reader.pieces(chunks) if reader else chunks
            )

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return await self._call(lambda files: files.list(path, max_depth=max_depth))

    async def stat(self, path: str) -> FileEntry:
        return await self._call(lambda files: files.stat(path))

    async def delete(self, path: str) -> bool:
        """Delete a file, or a directory with its content. Return False if the deletion continues
        later."""
        return await self._call(lambda files: files.delete(path))

    async def make_directory(self, path: str) -> None:
        await self._call(lambda files: files.make_directory(path))

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """Find entries below a directory by name, or with a `/` in the pattern by path, like `*.py`
        or `src/**/test_*`. `complete` is False if a limit ended the search."""
        return await self._long_call(
            lambda files: files.find(pattern, path, kind=kind, max_results=max_results)
        )

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
        """Find lines of text files with `pattern`: plain text, or with `regex` an RE2 expression.
        `include`: only files with such a name or path. See `Matches`."""
        return await self._long_call(
            lambda files: files.grep(
                pattern,
                path,
                regex=regex,
                ignore_case=ignore_case,
                include=include,
                max_matches=max_matches,
            )
        )

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move or rename. `overwrite`: a file may replace a file. Raises Conflict `file_exists`."""
        await self._call(lambda files: files.move(source, target, overwrite=overwrite))

    async def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied:
        """Copy a file, or a directory with all below it. Raises as `move`, and TooLarge."""
        return await self._long_call(lambda files: files.copy(source, target, overwrite=overwrite))

    async def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int:
        """Replace a text that the file has `count` times (None: once at least), in one step; how
        often it was. Raises Conflict `replace_count`, `file_changed`."""
        return await self._call(lambda files: files.replace(path, old, new, count=count))

    async def chmod(self, path: str, mode: int) -> None:
        """Set permissions, 0 to 0o777. Raises Denied `set_id_refused`, `file_not_permitted`."""
        await self._call(lambda files: files.chmod(path, mode))

    async def watch(
        self, path: str = ".", *, recursive: bool = True
    ) -> AsyncGenerator[FileEvent, None]:
        """Yield the changes in a directory, and with `recursive` below it, after a first `started`,
        until the conversation ends. Raise Unavailable `too_many_watches`."""
        opened = await self._opened()

        def begin() -> tuple[str, Watching]:
            base, places = opened.files.places(path)
            return base, Watching(places if recursive else places[:1], recursive=recursive)

        async with aclosing(opened.watches.follow(opened, begin)) as changes:
            async for change in changes:
                yield change

    async def archive(
        self, path: str = ".", *, format: ArchiveFormat = "tar.gz"
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an archive of a directory, while it is packed inside. An end without
        an error is a complete archive. Start the kernel. Raise Denied `processes_denied`."""
        self._archives.check(format)
        opened = await self._opened()
        view = opened.files.view(path)
        async with aclosing(self._archives.pack(view, format)) as pieces:
            async for piece in pieces:
                yield piece

    async def unpack(self, source: bytes | AsyncIterable[bytes], path: str = ".") -> Unpacked:
        """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside; replace files of the
        same names. Start the kernel. Raise Denied `processes_denied`, BadRequest `not_an_archive`,
        TooLarge `archive_too_large`; a failure leaves the files that were unpacked before."""
        self._archives.check()
        opened = await self._opened()
        view = opened.files.view(path, into=True)
        room = await opened.call(lambda: opened.files.room_below(path))
        return await self._archives.unpack(view, _streamed(source), room)

    async def _call(self, act: Callable[[Files], T]) -> T:
        opened = await self._opened()
        return await opened.call(lambda: act(opened.files))

    async def _long_call(self, act: Callable[[Files], T]) -> T:
        """To its end, also when the caller goes: its turn lasts as long as it has the thread."""
        opened = await self._opened()
        with opened.in_use():
            async with long_call():
                return await run_to_completion(opened.call(lambda: act(opened.files)))

    async def _opened(self) -> OpenFiles:
        require_capability(self._policy, "filesystem")
        return await self._open()


class WorkspaceUploads:
    """The uploads of the user, read-only inside at /workspace/uploads/temparea."""

    def __init__(self, open_files: Callable[[], Awaitable[OpenFiles]], policy: Policy) -> None:
        self.honeytokens: Honeytokens | None = None
        self._open = open_files
        self._limits = _upload_limits(policy)

    async def put(self, path: str | Path, name: str | None = None) -> Upload:
        """Copy a file of the host in, under its own name or another; the same name replaces.

        Raises NotFound, InvalidPath, and for each limit an error that names it.
        """
        source = Path(path)
        target = source.name if name is None else name
        return await self._call(lambda uploads: uploads.put(target, source, self._limits))

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        data = _encoded(content)
        await look(self.honeytokens, "an upload", data)
        return await self._call(lambda uploads: uploads.put(name, data, self._limits))

    async def put_stream(
        self, name: str, chunks: AsyncIterable[bytes], limits: UploadLimits | None = None
    ) -> Upload:
        """Store `chunks`, of any size, within `limits` (None: the policy's).

        Raise as `put`. A cancelled or failed call leaves the old upload.
        """
        opened, uploads = await self._opened()
        reader = await reader_of(self.honeytokens, "an upload")
        intake = uploads.putting(name, self._limits if limits is None else limits)
        return await opened.intakes.fill(
            opened, intake, reader.pieces(chunks) if reader else chunks
        )

    async def put_partial(
        self, partials: Partials, id: str, sha256: str, limits: UploadLimits | None = None
    ) -> Upload:
        """Store a resumable upload. Raise as `put_stream` and `ResumableUploads.finish`."""

        def store(opened: OpenFiles, path: str, received: ReceivedFile) -> Upload:
            uploads = self._uploads_of(opened)
            name = path.rpartition("/")[2]
            return uploads.put(name, received, self._limits if limits is None else limits)

        return await partials.finish(id, sha256, store)

    async def get(self, name: str) -> Upload:
        return await self._call(lambda uploads: uploads.get(name))

    async def open_stream(self, name: str) -> FileStream:
        """Open an upload to be read in pieces; the caller closes it."""
        opened, uploads = await self._opened()
        reader = await reader_of(self.honeytokens, "a download")
        with opened.in_use():
            return await opened_stream(opened, lambda: _opened_upload(uploads, name), reader)

    async def list(self) -> tuple[Upload, ...]:
        return await self._call(lambda uploads: uploads.list())

    async def read_bytes(self, name: str) -> bytes:
        most = self._limits.max_file_size or (1 << 62)
        content = await self._call(lambda uploads: uploads.read(name, max_bytes=most))
        await look(self.honeytokens, "a download", content)
        return content

    async def delete(self, name: str) -> None:
        await self._call(lambda uploads: uploads.delete(name))

    async def _call(self, act: Callable[[Uploads], T]) -> T:
        opened, uploads = await self._opened()
        return await opened.call(lambda: act(uploads))

    async def _opened(self) -> tuple[OpenFiles, Uploads]:
        opened = await self._open()
        return opened, self._uploads_of(opened)

    def _uploads_of(self, opened: OpenFiles) -> Uploads:
        if (uploads := opened.uploads) is None:
            raise errors.Denied(
                "the uploads of this sandbox are a directory of the host, and read-only",
                code="uploads_mounted",
                hint="put the file into that directory",
            )
        return uploads


@asynccontextmanager
async def _replacing(opened: OpenFiles, path: str) -> AsyncIterator[None]:
    """Let the watches report the write of an existing file as a change of it."""
    replaced = None
    if opened.watches:
        with suppress(errors.SbxError):  # the write reports it, or creates the file
            replaced = await opened.call(lambda: opened.files.stat(path))
    if replaced is None or replaced.kind != "file":
        yield
        return
    with opened.watches.replacing(replaced.path):
        yield


async def _streamed(source: bytes | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(source, bytes | bytearray | memoryview):
        yield bytes(source)
        return
    async for chunk in source:
        yield chunk


def _opened_upload(uploads: Uploads, name: str) -> tuple[OpenFile, Upload]:
    file = uploads.open(name)
    try:
        return file, uploads.described(name, file)
    except BaseException:
        file.close()
        raise


def _encoded(content: str | bytes) -> bytes:
    """Return the bytes. Raise BadRequest `invalid_content` for anything but bytes and text with a
    UTF-8 form."""
    try:
        return content.encode() if isinstance(content, str) else bytes(memoryview(content))
    except (UnicodeEncodeError, TypeError) as error:
        raise errors.BadRequest(
            f"the content of a file is text or bytes: {error}",
            code="invalid_content",
            hint="encode the text yourself, with the error handler you want",
        ) from None


def _upload_limits(policy: Policy) -> UploadLimits:
    limits, most = policy.uploads, policy.limits.workspace_max
    types = None if limits.allowed_types == "any" else frozenset(limits.allowed_types)
    size, total = min(most, limits.max_file_size), min(most, limits.total_max)
    return UploadLimits(size, limits.max_file_count, total, types)
