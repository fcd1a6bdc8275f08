"""The files of a conversation in a service. Contents are streamed, so that memory use is small."""

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any, Literal

from sbx import errors
from sbx.client import checks
from sbx.client.http import HttpClient, query, target
from sbx.client.http_connection import ConnectionLost
from sbx.client.replies import StreamedReply, connection_lost
from sbx.client.transfers import (
    OnProgress,
    UploadTarget,
    fetch_file,
    pieces_of,
    read_all,
    reading,
    send_file,
)
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
    decode_text,
)


class RemoteFiles:
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied if the policy permits no `filesystem`.
    """

    def __init__(self, wire: HttpClient, check: Callable[[], None], path: str) -> None:
        self._wire = wire
        self._check = check
        self._path = path

    async def read(self, path: str) -> str:
        """Return the text of a file. Raise BadRequest `not_text` if it is not UTF-8."""
        return decode_text(path, await self.read_bytes(path))

    async def read_bytes(self, path: str) -> bytes:
        """Return the content of a file."""
        return await read_all(self._wire, self._at("files", path=path))

    async def write(self, path: str, content: str | bytes) -> int:
        """Write a file atomically. Create missing directories. Return its size in bytes."""
        data = checks.content(content)
        return await self.write_stream(path, pieces_of(data), size=len(data))

    def open_stream(self, path: str) -> AbstractAsyncContextManager[StreamedReply]:
        """Open a file of any size, to read it in pieces: `.size` and `.chunks()`."""
        return reading(self._wire, self._at("files", path=path))

    async def write_stream(
        self, path: str, chunks: AsyncIterable[bytes], *, size: int | None = None
    ) -> int:
        """Write a file from a source of any size. If this fails, the old file stays."""
        reply = await self._wire.send("PUT", self._at("files", path=path), chunks, size=size)
        return int(reply.json()["size"])

    async def upload(
        self, source: str | Path, path: str, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy a file of this host to `path`. Return its size in bytes. A large file is sent in
        pieces, and resumed after a lost connection."""
        at = self._at("files", path=path)
        target = UploadTarget(f"{self._path}/partials", checks.path(path), upload=False)
        return int((await send_file(self._wire, at, Path(source), target, on_progress))["size"])

    async def download(
        self, path: str, to: str | Path, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy a complete file to this host, or nothing. Return its size in bytes."""
        return await fetch_file(self._wire, self._at("files", path=path), Path(to), on_progress)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        """Return the entries of a directory, by path."""
        return _listing(await self._get("list", path=path, max_depth=max_depth))

    async def stat(self, path: str) -> FileEntry:
        """Return the entry at a path."""
        return FileEntry(**await self._get("stat", path=path))

    async def delete(self, path: str) -> bool:
        """Delete a file, or a directory with its content. Return False if the deletion continues in
        the background."""
        reply = await self._wire.call("DELETE", self._at("files", path=path), again=False)
        return bool(reply.json()["deleted"])

    async def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents."""
        self._check()
        body = json.dumps({"path": checks.path(path)}).encode("ascii")
        await self._wire.call("POST", f"{self._path}/directories", body=body)

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        """Return the entries below a directory whose name matches a pattern such as `*.py`. With a
        `/` in the pattern, as in `src/**/test_*`, match the path. `complete` is False if a limit
        shortened the list."""
        options = {"pattern": checks.path(pattern), "kind": kind, "max_results": max_results}
        return _listing(await self._get("find", path=path, **options))

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
        """Return the lines of text files that contain `pattern`: plain text, or an RE2 expression
        with `regex`. `include` restricts the search to files whose name, or path, matches it. See
        `Matches`."""
        reply = await self._get(
            "grep",
            path=path,
            pattern=checks.path(pattern),
            regex=regex,
            ignore_case=ignore_case,
            include=include,
            max_matches=max_matches,
        )
        matches = Matches(Match(**match) for match in reply["matches"])
        matches.complete = reply["complete"]
        matches.files, matches.skipped = reply["files"], reply["skipped"]
        return matches

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move or rename. `overwrite`: a file may replace a file. Raise Conflict `file_exists`."""
        paths = {"source": checks.path(source), "target": checks.path(target)}
        await self._post("move", {**paths, "overwrite": overwrite})

    async def copy(self, source: str, target: str, *, overwrite: bool = False) -> Copied:
        """Copy a file, or a directory with its content. Raise as `move`, and TooLarge."""
        paths = {"source": checks.path(source), "target": checks.path(target)}
        return Copied(**await self._post("copy", {**paths, "overwrite": overwrite}))

    async def replace(self, path: str, old: str, new: str, *, count: int | None = 1) -> int:
        """Replace a text that occurs `count` times in the file (None: at least once), atomically.
        Return the number of replacements. Raise Conflict `replace_count`, `file_changed`."""
        checks.content(old + new)
        texts = {"old": old, "new": new}
        reply = await self._post("replace", {"path": checks.path(path), **texts, "count": count})
        return int(reply["replaced"])

    async def chmod(self, path: str, mode: int) -> None:
        """Set permissions, 0 to 0o777. Raise Denied `set_id_refused`, `file_not_permitted`."""
        if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
            raise errors.BadRequest("a mode must be a number from 0 to 0o777", code="invalid_mode")
        await self._post("chmod", {"path": checks.path(path), "mode": mode})

    async def watch(
        self, path: str = ".", *, recursive: bool = True
    ) -> AsyncGenerator[FileEvent, None]:
        """Yield the changes in a directory, and with `recursive` below it, until the conversation
        ends. The first event is `started`. Raise Unavailable `too_many_watches`."""
        at = self._at("watch", path=path, recursive=recursive)
        try:
            async with aclosing(self._wire.events("GET", at)) as events:
                async for _, _, data in events:
                    event = json.loads(data)
                    yield FileEvent(event["type"], event["path"])
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, lost) from lost

    async def archive(
        self, path: str = ".", *, format: Literal["tar.gz", "zip"] = "tar.gz"
    ) -> AsyncGenerator[bytes, None]:
        """Pack a directory inside the walls, and yield the bytes of the archive. The archive is
        complete if no error is raised. Start the kernel; raise Denied `processes_denied`."""
        at = self._at("archive", path=path, format=format)
        async with reading(self._wire, at) as reply, aclosing(reply.chunks()) as pieces:
            async for piece in pieces:
                yield piece

    async def unpack(self, source: bytes | AsyncIterable[bytes], path: str = ".") -> Unpacked:
        """Unpack a tar (plain, gz, bz2, xz) or a zip into a directory, inside the walls. Files of
        the same names are replaced. Start the kernel.

        Raise Denied `processes_denied`, BadRequest `not_an_archive`, TooLarge `archive_too_large`;
        files that were unpacked before the error stay.
        """
        at = self._at("archive", path=path)
        if isinstance(source, bytes | bytearray | memoryview):
            data = bytes(source)
            reply = await self._wire.send("PUT", at, pieces_of(data), size=len(data))
        else:
            reply = await self._wire.send("PUT", at, source)
        return Unpacked(**reply.json())

    async def _get(self, what: str, *, path: str, **options: Any) -> Any:
        return (await self._wire.call("GET", self._at(what, path=path, **options))).json()

    async def _post(self, what: str, fields: dict[str, Any]) -> Any:
        self._check()
        body = json.dumps(fields).encode("ascii")
        return (await self._wire.call("POST", f"{self._path}/{what}", body=body)).json()

    def _at(self, what: str, *, path: str, **options: Any) -> str:
        self._check()
        return f"{self._path}/{what}{query({'path': checks.path(path), **options})}"


def _listing(reply: Any) -> Listing:
    listing = Listing(FileEntry(**entry) for entry in reply["entries"])
    listing.complete = reply["complete"]
    return listing


class RemoteUploads:
    """The uploads of the user, read-only inside at /workspace/uploads/temparea."""

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
        """Upload a file of this host, under its own name or `name`. Replace an upload of the same
        name.

        Raise NotFound, InvalidPath, and for each limit an error that names it.
        """
        source = Path(path)
        at = self._at(name := source.name if name is None else name)
        target = UploadTarget(f"{self._conversation}/partials", name, upload=True)
        reply = await send_file(self._wire, at, source, target, on_progress)
        return Upload(**reply.get("upload", reply))

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        """Store these bytes as an upload."""
        data = checks.content(content)
        return await self.put_stream(name, pieces_of(data), size=len(data))

    async def put_stream(
        self, name: str, chunks: AsyncIterable[bytes], *, size: int | None = None
    ) -> Upload:
        """Store the bytes of `chunks`, of any size, as an upload."""
        reply = await self._wire.send("PUT", self._at(name), chunks, size=size)
        return Upload(**reply.json())

    async def list(self) -> tuple[Upload, ...]:
        """Return all uploads, by name."""
        self._check()
        reply = await self._wire.call("GET", self._path)
        return tuple(Upload(**item) for item in reply.json()["items"])

    async def read_bytes(self, name: str) -> bytes:
        """Return the content of an upload."""
        return await read_all(self._wire, self._at(name))

    async def download(
        self, name: str, to: str | Path, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy a complete upload to this host, or nothing. Return its size in bytes."""
        return await fetch_file(self._wire, self._at(name), Path(to), on_progress)

    async def delete(self, name: str) -> None:
        """Delete an upload. Raise NotFound `file_not_found`."""
        await self._wire.call("DELETE", self._at(name), again=False)

    def _at(self, name: str) -> str:
        self._check()
        return self._path + target(checks.name(name))
