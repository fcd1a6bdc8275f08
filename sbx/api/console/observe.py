"""Routes with which a person observes: the network of a sandbox, one run, the code under a cursor,
policies, and the directories that may be projects."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field, StringConstraints

from sbx.aio import in_thread
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import RequestBody
from sbx.api.encoding import Form, encoded_run, run_form
from sbx.api.errors import documented
from sbx.api.v1.bay.models import run_id_of
from sbx.api.v1.dependencies import PREFIX, TargetDep
from sbx.api.v1.runs import RunBody
from sbx.errors import Denied, NotFound
from sbx.policy import available, describe, fingerprint, load
from sbx.protocol.languages import LANGUAGES
from sbx.protocol.runs import Run
from sbx.runtime.run.frontend import ask_kernel
from sbx.service.history import RunRow

router = APIRouter(tags=["console"])
_QUESTION_S = 2.0
_DECISIONS_MAX = 500
_MATCHES_MAX = 500
_CODE_MAX = 1 << 20
_DIRECTORIES_MAX = 500


# -- the network of a sandbox -----------------------------------------------------------------


class NetworkDecision(BaseModel):
    """`at` in seconds of the epoch. `path` is without its query, which often has keys."""

    at: float
    allowed: bool
    rule: str
    host: str
    port: int
    method: str
    path: str | None
    address: str | None
    reason: str
    bytes_in: int
    bytes_out: int
    ended: bool


class NetworkLog(BaseModel):
    """The last decisions, the newest first. `complete` is false if there were more."""

    items: list[NetworkDecision]
    next_cursor: str | None
    complete: bool


@router.get("/v1/sandboxes/{sandbox_id}/network", responses=documented(404))
async def network(sandbox_id: str, caller: CallerDep, service: ServiceDep) -> NetworkLog:
    """List the last decisions of the proxy of an open sandbox, allowed and refused ones. Nothing
    is opened, and it does not count as a use. The audit log of the operator has all of them."""
    sandbox = service.sandboxes.index.get_whole(caller, sandbox_id, "execute")
    log = sandbox.active.network_log if sandbox.active is not None else ()
    items = [
        NetworkDecision(
            **{
                name: getattr(decision, name)
                for name in NetworkDecision.model_fields
                if name != "path"
            },
            path=decision.path.partition("?")[0] if decision.path is not None else None,
        )
        for decision in reversed(log[-_DECISIONS_MAX:])
    ]
    return NetworkLog(items=items, next_cursor=None, complete=len(log) <= _DECISIONS_MAX)


# -- one run --------------------------------------------------------------------------------------


class RecordedRun(RunBody):
    """A run with its code. Times are seconds of the epoch."""

    code: str
    kind: str
    conversation: str
    context: str
    started_at: float
    ended_at: float | None
    description: str | None
    tags: str | None
    notes: str | None


@router.get(
    "/v1/sandboxes/{sandbox_id}/runs/{run_id}",
    response_model=RecordedRun,
    responses=documented(404, 409),
)
async def run(sandbox_id: str, run_id: str, caller: CallerDep, service: ServiceDep) -> Response:
    """Return one run that has ended, with its code, by the id of the run or of its entry in the
    history. The outputs of an older run are shortened."""
    run_id = run_id_of(run_id)
    try:
        row = await service.runs.history.entry(caller, sandbox_id, run_id)
    except NotFound as error:
        if "sandbox" in error.details:
            raise
        raise NotFound(error.message, code="run_not_kept", hint=error.hint) from None
    result = row.run
    try:
        handle = await service.runs.attach(caller, sandbox_id, run_id)
        result = await handle.result() if handle.ended else result
    except NotFound:
        pass  # it ended more than a minute ago
    if result is None:
        raise NotFound(
            "this run has not ended, or the end of the service interrupted it",
            code="run_not_kept",
            hint="follow it with the topic run of /api/v1/events",
        )

    def form(result: Run) -> Form:
        return {**run_form(result), **_record(row)}

    return Response(await encoded_run(result, form), media_type="application/json")


def _record(row: RunRow) -> dict[str, Any]:
    names = RecordedRun.model_fields.keys() - RunBody.model_fields.keys()
    return {name: getattr(row, name) for name in names}


# -- the code under a cursor ----------------------------------------------------------------------


class CodeQuestion(RequestBody):
    """`cursor` counts characters."""

    code: Annotated[str, StringConstraints(max_length=_CODE_MAX)]
    cursor: Annotated[int, Field(ge=0)]


class Completion(BaseModel):
    """Each match replaces the characters from `start` to `end`."""

    matches: list[str]
    start: int
    end: int


class Inspected(BaseModel):
    """`data`: the description by media type."""

    found: bool
    data: dict[str, Any]


_CONTEXT = f"{PREFIX}/contexts/{{context}}"


@router.post(f"{_CONTEXT}/complete", responses=documented(404, 409, 504))
async def complete(context: str, question: CodeQuestion, target: TargetDep) -> Completion:
    """Complete the code at the cursor. Only a live kernel that runs nothing answers."""
    content = {"code": question.code, "cursor_pos": min(question.cursor, len(question.code))}
    async with target.use("execute", starts=False) as conversation:
        kernel = conversation.contexts.find(context)
        reply: Any = await ask_kernel(kernel, "complete_request", content, _QUESTION_S)
    size = len(question.code)
    return Completion(
        matches=reply.matches[:_MATCHES_MAX],
        start=min(reply.cursor_start, size),
        end=min(reply.cursor_end, size),
    )


@router.post(f"{_CONTEXT}/inspect", responses=documented(404, 409, 504))
async def inspect(context: str, question: CodeQuestion, target: TargetDep) -> Inspected:
    """Describe the object at the cursor. Only a live kernel that runs nothing answers."""
    content = {
        "code": question.code,
        "cursor_pos": min(question.cursor, len(question.code)),
        "detail_level": 0,
    }
    async with target.use("execute", starts=False) as conversation:
        kernel = conversation.contexts.find(context)
        reply: Any = await ask_kernel(kernel, "inspect_request", content, _QUESTION_S)
    data = {name: _decoded(value) for name, value in reply.data.items()}
    return Inspected(found=reply.is_found, data=data)


def _decoded(value: Any) -> Any:
    return json.loads(bytes(value))


# -- policies -------------------------------------------------------------------------------------


class PolicyItem(BaseModel):
    """`problem`: why it cannot be used; then the values after it are null."""

    name: str
    aliases: list[str]
    description: str
    extends: str | None
    problem: str | None
    fingerprint: str | None = None
    capabilities: list[str] | None = None
    network_mode: str | None = None
    environment: str | None = None
    languages: list[str] | None = None


class PolicyList(BaseModel):
    items: list[PolicyItem]


class PolicyDetail(BaseModel):
    """`policy`: every value. `source`: the file, for an operator. `expect`: its examples."""

    name: str
    policy: dict[str, Any]
    source: str | None
    expect: list[dict[str, Any]]


@router.get("/v1/policies", responses=documented())
async def policies(caller: CallerDep, service: ServiceDep) -> PolicyList:
    """List the policies that a sandbox can have, those of sbx first."""
    return PolicyList(items=await in_thread(lambda: _policies(service.settings.policy_dirs)))


@router.get("/v1/policies/{name}", responses=documented(404))
async def policy(name: str, caller: CallerDep, service: ServiceDep) -> PolicyDetail:
    """Return every value of a policy."""

    def read() -> PolicyDetail:
        search = service.settings.policy_dirs
        info = next(
            (each for each in available(search) if name in (each.name, *each.aliases)), None
        )
        if info is None:
            raise NotFound(f"policy {name[:80]!r} does not exist")
        loaded = load(info.name, search=search)
        return PolicyDetail(
            name=info.name,
            policy=describe(loaded),
            source=info.path.read_text() if caller.operator else None,
            expect=[each.model_dump(mode="json") for each in loaded.expect],
        )

    return await in_thread(read)


def _policies(search: Any) -> list[PolicyItem]:
    items = []
    for info in available(search):
        item = PolicyItem(
            name=info.name,
            aliases=list(info.aliases),
            description=info.description,
            extends=info.extends,
            problem=info.problem,
        )
        if info.problem is None:
            loaded = load(info.name, search=search)
            item.fingerprint = fingerprint(loaded)
            item.capabilities = list(loaded.capabilities)
            item.network_mode = loaded.network.mode
            item.environment = loaded.environment
            item.languages = ["python", *(LANGUAGES if loaded.processes else ())]
        items.append(item)
    return items


# -- directories ----------------------------------------------------------------------------------


class Directory(BaseModel):
    path: str
    name: str


class DirectoryList(BaseModel):
    """`complete` is false if there were more."""

    items: list[Directory]
    complete: bool


@router.get("/api/v1/projects/directories", responses=documented())
async def directories(
    caller: CallerDep,
    service: ServiceDep,
    below: Annotated[str | None, Query(max_length=4096)] = None,
) -> DirectoryList:
    """List the directories in one that may be a project, or those of the setting `project_dirs`."""
    if caller.via == "token":
        raise Denied("a token has no projects", code="not_granted")
    if below is None:
        items = [
            Directory(path=str(each), name=str(each)) for each in service.settings.project_dirs
        ]
        return DirectoryList(items=items, complete=True)
    names, more = await service.projects.directories_in(below, limit=_DIRECTORIES_MAX)
    items = [Directory(path=f"{below.rstrip('/')}/{name}", name=name) for name in names]
    return DirectoryList(items=items, complete=not more)
