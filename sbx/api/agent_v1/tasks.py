"""Tasks from templates of the operator, for one input or for many at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from sbx.agent.chats import ChatRun
from sbx.agent.task import INPUTS_MAX, FilledTask, TaskParameter
from sbx.api.agent_v1.chat import begin
from sbx.api.agent_v1.dependencies import AgentsDep, check_lists, session_of
from sbx.api.agent_v1.models import Aborted, Json, Limit, Name, NewChat
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import BadRequest, Conflict, SbxError
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.service import Service
from sbx.service.tasks import TaskInputRow, TaskRow, no_task

router = APIRouter(prefix="/api/v1/tasks", tags=["agent"])
Values = dict[str, Annotated[str, Field(max_length=100_000)]]


class NewTask(RequestBody):
    """`template`: its name. `parameters` count for each of `inputs`, which by default is one input
    without other values. `agent_id`: null for that of the template. `at_once`: the number of
    inputs at a time."""

    template: Name
    user_id: Name
    agent_id: Name | None = None
    parameters: Values = Field(default_factory=dict)
    inputs: list[Values] = Field(default=[{}], min_length=1, max_length=INPUTS_MAX)
    at_once: Annotated[int, Field(ge=1, le=16)] = 4


class TaskInput(BaseModel):
    """`state`: `waiting`, `running`, `interrupted`, or the reason of the end of its run. The
    conversation has its messages and its files."""

    number: int
    parameters: dict[str, str]
    conversation_id: str
    state: str
    run_id: str | None
    answer: str | None
    error: Json | None
    tokens: int


class TaskSummary(BaseModel):
    """`ended_at` is null while inputs wait or run."""

    task_id: str
    template: str
    user_id: str
    agent_id: str
    created_at: float
    ended_at: float | None

    @staticmethod
    def fields_of(row: TaskRow) -> dict[str, Any]:
        names = TaskSummary.model_fields.keys() - {"task_id"}
        return {"task_id": row.id, **{name: getattr(row, name) for name in names}}


class TaskBody(TaskSummary):
    inputs: list[TaskInput]

    @classmethod
    def of(cls, row: TaskRow, inputs: Sequence[TaskInputRow]) -> "TaskBody":
        bodies = [
            TaskInput(**{name: getattr(each, name) for name in TaskInput.model_fields})
            for each in inputs
        ]
        return cls(**cls.fields_of(row), inputs=bodies)


class TaskList(BaseModel):
    items: list[TaskSummary]


class TaskTemplateBody(BaseModel):
    """A file that is not valid has a `problem`, and nothing else."""

    name: str
    description: str = ""
    agent: str | None = None
    parameters: Mapping[str, TaskParameter] = Field(default_factory=dict)
    problem: str | None = None


class TaskTemplateList(BaseModel):
    items: list[TaskTemplateBody]


@router.get("/templates", responses=documented())
async def templates(_: CallerDep, agents: AgentsDep) -> TaskTemplateList:
    """List the templates of the operator, with their parameters."""
    items = [
        TaskTemplateBody(name=name, problem=each.message)
        if isinstance(each, SbxError)
        else TaskTemplateBody(
            name=name,
            description=each.description,
            agent=each.agent,
            parameters=each.parameters,
        )
        for name, each in (await agents.tasks.templates()).items()
    ]
    return TaskTemplateList(items=items)


@router.post("", status_code=202, responses=documented(404, 429))
async def start(
    new: NewTask,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> TaskBody:
    """Start a task. Each input has its own conversation, in the session of the user and the
    agent. All inputs are checked before the first begins; one that fails is a result."""
    agents.models.settings  # noqa: B018  # it raises before anything is created
    template = await agents.tasks.template(new.template)
    agent_id = new.agent_id or template.agent
    if agent_id is None:
        raise BadRequest(
            "the template names no agent", code="invalid_parameters", details={"field": "agent_id"}
        )
    if template.agent not in (None, agent_id):
        raise Conflict(f"the template is for the agent {template.agent}", code="another_agent")
    row = agents.tasks.new_row(caller.owner, new.template, new.user_id, agent_id)
    rows = [new.parameters | values for values in new.inputs]
    await agents.tasks.check(row, rows)  # before a session is created
    first = NewChat(user_id=new.user_id, agent_id=agent_id, message="-")
    session = await session_of(sessions, caller, first, row.id)

    async def begin_input(name: str, filled: FilledTask) -> ChatRun:
        # Files of the template only: a parameter is a text of the caller, and no path of this host.
        await _upload(service, caller, session, name, template.files)
        chat = NewChat(
            user_id=new.user_id,
            agent_id=agent_id,
            message=filled.prompt,
            completion_check=filled.check,
            max_steps=template.max_steps,
        )
        return await begin(service, agents, caller, session, chat, name)

    inputs = await agents.tasks.start(row, rows, begin_input, new.at_once)
    await service.recording.record(
        caller, "task.start", row.id, template=new.template, inputs=len(inputs)
    )
    return TaskBody.of(row, inputs)


@router.get("", responses=documented())
async def list_(
    caller: CallerDep, agents: AgentsDep, limit: Annotated[Limit, Query()] = 50
) -> TaskList:
    """List the tasks of the caller, the newest first."""
    check_lists(caller)
    rows = await agents.tasks.list(caller.owner, limit)
    visible = [row for row in rows if caller.sees(row.user_id, row.agent_id, row.id)]
    return TaskList(items=[TaskSummary(**TaskSummary.fields_of(row)) for row in visible])


@router.get("/{task_id}", responses=documented(404))
async def get(task_id: str, caller: CallerDep, agents: AgentsDep) -> TaskBody:
    """Return a task with the state and the answer of each input."""
    return TaskBody.of(*await _find(agents, caller, task_id))


@router.post("/{task_id}/abort", responses=documented(404))
async def abort(task_id: str, caller: CallerDep, agents: AgentsDep, service: ServiceDep) -> Aborted:
    """End a task: its runs are aborted, and the inputs that wait do not begin."""
    await _find(agents, caller, task_id, scope="execute")
    aborted = await agents.tasks.abort(task_id)
    if aborted:
        await service.recording.record(caller, "task.abort", task_id)
    return Aborted(aborted=aborted)


async def _find(
    agents: AgentsDep, caller: Caller, task_id: str, scope: str | None = None
) -> tuple[TaskRow, Sequence[TaskInputRow]]:
    row, inputs = await agents.tasks.get(caller.owner, task_id)
    may = caller.may(scope) if scope else caller.may("execute") or caller.may("files:read")
    if not may or not caller.sees(row.user_id, row.agent_id, row.id):
        raise no_task(task_id)
    return row, inputs


async def _upload(
    service: Service, caller: Caller, session: SandboxView, name: str, files: Sequence[Path]
) -> None:
    if files:
        leased = service.sandboxes.using(caller, session.id, scope="execute", conversation=name)
        async with leased as use:
            for path in files:
                await use.conversation(name).uploads.put(path)
