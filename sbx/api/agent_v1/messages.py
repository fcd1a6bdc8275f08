"""The messages of a conversation: list, export, import; and the runs of its agent."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from sbx.agent.export import export_history, import_history
from sbx.agent.progress import RunProgress
from sbx.api.agent_v1.dependencies import (
    AgentsDep,
    ChatDep,
    Named,
    check_lists,
    check_reads,
    check_runs,
    session_of,
)
from sbx.api.agent_v1.models import Json, Limit, MessageBody, MessageList, NewChat
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import BadRequest, Conflict
from sbx.service.agents import AgentRunRow, MessageRow, undoing
from sbx.service.ids import check_id

router = APIRouter(prefix="/api/v1/conversations/{conversation_id}", tags=["agent"])
of_all = APIRouter(prefix="/api/v1/runs", tags=["agent"])
_SEQ_MAX = (1 << 63) - 1  # of SQLite
Since = Annotated[float, Query(ge=0, allow_inf_nan=False)]
Cursor = Annotated[str | None, Query(max_length=40)]


class AgentRunBody(BaseModel):
    """`interrupted`: the service ended during the run, so there is no `reason`."""

    run_id: str
    status: Literal["running", "ended", "interrupted"]
    model: str
    max_steps: int
    reason: str | None
    usage: dict[str, int] | None
    error: dict[str, Any] | None
    started_at: float
    ended_at: float | None


class PendingCall(BaseModel):
    """`expires_at`: the call waits for an approval until then, in seconds of the epoch.
    `approval_required`: whether it waits for one now; null if it is tried on a copy of the project,
    and its changes are not known yet."""

    tool_call_id: str
    tool_name: str
    tool_args: dict[str, Any]
    approval_required: bool | None
    expires_at: float | None


class PlanStep(BaseModel):
    text: str
    state: str


class AgentRunStatus(AgentRunBody):
    """`step` is the current one, from 1, and null if the run is not active. `usage` is that of the
    steps so far, and `cost` its price. `plan` is that of the tool `plan`. The last three stay after
    the end of the run."""

    step: int | None
    pending_calls: list[PendingCall]
    plan: list[PlanStep] = Field(default_factory=list)
    cost: float | None = None


class ActiveAgentRun(BaseModel):
    """A run that is active now. `cost` is that of `usage` in the currency of the prices of its
    profile; `plan` is that of the tool `plan`."""

    run_id: str
    conversation_id: str
    user_id: str
    agent_id: str
    agent_version: int | None
    project_id: str | None
    title: str | None
    model: str
    started_at: float
    step: int
    max_steps: int
    plan: list[PlanStep]
    pending_calls: list[PendingCall]
    usage: dict[str, int]
    cost: float | None


class ActiveRuns(BaseModel):
    items: list[ActiveAgentRun]


class ToolReport(BaseModel):
    name: str
    calls: int
    failed: int
    seconds: float


class StepReport(BaseModel):
    """The means of all runs that had this step."""

    step: int
    runs: int
    seconds: float
    input_tokens: int
    output_tokens: int


class RunReport(BaseModel):
    """`reasons`: how the runs ended; `failures`: failed calls of tools by their code."""

    runs: int
    seconds: float
    usage: dict[str, int]
    cost: float
    reasons: dict[str, int]
    tools: list[ToolReport]
    failures: dict[str, int]
    steps: list[StepReport]


class AgentRunList(BaseModel):
    items: list[AgentRunBody]
    next_cursor: str | None


class Imported(BaseModel):
    messages: int


@router.get("/messages", response_model_exclude_unset=True, responses=documented(404))
async def messages(
    row: ChatDep, caller: CallerDep, agents: AgentsDep, limit: Limit = 50, cursor: Cursor = None
) -> MessageList:
    """List the messages, the oldest first."""
    check_reads(caller, row.conversation_id)
    rows, more = await agents.messages.page(row.id, after=number_of(cursor), limit=limit)
    items = [_message(each) for each in rows]
    return MessageList(items=items, next_cursor=str(items[-1].seq) if more and items else None)


@router.get("/runs", responses=documented(404))
async def runs(
    row: ChatDep, caller: CallerDep, agents: AgentsDep, limit: Limit = 50, cursor: Cursor = None
) -> AgentRunList:
    """List the runs of its agent, the newest first."""
    check_reads(caller, row.conversation_id)
    before = number_of(cursor) or None
    rows = await agents.runs(row, limit=limit, before=before)
    more = len(rows) == limit and rows[-1].seq > 1
    return AgentRunList(
        items=[_run(each) for each in rows], next_cursor=str(rows[-1].seq) if more else None
    )


@router.get("/runs/{run_id}", responses=documented(404))
async def run(run_id: str, row: ChatDep, caller: CallerDep, agents: AgentsDep) -> AgentRunStatus:
    """Show one run of its agent: while it is active with its step, its calls and its usage."""
    check_reads(caller, row.conversation_id)
    record, progress = await agents.run(row, run_id)
    body = _run(record).model_dump()
    if progress is None:
        report = record.report or {}
        kept = {"plan": report.get("plan", []), "cost": report.get("cost")}
        return AgentRunStatus(**body, **kept, step=None, pending_calls=[])
    return AgentRunStatus(**body | _progress(progress))


def _progress(progress: RunProgress) -> Json:
    fields = PendingCall.model_fields
    calls = [{name: getattr(call, name) for name in fields} for call in progress.calls.values()]
    return {
        "usage": dict(progress.usage),
        "step": progress.step,
        "pending_calls": calls,
        "plan": progress.plan,
        "cost": progress.cost,
    }


@of_all.get("", responses=documented())
async def active_runs(caller: CallerDep, agents: AgentsDep) -> ActiveRuns:
    """List the runs that are active now, the oldest first."""
    check_lists(caller)
    items = [
        ActiveAgentRun(
            run_id=run.run_id,
            conversation_id=request.conversation_id,
            user_id=request.chat.user_id,
            agent_id=request.chat.agent_id,
            agent_version=request.profile_version,
            project_id=request.chat.project_id,
            title=request.chat.title,
            model=run.progress.model,
            started_at=run.started_at,
            max_steps=request.max_steps,
            **_progress(run.progress),
        )
        for run, request in agents.active_runs(caller)
    ]
    return ActiveRuns(items=items)


@of_all.get("/report", responses=documented())
async def report(
    caller: CallerDep, agents: AgentsDep, since: Since = 0.0, agent_id: Named = None
) -> RunReport:
    """Report on the last 10,000 runs that have ended. `since`: in seconds of the epoch."""
    check_lists(caller)
    return RunReport(**await agents.report(caller, since=since, agent_id=agent_id))


@router.get(
    "/export",
    response_class=Response,
    responses={**documented(404), 200: {"content": {"application/json": {}}}},
)
async def export(row: ChatDep, caller: CallerDep, agents: AgentsDep) -> Response:
    """Export the conversation as one JSON document for `import`."""
    check_reads(caller, row.conversation_id)
    text = await export_history(agents.history(row))
    return Response(text.encode("utf-8", "backslashreplace"), media_type="application/json")


@router.post(
    "/import",
    responses=documented(404, 409),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    },
)
async def import_(
    conversation_id: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    agents: AgentsDep,
    sessions: SessionsDep,
    user_id: Named = None,
    agent_id: Named = None,
) -> Imported:
    """Import an exported conversation into an empty one. `user_id` and `agent_id` create it if need
    be."""
    name = check_id("conversation_id", conversation_id)
    if user_id is None or agent_id is None:
        row = await agents.find_chat(caller, name, user_id=user_id, agent_id=agent_id)
    else:
        new = NewChat(user_id=user_id, agent_id=agent_id, resume=True)
        session = await session_of(sessions, caller, new, name)
        row, _ = await agents.ensure_chat(caller, session, name)
    async with undoing(service, row):
        check_runs(caller, name)
        text = (await request.body()).decode("utf-8", "replace")
        if agents.chats.running(row.key) is not None:
            raise Conflict("an agent runs in this conversation", code="run_in_progress")
        count = await import_history(agents.history(row), text)
    await service.recording.record(caller, "chat.import", name, messages=count)
    return Imported(messages=count)


def number_of(cursor: str | None) -> int:
    """Return the number in a cursor: that of the last row of the page before. Raise BadRequest."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdecimal()) or int(cursor) > _SEQ_MAX:
        raise BadRequest("the cursor is invalid", details={"field": "cursor"})
    return int(cursor)


def _message(row: MessageRow) -> MessageBody:
    fields = {**row.message, "seq": row.seq, "created_at": row.created_at}
    return MessageBody(**fields if row.covers is None else {**fields, "covers": row.covers})


def _run(row: AgentRunRow) -> AgentRunBody:
    return AgentRunBody(
        run_id=row.id,
        status=row.status,
        model=row.model,
        max_steps=row.max_steps,
        reason=row.reason,
        usage=dict(row.usage) if row.usage is not None else None,
        error=dict(row.error) if row.error is not None else None,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )
