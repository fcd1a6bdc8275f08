"""The quarantine of the projects of an owner: files that programs of the host would obey."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sbx.aio import in_thread
from sbx.errors import NotFound, Unavailable
from sbx.service.projects.projects import Projects
from sbx.workspace import quarantine
from sbx.workspace.quarantine import QuarantineItem
from sbx.workspace.quarantined_content import read

_PROJECTS_MAX = 500


class ProjectQuarantine:
    """The items in the directories of projects. Other owners, and other programs of the same
    user, have theirs in the same store: they are not visible here."""

    def __init__(self, store: Path, projects: Projects, *, elsewhere: bool) -> None:
        """`elsewhere`: a project server has the directories, so this process has no items."""
        self._store = store
        self._projects = projects
        self._elsewhere = elsewhere

    async def items(self, owner: str) -> Sequence[QuarantineItem]:
        """Return the items of an owner, by directory and path. Raise Unavailable
        `quarantine_elsewhere`."""
        if self._elsewhere:
            raise Unavailable(
                "only root can read the quarantine of this service",
                code="quarantine_elsewhere",
                hint="as root: sbx quarantine list",
            )
        projects = await self._projects.list(owner, limit=_PROJECTS_MAX)
        directories = {each.working_directory for each in projects}
        listed = await in_thread(quarantine.items, self._store)
        return [item for item in listed if item.directory in directories]

    async def content(self, owner: str, item_id: str, path: str = "") -> dict[str, Any]:
        """Return an item with its content. Raise as `items`, NotFound, InvalidPath."""
        await self._demand(owner, item_id)
        return await in_thread(read, self._store, item_id, path)

    async def restore(self, owner: str, item_id: str) -> str:
        """Copy an item to its place, where programs of the host obey it; return the path. Raise
        as `items`, and the errors of sbx.workspace.quarantine.restore."""
        await self._demand(owner, item_id)
        return await in_thread(quarantine.restore, self._store, item_id)

    async def drop(self, owner: str, item_id: str) -> None:
        """Delete an item. Raise as `items`, NotFound, Conflict `quarantine_in_use`."""
        await self._demand(owner, item_id)
        await in_thread(partial(quarantine.drop, self._store, item_id))

    async def _demand(self, owner: str, item_id: str) -> None:
        if item_id not in {item.id for item in await self.items(owner)}:
            raise NotFound(
                f"the quarantine of your projects has no item {item_id[:80]!r}",
                code="item_not_found",
            )
