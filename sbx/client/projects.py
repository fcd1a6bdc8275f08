"""Projects of a service: directories of its host that agents work in."""

from sbx.client import records
from sbx.client.chat import Requests
from sbx.client.http import target
from sbx.client.records import ProjectInfo
from sbx.protocol.pages import Page

_PATH = target("api", "v1", "projects")


class ProjectCalls:
    """A part of Client."""

    async def projects(
        self: Requests, *, limit: int = 50, cursor: str | None = None
    ) -> Page[ProjectInfo]:
        """Your projects, by id."""
        told = await self.request("GET", _PATH, params={"limit": limit, "cursor": cursor})
        return records.page(told, records.project)

    async def create_project(
        self: Requests, name: str, working_directory: str, *, sandbox_enabled: bool = True
    ) -> ProjectInfo:
        """Raises BadRequest, and Denied where the operator does not allow this directory."""
        body = {
            "name": name,
            "working_directory": working_directory,
            "sandbox_enabled": sandbox_enabled,
        }
        return records.project(await self.request("POST", _PATH, json=body))

    async def project(self: Requests, project_id: str) -> ProjectInfo:
        """Raises NotFound."""
        return records.project(await self.request("GET", f"{_PATH}{target(project_id)}"))

    async def change_project(
        self: Requests,
        project_id: str,
        *,
        name: str | None = None,
        working_directory: str | None = None,
        sandbox_enabled: bool | None = None,
    ) -> ProjectInfo:
        """What is None stays as it is."""
        asked = {
            "name": name,
            "working_directory": working_directory,
            "sandbox_enabled": sandbox_enabled,
        }
        body = {key: value for key, value in asked.items() if value is not None}
        return records.project(
            await self.request("PATCH", f"{_PATH}{target(project_id)}", json=body)
        )

    async def delete_project(self: Requests, project_id: str) -> None:
        """Forget it, with its conversations; the directory stays as it is."""
        await self.request("DELETE", f"{_PATH}{target(project_id)}")
