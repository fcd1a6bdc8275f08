"""Projects: directories of the host that agents work in, at the request of their owner."""

from fastapi import APIRouter

from sbx.api.agent_v1.dependencies import check_projects, project_of
from sbx.api.agent_v1.models import (
    Limit,
    NewProject,
    ProjectBody,
    ProjectChange,
    ProjectList,
)
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.errors import Denied
from sbx.service.caller import Caller
from sbx.service.notices import Notice
from sbx.service.projects.projects import Project
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/projects", tags=["projects"])


@router.get("", responses=documented())
async def list_(
    caller: CallerDep, service: ServiceDep, limit: Limit = 50, cursor: str | None = None
) -> ProjectList:
    """List the projects of the caller, by id. A token has none."""
    if caller.via == "token":
        return ProjectList(items=[], next_cursor=None)
    page = await service.projects.list(caller.owner, limit=limit, cursor=cursor)
    return ProjectList(
        items=[_body(service, project) for project in page.items], next_cursor=page.next_cursor
    )


@router.post("", status_code=201, responses=documented(409))
async def create(new: NewProject, caller: CallerDep, service: ServiceDep) -> ProjectBody:
    """Create a project. Its directory must exist below one of the setting `project_dirs`."""
    if caller.via == "token":
        raise Denied(
            "a token makes no projects",
            code="forbidden",
            hint="call with a key, or over the socket",
        )
    project = await service.projects.create(
        caller.owner,
        name=new.name,
        working_directory=new.working_directory,
        sandbox_enabled=new.sandbox_enabled,
        ask_commands=new.ask_commands,
    )
    body = _body(service, project)
    await service.recording.record(caller, "project.create", project.id, **_details(body))
    _publish(service, caller, project.id)
    return body


@router.get("/{project_id}", responses=documented(404))
async def get(project_id: str, caller: CallerDep, service: ServiceDep) -> ProjectBody:
    return _body(service, await project_of(service, caller, project_id))


@router.patch("/{project_id}", responses=documented(404, 409))
async def change_project(
    project_id: str, change: ProjectChange, caller: CallerDep, service: ServiceDep
) -> ProjectBody:
    """Change a project. Current sessions keep the old settings."""
    await project_of(service, caller, project_id)
    project = await service.projects.change(
        caller.owner,
        project_id,
        name=change.name,
        working_directory=change.working_directory,
        sandbox_enabled=change.sandbox_enabled,
        ask_commands=change.ask_commands,
    )
    body = _body(service, project)
    await service.recording.record(caller, "project.change", project_id, **_details(body))
    _publish(service, caller, project_id)
    return body


@router.delete("/{project_id}", status_code=204, responses=documented(404, 409))
async def delete(project_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """End the work of its agents, and delete a project with its conversations and their files. The
    directory stays as it is."""
    check_projects(caller, project_id)
    await service.deletions.project(caller.owner, project_id)
    await service.recording.record(caller, "project.delete", project_id)
    _publish(service, caller, project_id, "project.deleted")


def _body(service: Service, project: Project) -> ProjectBody:
    names = ProjectBody.model_fields.keys() - {"in_use"}
    fields = {name: getattr(project, name) for name in names}
    return ProjectBody(**fields, in_use=service.projects.in_use(project.id))


def _publish(
    service: Service, caller: Caller, project_id: str, kind: str = "project.changed"
) -> None:
    body = {"type": kind, "project_id": project_id}
    service.notices.publish(Notice(caller.owner, body, (), of_project=True))


def _details(body: ProjectBody) -> dict[str, object]:
    names = {"name", "working_directory", "sandbox_enabled", "ask_commands"}
    return body.model_dump(include=names)
