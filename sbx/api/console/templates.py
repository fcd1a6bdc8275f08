"""Templates of prompts, with which a person starts a task."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, StringConstraints

from sbx.api.agent_v1.dependencies import project_of
from sbx.api.auth import OwnerDep, ServiceDep
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented
from sbx.service.caller import Caller
from sbx.service.prompt_templates import TemplateRow
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/templates", tags=["agent"])
_VARIABLES_MAX = 20
Title = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True)]
Text = Annotated[str, StringConstraints(max_length=2000)]
Prompt = Annotated[str, StringConstraints(min_length=1, max_length=20_000)]


class Variable(RequestBody):
    """`{{name}}` in the prompt, with a label and a default for the person."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
    label: Annotated[str, StringConstraints(max_length=200)] = ""
    default: Annotated[str, StringConstraints(max_length=2000)] = ""


Variables = Annotated[list[Variable], Field(max_length=_VARIABLES_MAX)]
Steps = Annotated[int, Field(ge=1, le=1000)]


class NewTemplate(RequestBody):
    name: Title
    description: Text = ""
    prompt: Prompt
    variables: Variables = Field(default_factory=list)
    project_id: str | None = None
    max_steps: Steps | None = None


class TemplateChange(RequestBody):
    """An absent field stays as it is."""

    name: Title | None = None
    description: Text | None = None
    prompt: Prompt | None = None
    variables: Variables | None = None
    project_id: str | None = None
    max_steps: Steps | None = None


class TemplateBody(BaseModel):
    id: str
    name: str
    description: str
    prompt: str
    variables: Sequence[Variable]
    project_id: str | None
    max_steps: int | None
    built_in: bool

    @classmethod
    def of(cls, row: TemplateRow) -> "TemplateBody":
        names = cls.model_fields.keys() - {"built_in", "variables"}
        return cls(
            **{name: getattr(row, name) for name in names},
            variables=[Variable(**each) for each in row.variables],
            built_in=not row.owner,
        )


class TemplateList(BaseModel):
    items: list[TemplateBody]


@router.get("", responses=documented())
async def list_(caller: OwnerDep, service: ServiceDep) -> TemplateList:
    """List the built-in templates and those of the caller. A token has none."""
    rows = await service.templates.list_for(caller.owner)
    return TemplateList(items=[TemplateBody.of(row) for row in rows])


@router.post("", status_code=201, responses=documented())
async def create(new: NewTemplate, caller: OwnerDep, service: ServiceDep) -> TemplateBody:
    fields = await _checked(service, caller, new.model_dump())
    return TemplateBody.of(await service.templates.add(caller.owner, fields))


@router.get("/{template_id}", responses=documented(404))
async def get(template_id: str, caller: OwnerDep, service: ServiceDep) -> TemplateBody:
    return TemplateBody.of(await service.templates.get(caller.owner, template_id))


@router.patch("/{template_id}", responses=documented(404, 409))
async def change(
    template_id: str, change: TemplateChange, caller: OwnerDep, service: ServiceDep
) -> TemplateBody:
    fields = await _checked(service, caller, change.model_dump(exclude_unset=True))
    return TemplateBody.of(await service.templates.change(caller.owner, template_id, fields))


@router.delete("/{template_id}", status_code=204, responses=documented(409))
async def delete(template_id: str, caller: OwnerDep, service: ServiceDep) -> None:
    await service.templates.delete(caller.owner, template_id)


async def _checked(service: Service, caller: Caller, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields. Raise NotFound for a project that the caller does not have."""
    if (project_id := fields.get("project_id")) is not None:
        await project_of(service, caller, project_id)
    optional = ("project_id", "max_steps")
    return {name: value for name, value in fields.items() if value is not None or name in optional}
