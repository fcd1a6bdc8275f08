"""The open sandboxes of projects: one for each conversation, from its first use on.

A sandbox is closed when it is idle, with its project or conversation, and with the service. After
an idle close, the next use creates another one, and Python reports there that its variables are
lost.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from sbx import errors
from sbx.aio import Clock, in_thread, run_to_completion
from sbx.protocol.files import Upload
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.files import WorkspaceUploads
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service.limits import over_share
from sbx.service.projects.client import ProjectRemoteUploads, RemoteSession
from sbx.service.projects.host_mode import HostSession, demand_of_root
from sbx.service.projects.link import ProjectServerLink
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession, python_in
from sbx.service.record import audit_grant
from sbx.store.projects import ProjectRow
from sbx.telemetry.audit import Audit
from sbx.workspace.allowed_paths import AllowedProjects
from sbx.workspace.paths import UPLOADS_APART
from sbx.workspace.uploads import UploadLimits


# In a project, the uploads of a conversation are at /uploads. They belong to the conversation of a
# persistent sandbox. If its jails have the same uid as those of the project, its directory is
# mounted. Otherwise (as root, where each has its own uid) the uploads are copied.
class ProjectUploads:
    """`theirs` are those that are kept, `copies` where they are copied to, if they are. `view` is
    where code sees them."""

    def __init__(
        self,
        theirs: WorkspaceUploads,
        copies: WorkspaceUploads | ProjectRemoteUploads | None = None,
        *,
        view: str,
    ) -> None:
        self._theirs = theirs
        self._copies = copies
        self._view = view
        self._copying = asyncio.Lock()

    async def put(self, path: str | Path, name: str | None = None) -> Upload:
        """Store an upload. Raise as `WorkspaceUploads.put`, whose limits apply."""
        return await self._shown(await self._theirs.put(path, name))

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        return await self._shown(await self._theirs.put_bytes(name, content))

    async def list(self) -> tuple[Upload, ...]:
        return tuple(self._as_seen(upload) for upload in await self._theirs.list())

    async def refresh(self) -> None:
        """Copy the present uploads of the conversation."""
        if self._copies is None:
            return
        async with self._copying:
            copied = {(upload.name, upload.sha256) for upload in await self._copies.list()}
            kept = {(upload.name, upload.sha256) for upload in await self._theirs.list()}
            for name, _ in kept - copied:
                await self._copy(self._copies, name)
            for name in {name for name, _ in copied} - {name for name, _ in kept}:
                await self._copies.delete(name)

    async def _copy(self, copies: WorkspaceUploads | ProjectRemoteUploads, name: str) -> None:
        async with (
            await self._theirs.open_stream(name) as stream,
            aclosing(stream.chunks()) as chunks,
        ):
            await copies.put_stream(name, chunks, UploadLimits())

    async def _shown(self, upload: Upload) -> Upload:
        await self.refresh()
        return self._as_seen(upload)

    def _as_seen(self, upload: Upload) -> Upload:
        return replace(upload, path=f"{self._view}/{upload.name}")


OpenSession = ProjectSession | RemoteSession | HostSession
Key = tuple[str, str]  # owner, conversation
_KERNELS_PER_SESSION = 2
_RETRY_AFTER_S = 5.0
_log = logging.getLogger(__name__)


class SessionWalls(Struct, frozen=True):
    """The policy of a sandbox, and the limits and the environment that a request adds."""

    policy: str
    narrower: Mapping[str, Any]
    env: Mapping[str, str]


class SessionSpec(Struct, frozen=True):
    """The origin of a sandbox: another project, directory or policy needs another sandbox."""

    project_id: str
    directory: str
    sandboxed: bool
    walls: SessionWalls
    uploads: Path | None


class SessionState(Struct, eq=False):
    """The state of a conversation. In one project, `allowed` and `lost` outlive its sandbox: the
    user allowed commands, and Python had variables that are lost."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    project_id: str = ""  # also while its sandbox is created
    session: OpenSession | None = None
    spec: SessionSpec | None = None
    uploads: ProjectUploads | None = None
    users: int = 0
    idle_at: float = 0.0
    allowed: bool = False
    lost: bool = False

    @property
    def forgettable(self) -> bool:
        return self.session is None and not (self.users or self.allowed or self.lost)

    async def shut(self) -> None:
        """Close the sandbox, and keep the state that the next one needs. The caller has the
        lock."""
        session, self.session = self.session, None
        if session is not None:
            self.allowed |= (
                session.sandboxed and session.commands_allowed
            )  # the host mode never asks
            self.lost |= session.stateful
            await run_to_completion(session.close())


class ProjectSessions:
    """See the module. Its methods may be called concurrently from one event loop."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        settings: Settings,
        directories: AllowedProjects,
        server: ProjectServerLink | None = None,
        audit: Audit | None = None,
    ) -> None:
        """`server`: where another process has the directories."""
        self._audit = audit
        self._runtime = runtime
        self._server = server
        self._clock = clock
        self._settings = settings
        self._directories = directories
        self._states: dict[Key, SessionState] = {}
        self._leaving: dict[str, int] = defaultdict(int)
        self._closed = False

    @asynccontextmanager
    async def using(
        self,
        key: Key,
        get_project: Callable[[], Awaitable[ProjectRow]],
        walls: SessionWalls,
        uploads: Conversation | None,
    ) -> AsyncIterator[OpenSession]:
        """See `Projects.using`. `get_project` returns the project, or raises an error without
        one."""
        if self._closed:
            raise errors.Closed("the projects are closed", hint="start the service again")
        state = self._states.setdefault(key, SessionState())
        state.users += 1
        try:
            async with state.lock:
                session = await self._session(key, state, await get_project(), walls, uploads)
            yield session
        finally:
            state.users -= 1
            state.idle_at = self._clock.now() + self._settings.idle_timeout
            if state.forgettable and self._states.get(key) is state:
                del self._states[key]

    def commands_allowed(self, key: Key) -> bool:
        """Return whether the user has allowed the commands of this conversation."""
        state = self._states.get(key)
        if state is None:
            return False
        return state.allowed or (state.session is not None and state.session.commands_allowed)

    def in_use(self, project_id: str) -> bool:
        """Return whether an agent works in this project now."""
        return any(
            state.users and state.project_id == project_id for state in self._states.values()
        )

    async def forget(self, key: Key) -> None:
        """Close the sandbox of a conversation, even if it is in use, and forget its state."""
        state = self._states.pop(key, None)
        if state is not None:
            async with state.lock:
                await state.shut()

    async def close_idle(self) -> None:
        now = self._clock.now()
        due = [state for state in self._states.values() if not state.users and state.idle_at <= now]
        await _all(self._end_unused(state) for state in due)

    async def close(self) -> None:
        self._closed = True
        states, self._states = self._states, {}
        await _all(map(self._end, states.values()))

    @asynccontextmanager
    async def leaving(self, project_id: str) -> AsyncIterator[None]:
        """Close all sandboxes of this project, also those in use, and open none meanwhile."""
        self._leaving[project_id] += 1
        try:
            for key, state in list(self._states.items()):
                if state.project_id != project_id:
                    continue
                self._states.pop(key, None)
                await self._end(state)
            yield
        finally:
            self._leaving[project_id] -= 1
            if not self._leaving[project_id]:
                del self._leaving[project_id]

    # -- one sandbox --------------------------------------------------------------------------

    async def _session(
        self,
        key: Key,
        state: SessionState,
        project: ProjectRow,
        walls: SessionWalls,
        uploads: Conversation | None,
    ) -> OpenSession:
        if self._closed or self._states.get(key) is not state:
            raise errors.Closed("the conversation was closed meanwhile", hint="begin it again")
        if state.project_id != project.id:
            await self._shut_for_another(state)
            state.project_id, state.allowed, state.lost = project.id, False, False
        if project.id in self._leaving:
            raise _in_use("the project is being deleted")
        directory = Path(project.working_directory)
        if self._server is not None:
            await self._server.look_at(directory)
        else:
            await in_thread(self._directories.check, directory)
        path = (await uploads.opened()).uploads_path if uploads is not None else None
        spec = SessionSpec(project.id, str(directory), project.sandbox_enabled, walls, path)
        if state.spec != spec:
            await self._shut_for_another(state)
        if state.session is None:
            await self._make_room(key[0])
            await run_to_completion(self._make(key, state, spec, uploads))
        assert state.session is not None
        if state.uploads is not None:
            await state.uploads.refresh()
        return state.session

    async def _shut_for_another(self, state: SessionState) -> None:
        if state.session is not None and state.users > 1:
            raise _in_use("another run of this conversation works elsewhere")
        await state.shut()

    async def _make(
        self, key: Key, state: SessionState, spec: SessionSpec, uploads: Conversation | None
    ) -> None:
        directory, grace_s = Path(spec.directory), self._settings.interrupt_grace
        state.uploads = None
        if not spec.sandboxed:
            if uploads is not None:
                state.uploads = ProjectUploads(uploads.uploads, view=str(spec.uploads))
            if self._runtime.as_root:
                await in_thread(demand_of_root, directory)
            state.session = HostSession(directory, state.uploads, grace_s, lost=state.lost)
        else:
            state.session = await self._sandboxed(state, spec, uploads)
            if (grants := state.session.grants) is not None and self._audit is not None:
                details = {"owner": key[0], "project": spec.project_id}
                grants.listeners.append(partial(audit_grant, self._audit, key[1], details))
        state.spec, state.lost = spec, False

    async def _sandboxed(
        self, state: SessionState, spec: SessionSpec, uploads: Conversation | None
    ) -> ProjectSession | RemoteSession:
        if self._server is not None:
            return await self._remote(self._server, state, spec, uploads)
        mounted = spec.uploads if not self._runtime.capabilities.root else None
        sandbox = await open_project(
            self._runtime,
            spec.walls.policy,
            Path(spec.directory),
            narrower=spec.walls.narrower,
            env=spec.walls.env,
            uploads=mounted,
            lost=frozenset((python_in(state.allowed),)) if state.lost else frozenset(),
        )
        if uploads is not None:
            copies = None if mounted is not None else sandbox.uploads
            state.uploads = ProjectUploads(uploads.uploads, copies, view=UPLOADS_APART)
        return ProjectSession(sandbox, state.uploads, commands_allowed=state.allowed)

    async def _remote(
        self,
        server: ProjectServerLink,
        state: SessionState,
        spec: SessionSpec,
        uploads: Conversation | None,
    ) -> RemoteSession:
        session = await RemoteSession.open(
            server,
            spec.walls.policy,
            Path(spec.directory),
            narrower=spec.walls.narrower,
            env=spec.walls.env,
            commands_allowed=state.allowed,
            lost=state.lost,
        )
        if uploads is not None:
            state.uploads = ProjectUploads(uploads.uploads, session.own_uploads, view=UPLOADS_APART)
            session.shown = state.uploads
        return session

    async def _make_room(self, owner: str) -> None:
        """Close an unused sandbox, for the limit of all one of an owner above its equal share.
        Raise Unavailable `too_many_kernels` if all others are in use."""
        settings = self._settings
        for kernels, whose in ((settings.kernels_per_owner, owner), (settings.kernels_max, None)):
            most = max(1, kernels // _KERNELS_PER_SESSION)
            while len(there := self._live(whose)) >= most:
                counts = Counter([owner, *(each for each, _ in there)])
                owners = over_share(counts, most)
                unused = [state for each, state in there if each in owners and not state.users]
                if not unused:
                    raise _full(most)
                await self._end_unused(min(unused, key=lambda state: state.idle_at))

    def _live(self, owner: str | None) -> list[tuple[str, SessionState]]:
        """Return the sandboxes of this owner, or all, each with its owner."""
        return [
            (key[0], state)
            for key, state in self._states.items()
            if state.session is not None and owner in (None, key[0])
        ]

    async def _end_unused(self, state: SessionState) -> None:
        async with state.lock:
            if not state.users:
                await state.shut()

    async def _end(self, state: SessionState) -> None:
        async with state.lock:
            await state.shut()


async def _all(ends: Iterable[Awaitable[None]]) -> None:
    for end in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(end, Exception):
            _log.error("the session of a project could not be closed", exc_info=end)


def _in_use(why: str) -> errors.Conflict:
    return errors.Conflict(
        why, code="project_in_use", hint="abort the run, or wait until it has ended"
    )


def _full(limit: int) -> errors.Unavailable:
    return errors.Unavailable(
        f"agents work in {limit} projects at once, which is as many as there may be",
        code="too_many_kernels",
        hint="wait until a run has ended",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
