"""The sandboxes of projects that the project process has, as the service calls them.

`RemoteSession` has the methods of `ProjectSession`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from sbx import errors
from sbx.agent.sandbox import ToolUploads
from sbx.aio import in_thread, run_to_completion
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.protocol.changes import ChangeBudget
from sbx.protocol.dry_runs import FileChange
from sbx.protocol.events import decode, event_from_json, run_from_json
from sbx.protocol.files import FileEntry, Kind, Listing, Upload
from sbx.protocol.grants import Access, Grant, GrantDuration
from sbx.protocol.runs import Event, Run, RunEnd
from sbx.protocol.surroundings import Surroundings
from sbx.service.projects import calls
from sbx.service.projects.link import ProjectServerLink
from sbx.workspace.snapshots.manifest import within
from sbx.workspace.uploads import UploadLimits

T = TypeVar("T")
_CHUNK = 1 << 20
_IN_THREAD = 256 << 10  # bytes of an event that are not read on the loop


class ProjectRun:
    """A run in the project server. It continues without a follower."""

    def __init__(self, of: "_Remote", request: calls.StartCall) -> None:
        self._of = of
        self._number = asyncio.ensure_future(of.call(request, int))
        self._number.add_done_callback(_retrieve)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event from the first on. Raises why the run could not be started."""
        run = await asyncio.shield(self._number)
        after = 0
        while events := await self._of.call(calls.Follow(self._of.number, run, after), list[bytes]):
            for event in events:
                yield await _event(event)
            after += len(events)

    async def result(self) -> Run:
        """Return the result as `ActiveRun.result` does. Raise Broken `run_lost`."""
        async for event in self.events():
            if isinstance(event, RunEnd):
                return event.run
        raise errors.Broken("a run ended without its result", code="run_lost", hint="run it again")

    async def give_up(self) -> None:
        with suppress(errors.NotFound):  # it has ended
            run = await asyncio.shield(self._number)
            await self._of.call(calls.GiveUp(self._of.number, run), type(None))


class _Remote:
    """The common part of a sandbox over a project, and of the copy that a tool call acts on."""

    sandboxed = True
    commands_allowed = False

    def __init__(
        self, link: ProjectServerLink, number: int, session: "RemoteSession | None" = None
    ) -> None:
        """`session`: the sandbox of a tool call; None if this is the sandbox itself."""
        self.link = link
        self.number = number
        self.files = RemoteProjectFiles(self)
        self.stateful = False
        self._session: _Remote = session or self

    async def call(self, request: calls.Request, result_type: type[T]) -> T:
        return await self.link.ask(request, result_type, self._session.note)

    def note(self, reply: calls.CallReply) -> None:
        """Keep what a reply reports about the sandbox."""
        if reply.error is None:
            self.stateful = reply.stateful

    def start_run(self, code: str, *, timeout: float | None = None) -> ProjectRun:
        return ProjectRun(self, calls.StartCall(self.number, code, None, timeout, None))

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ProjectRun:
        return ProjectRun(self, calls.StartCall(self.number, command, "", timeout, cwd))

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> ProjectRun:
        return ProjectRun(self, calls.StartCall(self.number, code, language, timeout, None))

    async def give_up(self, run: Any, /) -> None:
        await run.give_up()

    async def save_result(self, name: str, content: bytes) -> str:
        return await self.call(calls.SaveResult(self.number, name, content), str)


class ProjectGrants(Grants):
    """The grants of a sandbox in the project server, which applies them and reports their end."""

    def __init__(self, policy: Policy, session: "RemoteSession") -> None:
        super().__init__(policy)
        self._session = session

    async def grant(self, access: Access, duration: GrantDuration, by: str) -> Grant:
        request = calls.AddGrant(self._session.number, access, duration, by)
        grant = await self._session.call(request, Grant)
        self.begin(grant)
        return grant


class RemoteSession(_Remote):
    """The methods of `ProjectSession`, called in the project process. `shown` are the uploads of
    the conversation; its `uploads` without them are those of the sandbox itself. `grants` are set
    by `open`."""

    grants: ProjectGrants | None = None

    def __init__(self, link: ProjectServerLink, number: int, *, commands_allowed: bool) -> None:
        super().__init__(link, number)
        self.commands_allowed = commands_allowed
        self.own_uploads = ProjectRemoteUploads(self)
        self.shown: ToolUploads | None = None

    @classmethod
    async def open(
        cls,
        link: ProjectServerLink,
        policy: str,
        directory: Path,
        *,
        narrower: Mapping[str, Any],
        env: Mapping[str, str],
        commands_allowed: bool,
        lost: bool,
    ) -> Self:
        """Open the sandbox of a project. Raise as `ProjectServerLink.look_at`, and the errors of
        its start."""
        request = calls.Open(
            str(directory), policy, dict(narrower), dict(env), commands_allowed, lost
        )
        number = await link.obtain(link.call(request, int), calls.Close)
        session = cls(link, number, commands_allowed=commands_allowed)
        try:
            content = await session.call(calls.ReadPolicy(number), dict[str, Any])
        except BaseException:
            await run_to_completion(session.close())
            raise
        session.grants = ProjectGrants(Policy.model_validate(content), session)
        return session

    def note(self, reply: calls.CallReply) -> None:
        super().note(reply)
        if self.grants is not None and reply.grants is not None:
            self.grants.keep(reply.grants)
            for access in reply.refused:
                self.grants.note_refused(access)

    @property
    def uploads(self) -> ToolUploads:
        return self.shown or self.own_uploads

    async def surroundings(self) -> Surroundings:
        return await self.call(calls.ReadSurroundings(self.number), Surroundings)

    async def allow_commands(self) -> None:
        await self.call(calls.Allow(self.number), type(None))
        self.commands_allowed = True

    async def begin(self, effect: Literal["write", "code", "command"]) -> "RemoteChanges":
        """Begin a tool call. Raise as `ProjectSession.begin`."""
        begun = self.call(calls.Begin(self.number, effect), int)
        return RemoteChanges(self, await self.link.obtain(begun, calls.Rollback))

    async def close(self) -> None:
        if self.grants is not None:
            await self.grants.close()
        with suppress(errors.Closed):
            await self.call(calls.Close(self.number), type(None))


class RemoteChanges(_Remote):
    """See `CodeChanges` and `WriteChanges`."""

    def __init__(self, session: RemoteSession, number: int) -> None:
        super().__init__(session.link, number, session)
        self._uploads = session.uploads

    @property
    def sandbox(self) -> "RemoteChanges":
        return self

    @property
    def uploads(self) -> ToolUploads:
        return self._uploads

    async def compare(self) -> "RemoteChangeSet":
        return RemoteChangeSet(await self.call(calls.Compare(self.number), calls.Compared))

    async def commit(self) -> None:
        await self.call(calls.Commit(self.number), type(None))

    async def rollback(self) -> None:
        with suppress(errors.Closed):  # a second time does nothing
            await self.call(calls.Rollback(self.number), type(None))


class RemoteChangeSet:
    """See `ChangeSet`."""

    def __init__(self, reply: calls.Compared) -> None:
        self.run: Run | None = None if reply.run is None else run_from_json(decode(reply.run))
        self.changes: Sequence[FileChange] = reply.changes
        self.truncated = reply.truncated
        self.left_out: Sequence[str] = reply.left_out
        self.host_executables: Mapping[str, str] = {}  # the server refuses to create them
        self._touched = calls.changes_of(reply.touched)

    @property
    def is_empty(self) -> bool:
        return not self._touched

    @property
    def paths(self) -> Sequence[str]:
        return [change.path for change in self._touched]

    def within(self, allowances: Sequence[ChangeBudget]) -> bool:
        return within(self._touched, allowances)


class RemoteProjectFiles:
    """See `ProjectFiles`."""

    def __init__(self, of: _Remote) -> None:
        self._of = of

    async def read_bytes(self, path: str) -> bytes:
        return await self._of.call(calls.ReadFile(self._of.number, path), bytes)

    async def write(self, path: str, content: str | bytes) -> int:
        data = content.encode() if isinstance(content, str) else content
        return await self._of.call(calls.WriteFile(self._of.number, path, data), int)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        request = calls.ListFiles(self._of.number, path, max_depth)
        return _listing(await self._of.call(request, calls.FoundReply))

    async def stat(self, path: str) -> FileEntry:
        return await self._of.call(calls.Stat(self._of.number, path), FileEntry)

    async def make_directory(self, path: str) -> None:
        await self._of.call(calls.MakeDirectory(self._of.number, path), type(None))

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        request = calls.Find(self._of.number, pattern, path, kind, max_results)
        return _listing(await self._of.call(request, calls.FoundReply))


class ProjectRemoteUploads:
    """The uploads that the sandbox has itself: copies of those that the service keeps."""

    def __init__(self, of: RemoteSession) -> None:
        self._of = of

    async def put(self, path: str | Path, name: str | None = None) -> Upload:
        source = Path(path)
        content = await in_thread(source.read_bytes)
        return await self.put_bytes(source.name if name is None else name, content)

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        async def chunks() -> AsyncGenerator[bytes, None]:
            for at in range(0, len(content), _CHUNK):
                yield content[at : at + _CHUNK]

        return await self.put_stream(name, chunks())

    async def put_stream(
        self, name: str, chunks: AsyncIterable[bytes], limits: UploadLimits | None = None
    ) -> Upload:
        """`limits` are the server's: the caller has checked its own."""
        of = self._of
        upload = await of.call(calls.BeginUpload(of.number, name), int)
        try:
            async for chunk in chunks:
                await of.call(calls.AddToUpload(of.number, upload, chunk), type(None))
        except BaseException:
            with suppress(errors.SbxError):
                drop = calls.EndUpload(of.number, upload, False)
                await run_to_completion(of.call(drop, type(None)))
            raise
        return await of.call(calls.EndUpload(of.number, upload, True), Upload)

    async def list(self) -> Sequence[Upload]:
        return await self._of.call(calls.ListUploads(self._of.number), list[Upload])

    async def delete(self, name: str) -> None:
        await self._of.call(calls.DeleteUpload(self._of.number, name), type(None))


async def _event(encoded: bytes) -> Event:
    if len(encoded) > _IN_THREAD:
        return await in_thread(lambda: event_from_json(decode(encoded)))
    return event_from_json(decode(encoded))


def _listing(reply: calls.FoundReply) -> Listing:
    listing = Listing(reply.entries)
    listing.complete = reply.complete
    return listing


def _retrieve(done: "asyncio.Future[Any]") -> None:
    if not done.cancelled():
        done.exception()  # raised again to each follower of the run
