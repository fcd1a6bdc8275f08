"""Projects: a directory of the host that agents work in, by its owner's wish."""

from fastapi import APIRouter

from sbx.api.agent_v1.dependencies import check_whole, project_of
from sbx.api.agent_v1.models import (
    Limit,
    NewProject,
    ProjectBody,
    ProjectChange,
    ProjectList,
    project_body,
)
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.errors import Denied
from sbx.service.auth import Caller

router = APIRouter(prefix="/api/v1/projects", tags=["projects"])


@router.get("", responses=documented())
async def list_(
    caller: CallerDep, service: ServiceDep, limit: Limit = 50, cursor: str | None = None
) -> ProjectList:
    """The caller's, by id; a token has none."""
    if caller.via == "token":
        return ProjectList(items=[], next_cursor=None)
    page = await service.projects.list(caller.owner, limit=limit, cursor=cursor)
    return ProjectList(
        items=[project_body(one) for one in page.items], next_cursor=page.next_cursor
    )


@router.post("", status_code=201, responses=documented(409))
async def create(asked: NewProject, caller: CallerDep, service: ServiceDep) -> ProjectBody:
    """The directory must be there, below those that the operator gives to projects."""
    _check_may_make(caller)
    made = await service.projects.create(
        caller.owner,
        name=asked.name,
        working_directory=asked.working_directory,
        sandbox_enabled=asked.sandbox_enabled,
    )
    told = project_body(made)
    await service.recording.record(caller, "project.create", made.id, **_shown(told))
    return told


@router.get("/{project_id}", responses=documented(404))
async def get(project_id: str, caller: CallerDep, service: ServiceDep) -> ProjectBody:
    return project_body(await project_of(service, caller, project_id))


@router.patch("/{project_id}", responses=documented(404, 409))
async def change(
    project_id: str, asked: ProjectChange, caller: CallerDep, service: ServiceDep
) -> ProjectBody:
    """What goes on in it keeps what it began with."""
    await project_of(service, caller, project_id)
    changed = await service.projects.change(
        caller.owner,
        project_id,
        name=asked.name,
        working_directory=asked.working_directory,
        sandbox_enabled=asked.sandbox_enabled,
    )
    told = project_body(changed)
    await service.recording.record(caller, "project.change", project_id, **_shown(told))
    return told


@router.delete("/{project_id}", status_code=204, responses=documented(404, 409))
async def delete(project_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Forget it, with its conversations; the directory stays as it is."""
    check_whole(caller, project_id)
    await service.projects.delete(caller.owner, project_id)
    await service.recording.record(caller, "project.delete", project_id)


def _check_may_make(caller: Caller) -> None:
    if caller.via == "token":
        raise Denied(
            "a token makes no projects",
            code="forbidden",
            hint="call with a key, or over the socket",
        )


def _shown(told: ProjectBody) -> dict[str, object]:
    return told.model_dump(exclude={"id", "created_at"})
