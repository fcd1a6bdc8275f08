"""Projects: working directories of the host for agents, each with a name.

A project is a row and nothing on disk: the directory belongs to the user before, during and after.
An agent leases the sandbox of the project (sessions.py) by `using`.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from msgspec.structs import replace

from sbx import errors
from sbx.agent.tools.approval_rules import Mode
from sbx.aio import Clock, in_thread
from sbx.protocol.pages import Page
from sbx.runtime.conversation import Conversation
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service.projects.link import ProjectServerLink
from sbx.service.projects.sessions import OpenSession, ProjectSessions, SessionWalls
from sbx.store import Store
from sbx.store import projects as rows
from sbx.store.projects import ProjectRow as Project
from sbx.telemetry.audit import Audit
from sbx.workspace import quarantine
from sbx.workspace.allowed_paths import AllowedProjects
from sbx.workspace.quarantine import QuarantineItem
from sbx.workspace.quarantined_content import read

__all__ = ["OpenSession", "Project", "Projects", "mode_in"]

_log = logging.getLogger(__name__)
_LIST_MAX = 500
_NAME_MAX = 200  # characters


class Projects:
    """The projects of every owner; those of other owners are not visible. Two owners never have the
    same directory, nor one that lies in the other's. Its methods may be called concurrently from
    one event loop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Runtime,
        settings: Settings,
        server: ProjectServerLink | None = None,
        audit: Audit | None = None,
    ) -> None:
        """`server`: the process that has the directories, of a service that was started as root."""
        self._store = store
        self._clock = clock
        self._settings = settings
        self._server = server
        self._quarantines = settings.protection.quarantines
        self._refusal = partial(refusal, settings, runtime, served=server is not None)
        directories = AllowedProjects(
            settings.project_dirs, settings.own_paths, settings.project_owners
        )
        self._directories = directories
        self._sessions = ProjectSessions(runtime, clock, settings, directories, server, audit)
        if settings.project_dirs and (why := self._refusal(True)) is not None:
            _log.warning("project_dirs are of no use here: %s", why.message)

    async def create(
        self,
        owner: str,
        *,
        name: str,
        working_directory: str,
        sandbox_enabled: bool = True,
        ask_commands: bool = False,
    ) -> Project:
        """Create a project; nothing starts. `working_directory` is stored by its path without
        symlinks. `ask_commands`: each command needs an approval before it runs.

        Raise BadRequest `invalid_name` and `invalid_directory`, Denied `not_granted`,
        `directory_forbidden`, `workspace_owned_by_root`, `host_mode_not_allowed`,
        `host_mode_refused`, Conflict `directory_in_use` for a directory of another owner's project,
        and Unavailable `projects_need_rights` in a service that was started as root.
        """
        self._check(sandbox_enabled)
        row = Project(
            id=f"project-{secrets.token_hex(6)}",
            owner=owner,
            name=_checked(name),
            working_directory=await self._directory(working_directory),
            sandbox_enabled=sandbox_enabled,
            created_at=self._clock.now(),
            ask_commands=ask_commands,
        )
        await self._store.write(partial(rows.add, row=row))
        return row

    async def get(self, owner: str, project_id: str) -> Project:
        """Return a project. Raise NotFound."""
        row = await rows.get(self._store, owner, project_id)
        if row is None:
            raise errors.NotFound(f"project {project_id[:80]!r} does not exist")
        return row

    async def list(
        self, owner: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[Project]:
        limit = max(1, min(limit, _LIST_MAX))
        page = await rows.list_for_owner(self._store, owner, cursor, limit + 1)
        more = len(page) > limit
        return Page(page[:limit], page[limit - 1].id if more else None)

    async def change(
        self,
        owner: str,
        project_id: str,
        *,
        name: str | None = None,
        working_directory: str | None = None,
        sandbox_enabled: bool | None = None,
        ask_commands: bool | None = None,
    ) -> Project:
        """Change the values that are not None, from the next use on; runs in progress continue
        unchanged.

        Raise as `create`, and NotFound.
        """
        row = await self.get(owner, project_id)
        if name is not None:
            row = replace(row, name=_checked(name))
        if working_directory is not None:
            row = replace(row, working_directory=await self._directory(working_directory))
        if sandbox_enabled is not None:
            self._check(sandbox_enabled)
            row = replace(row, sandbox_enabled=sandbox_enabled)
        if ask_commands is not None:
            row = replace(row, ask_commands=ask_commands)
        if not await self._store.write(partial(rows.change, row=row)):
            raise errors.NotFound(f"project {project_id[:80]!r} does not exist")
        return row

    async def hide(self, owner: str, project_id: str) -> Project:
        """Begin the deletion of a project, and return it: nothing finds it any longer, and the next
        start completes the deletion. Raise NotFound."""
        project = await self.get(owner, project_id)
        hide = partial(
            rows.begin_deletion, owner=owner, project_id=project_id, at=self._clock.now()
        )
        if not await self._store.write(hide):
            raise errors.NotFound(f"project {project_id[:80]!r} does not exist")
        return project

    async def in_deletion(self) -> Sequence[Project]:
        """Return the projects whose deletion has begun, and has not ended."""
        return await rows.in_deletion(self._store)

    async def delete(self, project: Project) -> None:
        """Delete a hidden project, whose conversations were deleted before, with the quarantine of
        its directory. The directory stays."""
        async with self._sessions.leaving(project.id):
            await self._drop_quarantine(project)
            gone = partial(rows.delete, owner=project.owner, project_id=project.id)
            await self._store.write(gone)

    def using(
        self,
        owner: str,
        project_id: str,
        conversation_id: str,
        *,
        policy: str = "default",
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        uploads: Conversation | None = None,
    ) -> AbstractAsyncContextManager[OpenSession]:
        """Return an `async with` around one run of an agent. It yields the sandbox of its
        conversation, which is created at the first use, and closed after the idle time-out.

        `uploads`: the conversation of a persistent sandbox that has them, also in use meanwhile;
        without one the sandbox has separate ones, which end with it. `policy`, `narrower` and `env`
        are those of `Runtime.create`, for a project whose sandbox is on.

        Raise as `create` does for the present directory, NotFound, Conflict `project_in_use` while
        the conversation is used by another run in another project, and the errors of a sandbox.
        """

        async def open_project() -> Project:
            project = await self.get(owner, project_id)
            self._check(project.sandbox_enabled)
            return project

        walls = SessionWalls(policy, narrower or {}, env or {})
        return self._sessions.using((owner, conversation_id), open_project, walls, uploads)

    def commands_allowed(self, owner: str, conversation_id: str) -> bool:
        """Whether a person has allowed the commands of this conversation in its project."""
        return self._sessions.commands_allowed((owner, conversation_id))

    def in_use(self, project_id: str) -> bool:
        """Return whether an agent works in this project now."""
        return self._sessions.in_use(project_id)

    async def close_conversation(self, owner: str, conversation_id: str) -> None:
        """End all sandboxes and runs of a conversation, and forget its state."""
        await self._sessions.forget((owner, conversation_id))

    async def close_idle(self) -> None:
        """Close the sandboxes that were not used for the setting `idle_timeout`."""
        await self._sessions.close_idle()

    async def close(self) -> None:
        await self._sessions.close()

    def refusal(self, sandbox_enabled: bool) -> errors.SbxError | None:
        """Return why this service cannot have such a project; None if it can."""
        return self._refusal(sandbox_enabled)

    async def directories_in(self, below: str, *, limit: int) -> tuple[Sequence[str], bool]:
        """Return the names of the visible directories in one that may be a project, and whether
        there are more. Raise as `create`."""
        if self._server is not None:
            names = await self._server.names_in(below, limit + 1)
        else:
            names = await in_thread(self._directories.names_in, below, limit + 1)
        return names[:limit], len(names) > limit

    # -- the quarantine ---------------------------------------------------------------------------

    async def quarantined(self, owner: str) -> Sequence[QuarantineItem]:
        """Return the files of the owner's projects that programs of the host would obey, by
        directory and path. Raise Unavailable `quarantine_elsewhere`."""
        if self._server is not None:
            raise errors.Unavailable(
                "only root can read the quarantine of this service",
                code="quarantine_elsewhere",
                hint="as root: sbx quarantine list",
            )
        projects = await self.list(owner, limit=_LIST_MAX)
        directories = {each.working_directory for each in projects}
        items = await in_thread(quarantine.items, self._quarantines)
        # Other owners, and other programs of this user, have items in the same place.
        return [item for item in items if item.directory in directories]

    async def quarantined_content(self, owner: str, item_id: str, path: str = "") -> dict[str, Any]:
        """Return an item with its content. Raise as `quarantined`, NotFound, InvalidPath."""
        await self._demand_quarantined(owner, item_id)
        return await in_thread(read, self._quarantines, item_id, path)

    async def restore_quarantined(self, owner: str, item_id: str) -> str:
        """Copy an item to its place, where programs of the host obey it; return the path. Raise
        as `quarantined`, and the errors of `quarantine.restore`."""
        await self._demand_quarantined(owner, item_id)
        return await in_thread(quarantine.restore, self._quarantines, item_id)

    async def drop_quarantined(self, owner: str, item_id: str) -> None:
        """Delete an item. Raise as `quarantined`, NotFound, Conflict `quarantine_in_use`."""
        await self._demand_quarantined(owner, item_id)
        await in_thread(quarantine.drop, self._quarantines, item_id)

    async def _drop_quarantine(self, project: Project) -> None:
        """Delete the items of a directory that no other project has. Leave those that another
        program uses, and those that only root can read."""
        others = await rows.in_directory(self._store, project.working_directory)
        if self._server is not None or others != [project.id]:
            return
        for item in await in_thread(quarantine.items, self._quarantines):
            if item.directory == project.working_directory:
                try:
                    await in_thread(quarantine.drop, self._quarantines, item.id)
                except errors.SbxError as error:
                    _log.warning("the quarantine keeps %s: %s", item.id, error.message)

    async def _demand_quarantined(self, owner: str, item_id: str) -> None:
        if item_id not in {item.id for item in await self.quarantined(owner)}:
            raise errors.NotFound(
                f"the quarantine of your projects has no item {item_id[:80]!r}",
                code="item_not_found",
            )

    def _check(self, sandbox_enabled: bool) -> None:
        if (why := self._refusal(sandbox_enabled)) is not None:
            raise why

    async def _directory(self, path: str) -> str:
        if self._server is not None:
            return str(await self._server.resolve(path))
        return str(await in_thread(self._directories.resolve, path))


def mode_in(project: Project) -> Mode:
    """Return which calls of an agent in this project need an approval."""
    if project.ask_commands:  # also with the sandbox off
        return "ask_commands"
    return "project" if project.sandbox_enabled else "free"


def refusal(
    settings: Settings, runtime: Runtime, sandbox_enabled: bool, *, served: bool = False
) -> errors.SbxError | None:
    """Return why this service cannot have such a project; None if it can. `served`: a project
    server has the directories."""
    if runtime.confined and not served:
        return errors.Unavailable(
            "a service that was started as root has projects only of owners that are named to it",
            code="projects_need_rights",
            hint="name the owners of the directories in the setting project_owners"
            " (SBX_PROJECT_OWNERS), or serve as the user whose directories they are",
        )
    if sandbox_enabled:
        return None
    if not settings.allow_host_mode:
        return errors.Denied(
            "the sandbox of a project cannot be turned off here",
            code="host_mode_not_allowed",
            hint="the operator allows it by the setting allow_host_mode (SBX_ALLOW_HOST_MODE)",
        )
    if runtime.confined:
        return errors.Denied(
            "a service that was started as root has given up the rights to work on the host",
            code="host_mode_refused",
            hint="turn the sandbox of the project on, or serve as the user whose directory it is",
        )
    if runtime.as_root and 0 not in settings.project_owners:
        return errors.Denied(
            "without a sandbox, a model would act on the host as root",
            code="host_mode_refused",
            hint="run sbx as another user, or name root in the setting project_owners"
            " (SBX_PROJECT_OWNERS) for directories of root",
        )
    return None


def _checked(name: str) -> str:
    if 1 <= len(name.strip()) <= _NAME_MAX and name.isprintable():
        return name
    raise errors.BadRequest(
        f"the name of a project is printable text of 1 to {_NAME_MAX} characters",
        code="invalid_name",
        details={"field": "name"},
    )
