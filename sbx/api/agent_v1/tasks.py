"""Tasks from templates of the operator, for one input or for many at once."""

from collections.abc import Mapping, Sequence
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
from sbx.service.agents import Agents, profile_of
from sbx.service.caller import Caller
from sbx.service.service import Service
from sbx.service.sessions import Sessions
from sbx.service.task_place import TaskPlace
from sbx.service.tasks import TaskInputRow, TaskRow, no_task

router = APIRouter(prefix="/api/v1/tasks", tags=["agent"])
AtOnce = Annotated[int, Field(ge=1, le=16)]
Values = dict[str, Annotated[str, Field(max_length=100_000)]]


class NewTask(RequestBody):
    """`template`: its name. `parameters` count for each of `inputs`, which by default is one input
    without other values. `agent_id`: null for that of the template. `at_once`: the number of
    inputs, or of their steps, at a time. `cache`: use earlier results, if the template permits."""

    template: Name
    user_id: Name
    agent_id: Name | None = None
    parameters: Values = Field(default_factory=dict)
    inputs: list[Values] = Field(default=[{}], min_length=1, max_length=INPUTS_MAX)
    at_once: AtOnce = 4
    cache: bool = True


class ResumedTask(RequestBody):
    at_once: AtOnce = 4


class TaskInput(BaseModel):
    """`state`: `waiting`, `running`, `interrupted`, `skipped` (a step that it needs failed), or the
    reason of the end of its run. The conversation has its messages and its files. `step`: the name
    of the step; empty in a task without steps. `cached`: the result of an earlier task, with its
    conversation."""

    number: int
    step: str
    parameters: dict[str, str]
    conversation_id: str
    state: str
    run_id: str | None
    answer: str | None
    error: Json | None
    tokens: int
    cached: bool


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
    steps: list[str] = []
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
            steps=[step.name for step in each.step],
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
    place = await _place(service, agents, sessions, caller, row, cache=new.cache)
    inputs = await agents.tasks.start(row, rows, place, new.at_once)
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


@router.post("/{task_id}/resume", status_code=202, responses=documented(404, 409, 429))
async def resume(
    task_id: str,
    again: ResumedTask,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
) -> TaskBody:
    """Begin the inputs and steps of an ended task that are not done, each in a new conversation.
    409 if the task is not complete, if nothing remains, or if the template has other steps now."""
    agents.models.settings  # noqa: B018  # it raises before anything changes
    row, inputs = await _find(agents, caller, task_id, scope="execute")
    await agents.tasks.check_resume(row, inputs)  # before a session is created
    place = await _place(service, agents, sessions, caller, row, cache=False)
    await agents.tasks.resume(row, place, again.at_once)
    await service.recording.record(caller, "task.resume", task_id)
    return TaskBody.of(*await _find(agents, caller, task_id))


async def _find(
    agents: AgentsDep, caller: Caller, task_id: str, scope: str | None = None
) -> tuple[TaskRow, Sequence[TaskInputRow]]:
    row, inputs = await agents.tasks.get(caller.owner, task_id)
    may = caller.may(scope) if scope else caller.may("execute") or caller.may("files:read")
    if not may or not caller.sees(row.user_id, row.agent_id, row.id):
        raise no_task(task_id)
    return row, inputs


async def _place(
    service: Service,
    agents: Agents,
    sessions: Sessions,
    caller: Caller,
    row: TaskRow,
    *,
    cache: bool,
) -> TaskPlace:
    """Return the session of a task, created if need be. Raise as `session_of`."""
    user_id, agent_id = row.user_id, row.agent_id
    first = NewChat(user_id=user_id, agent_id=agent_id, message="-")
    session = await session_of(sessions, caller, first, row.id)
    stored, _ = await profile_of(service, caller, user_id, agent_id, row.id)
    facts = [
        agents.models.settings.model_name,
        None if stored is None else stored.profile.model_dump(mode="json"),
        *(session.policy_name, session.narrower, session.env),
    ]

    async def begin_step(name: str, filled: FilledTask, max_steps: int | None) -> ChatRun:
        chat = NewChat(
            user_id=user_id,
            agent_id=agent_id,
            message=filled.prompt,
            completion_check=filled.check,
            max_steps=max_steps,
        )
        return await begin(service, agents, caller, session, chat, name)

    # Files of the template only: a parameter is a text of the caller, and no path of this host.
    return TaskPlace(service.sandboxes, caller, session.id, begin_step, facts if cache else None)
