"""The files of a conversation for asyncio: every call in a worker thread, none blocks the loop."""

import asyncio
import os
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sbx import errors
from sbx.policy import Policy
from sbx.runtime.request import demand
from sbx.runtime.streams import FileStream, Intakes, opened_stream
from sbx.workspace import (
    ConversationFiles,
    DataDirectory,
    Entry,
    Files,
    HostDirectory,
    Listing,
    OpenFile,
    Tree,
    Upload,
    UploadLimits,
    Uploads,
    protected_paths,
)

T = TypeVar("T")


Identity = tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class Ready:
    """What a start of a jail finds in a directory of the host, and by what each path is known: its
    owner may put another one there before it is mounted."""

    pinned: tuple[str, ...]
    protected: tuple[str, ...]
    identities: Mapping[str, Identity]


@dataclass(slots=True, eq=False)
class OpenFiles:
    """What a conversation's files are, held open: for the host's calls, and for its jail's mounts.

    `uploads` is None where a directory of the host is mounted as the uploads, `measured` where the
    files are not ours to limit. `identities` are (device, inode) of host directories by path.
    """

    files: Files
    uploads: Uploads | None
    measured: Tree | None
    files_path: Path
    uploads_path: Path
    own: ConversationFiles
    shared_path: Path | None = None
    host_directory: HostDirectory | None = None
    has_temparea: bool = True
    identities: Mapping[str, Identity] = field(default_factory=dict)
    held: ExitStack = field(default_factory=ExitStack)
    working: set[asyncio.Future[Any]] = field(default_factory=set)
    untouched: bool = False
    intakes: Intakes = field(default_factory=Intakes)
    users: int = 0

    async def call(self, act: Callable[[], T]) -> T:
        """`act` in a worker thread. A call that is cancelled leaves its thread at work, and what
        is open here stays open for it: a descriptor closed too early is soon that of another file.
        """
        work = asyncio.get_running_loop().run_in_executor(None, act)
        self.working.add(work)
        work.add_done_callback(self.working.discard)
        return await asyncio.shield(work)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it nothing here is put away."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    @property
    def busy(self) -> bool:
        """Whether a call or a file on its way in needs what is open here."""
        return self.users > 0 or bool(self.working) or self.intakes.filling

    async def prepare(self) -> Ready:
        """See to the mount points and look at what is there, before each start of a jail.

        Before the first one there is nothing to see in a workspace of our own: to open it was to
        see to it, no jail has run in it since, and no API removes a mount point.
        """
        if self.untouched:
            self.untouched = False
            return Ready((), (), self.identities)
        return await self.call(self._prepare)

    def _prepare(self) -> Ready:
        self.own.prepare(shared=self.shared_path is not None)
        if self.host_directory is None:
            return Ready((), (), self.identities)
        found = protected_paths(self.host_directory)
        seen = {
            f"{self.host_directory.path}/{name}": self.host_directory.identity(name)
            for name in (*found.pinned, *found.read_only)
        }
        return Ready(found.pinned, found.read_only, {**self.identities, **seen})

    def put_away(self) -> None:
        """Close what is not busy. A stream that is read has a descriptor of its own."""
        assert not self.busy
        self.held.close()

    async def close(self) -> None:
        await self.intakes.stop()
        if self.working:
            await asyncio.wait(self.working)
        self.held.close()


def open_files(
    data: DataDirectory,
    sandbox: str,
    conversation: str,
    policy: Policy,
    host: tuple[int, int],
    workspace: Path | None,
    uploads: Path | None,
    *,
    new: bool = True,
) -> OpenFiles:
    """Open the files of a conversation: of a `new` one, or of one in which jails have run.

    `sandbox` and `conversation` are opaque names, `host` the uid and gid of its jails.

    Raises Denied `workspace_owned_by_root`, NotFound, InvalidPath.
    """
    owner = host if host[0] != os.geteuid() else None
    largest = policy.limits.file_size_max
    with ExitStack() as held:
        own = data.conversation(sandbox, conversation, owner=owner)
        held.callback(own.close)
        identities: dict[str, Identity] = {}
        put: Uploads | None = own.uploads
        uploads_path, uploads_tree = own.uploads_path, own.uploads.tree
        if uploads is not None:
            mounted = held.enter_context(
                closing(HostDirectory.open(uploads, jail_uid=host[0], read_only=True))
            )
            identities[str(mounted.path)] = mounted.identity()
            put, uploads_path, uploads_tree = None, mounted.path, mounted.tree()
            held.callback(uploads_tree.close)
        if workspace is None:
            shared = data.shared(sandbox, owner=owner) if policy.shared else None
            if shared is not None:
                held.callback(shared.close)
            opened = OpenFiles(
                files=Files(own.files, uploads_tree, shared, max_bytes=largest),
                uploads=put,
                measured=own.files,
                files_path=own.files_path,
                uploads_path=uploads_path,
                own=own,
                shared_path=data.shared_path(sandbox) if shared is not None else None,
                identities=identities,
                untouched=new and shared is None,
            )
        else:
            directory = HostDirectory.open(workspace, jail_uid=host[0])
            held.callback(directory.close)
            identities[str(directory.path)] = directory.identity()
            tree = directory.tree(owner=owner)
            held.callback(tree.close)
            has_temparea = _has_temparea(tree)
            opened = OpenFiles(
                files=Files(tree, uploads_tree, uploads_apart=not has_temparea, max_bytes=largest),
                uploads=put,
                measured=None,
                files_path=directory.path,
                uploads_path=uploads_path,
                own=own,
                host_directory=directory,
                has_temparea=has_temparea,
                identities=identities,
            )
        opened.held.push(held.pop_all())
        return opened


class WorkspaceFiles:
    """The files as the code inside sees them. Paths are relative to /workspace, or absolute.

    Every method raises InvalidPath for a path that leads out, NotFound `file_not_found`, TooLarge,
    Unavailable `no_space`, and Denied where the policy offers no `filesystem`.
    """

    def __init__(self, open_files: Callable[[], Awaitable[OpenFiles]], policy: Policy) -> None:
        self._open = open_files
        self._policy = policy

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
        return await self._call(lambda files: files.read(path))

    async def write(self, path: str, content: str | bytes) -> int:
        """Write a file in one step, with the directories it needs; its size in bytes."""
        data = _encoded(content)
        return await self._call(lambda files: files.write(path, data))

    async def open_stream(self, path: str) -> FileStream:
        """Open a file of any size to be read in pieces; the caller closes it."""
        opened = await self._opened()
        with opened.in_use():
            return await opened_stream(opened, lambda: (opened.files.open(path), None))

    async def write_stream(
        self, path: str, chunks: AsyncIterable[bytes], *, max_bytes: int | None = None
    ) -> int:
        """`write`, from a source of any size; cancelled or failed, it leaves what was there."""
        opened = await self._opened()
        intake = opened.files.writing(path, max_bytes=max_bytes)
        return await opened.intakes.fill(opened, intake, chunks)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return await self._call(lambda files: files.list(path, max_depth=max_depth))

    async def stat(self, path: str) -> Entry:
        return await self._call(lambda files: files.stat(path))

    async def delete(self, path: str) -> bool:
        """Delete a file, or a directory with all below it; False if that goes on later."""
        return await self._call(lambda files: files.delete(path))

    async def make_directory(self, path: str) -> None:
        await self._call(lambda files: files.make_directory(path))

    async def _call(self, act: Callable[[Files], T]) -> T:
        opened = await self._opened()
        return await opened.call(lambda: act(opened.files))

    async def _opened(self) -> OpenFiles:
        demand(self._policy, "filesystem")
        return await self._open()


class WorkspaceUploads:
    """What a user put into the conversation, read-only inside at /workspace/uploads/temparea."""

    def __init__(self, open_files: Callable[[], Awaitable[OpenFiles]], policy: Policy) -> None:
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
        return await self._call(lambda uploads: uploads.put(name, data, self._limits))

    async def put_stream(
        self, name: str, chunks: AsyncIterable[bytes], limits: UploadLimits | None = None
    ) -> Upload:
        """Store what `chunks` brings, of any size, within `limits` (None: the policy's).

        Raises as `put`; cancelled or failed, it leaves what was there.
        """
        opened, uploads = await self._opened()
        intake = uploads.putting(name, self._limits if limits is None else limits)
        return await opened.intakes.fill(opened, intake, chunks)

    async def get(self, name: str) -> Upload:
        return await self._call(lambda uploads: uploads.get(name))

    async def open_stream(self, name: str) -> FileStream:
        """Open an upload to be read in pieces; the caller closes it."""
        opened, uploads = await self._opened()
        with opened.in_use():
            return await opened_stream(opened, lambda: _opened_upload(uploads, name))

    async def list(self) -> tuple[Upload, ...]:
        return await self._call(lambda uploads: uploads.list())

    async def read_bytes(self, name: str) -> bytes:
        most = self._limits.max_file_size or (1 << 62)
        return await self._call(lambda uploads: uploads.read(name, max_bytes=most))

    async def delete(self, name: str) -> None:
        await self._call(lambda uploads: uploads.delete(name))

    async def _call(self, act: Callable[[Uploads], T]) -> T:
        opened, uploads = await self._opened()
        return await opened.call(lambda: act(uploads))

    async def _opened(self) -> tuple[OpenFiles, Uploads]:
        opened = await self._open()
        if (uploads := opened.uploads) is None:
            raise errors.Denied(
                "the uploads of this sandbox are a directory of the host, and read-only",
                code="uploads_mounted",
                hint="put the file into that directory",
            )
        return opened, uploads


def _opened_upload(uploads: Uploads, name: str) -> tuple[OpenFile, Upload]:
    file = uploads.open(name)
    try:
        return file, uploads.described(name, file)
    except BaseException:
        file.close()
        raise


def _encoded(content: str | bytes) -> bytes:
    """Raises BadRequest `invalid_content` for neither bytes nor text that UTF-8 can carry."""
    try:
        return content.encode() if isinstance(content, str) else bytes(memoryview(content))
    except (UnicodeEncodeError, TypeError) as error:
        raise errors.BadRequest(
            f"the content of a file is text or bytes: {error}",
            code="invalid_content",
            hint="encode the text yourself, with the error handler you want",
        ) from None


def _upload_limits(policy: Policy) -> UploadLimits:
    asked = policy.uploads
    types = None if asked.allowed_types == "any" else frozenset(asked.allowed_types)
    return UploadLimits(asked.max_file_size, asked.max_file_count, asked.total_max, types)


def _has_temparea(tree: Tree) -> bool:
    try:
        return tree.stat(("uploads", "temparea")).kind == "directory"
    except errors.NotFound:
        return False
