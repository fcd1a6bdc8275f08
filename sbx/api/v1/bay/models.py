"""The bodies of Bay's /v1, and their conversion from values of the service."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from sbx.api.bodies import ForeignBody, InterruptReply
from sbx.api.encoding import text_and_images
from sbx.api.errors import iso
from sbx.protocol.events import error_to_json, run_to_json
from sbx.protocol.languages import RunLanguage
from sbx.protocol.runs import Run, Status

Id = Annotated[str, StringConstraints(max_length=300)]
Text = Annotated[str, StringConstraints(max_length=100_000)]
Tags = Annotated[str, StringConstraints(max_length=4_000)]
Whole = Annotated[int, Field(ge=-(1 << 53), le=1 << 53)]  # the range of every JSON parser
Limit = Annotated[int, Field(ge=1, le=200)]


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]  # the format of `iso`


def iso_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else iso(seconds)


# -- sandboxes -------------------------------------------------------------------------------------


class NewSandbox(ForeignBody):
    """`ttl` in seconds; null, 0 and less mean that it never expires. `policy` is our name of
    `profile`."""

    policy: Annotated[str, StringConstraints(max_length=200)] | None = None
    profile: Annotated[str, StringConstraints(max_length=200)] = "python-default"
    cargo_id: Id | None = None
    ttl: Whole | None = None
    narrower: dict[str, Any] | None = None
    env: dict[str, str] | None = None

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if self.policy is not None:
            if "profile" in self.model_fields_set and self.profile != self.policy:
                raise ValueError("policy and profile are one value, and differ here")
            self.profile = self.policy
        return self


class ContainerRuntime(BaseModel):
    name: str
    runtime_type: str
    status: Literal["running", "stopped", "failed", "unknown"]
    version: str | None
    capabilities: list[str]
    healthy: bool | None


class SandboxResponse(BaseModel):
    id: str
    status: str
    profile: str
    cargo_id: str
    capabilities: list[str]
    created_at: Time
    expires_at: Time | None
    idle_expires_at: Time | None
    containers: list[ContainerRuntime] | None


class SandboxList(BaseModel):
    items: list[SandboxResponse]
    next_cursor: str | None


class BayExtension(ForeignBody):
    extend_by: Whole


class StopBody(BaseModel):
    status: Literal["stopped"] = "stopped"


class SandboxEvent(BaseModel):
    """One event of a sandbox; `id` is its number, and the cursor to continue from."""

    id: int
    at: Time
    type: str
    cause: str | None
    details: dict[str, Any]


class EventList(BaseModel):
    items: list[SandboxEvent]
    next_cursor: str | None


# -- runs ------------------------------------------------------------------------------------------


class _Exec(ForeignBody):
    timeout: Annotated[int, Field(ge=1, le=300)] = 30
    include_code: bool = False
    description: Text | None = None
    tags: Tags | None = None
    stream: bool = False


class PythonExec(_Exec):
    code: str


class ShellExec(_Exec):
    command: str
    cwd: str | None = None


class OutputBody(BaseModel):
    text: str
    images: list[dict[str, str]]


class PythonData(BaseModel):
    """`output` is the part of a run that Bay keeps, `outputs` every MIME bundle in order."""

    execution_count: int | None
    output: OutputBody
    outputs: list[dict[str, Any]]


class PythonExecResponse(BaseModel):
    success: bool
    output: str
    error: str | None
    data: PythonData | None
    execution_id: str | None
    execution_time_ms: int | None
    code: str | None
    recorded: bool = True


class ShellExecResponse(BaseModel):
    success: bool
    output: str
    error: str | None
    exit_code: int | None
    execution_id: str | None
    execution_time_ms: int | None
    command: str | None
    recorded: bool = True


class BayInterruptReply(InterruptReply):
    status: Literal["ok"] = "ok"


def execution_id(run_id: str) -> str:
    """Return the name of a run in Bay."""
    return f"exec-{run_id.removeprefix('run-')}"


def run_id_of(execution_id: str) -> str:
    """Return the id of a run from either name."""
    return re.sub("^exec-", "run-", execution_id)


def python_body(run: Run, code: str | None) -> dict[str, Any]:
    """Return the fields of PythonExecResponse. Without validation, because this path is hot."""
    result = run_to_json(run, encoded=True)
    text, images = text_and_images(result)
    return {
        "success": run.ok,
        "output": text,
        "error": _error_text(run, result),
        "data": {
            "execution_count": run.execution_count,
            "output": {"text": text, "images": images},
            "outputs": result["outputs"],
        },
        "execution_id": execution_id(run.run_id),
        "execution_time_ms": round(run.duration_s * 1000),
        "code": code,
    }


def shell_body(run: Run, command: str | None) -> dict[str, Any]:
    """Return the fields of ShellExecResponse. As in Bay, stderr is an `error` even of a success."""
    result = run_to_json(run, encoded=True)
    return {
        "success": run.ok,
        "output": result["stdout"],
        "error": (_error_text(run, result) if run.error else None) or result["stderr"] or None,
        "exit_code": run.exit_code,
        "execution_id": execution_id(run.run_id),
        "execution_time_ms": round(run.duration_s * 1000),
        "command": command,
    }


def _error_text(run: Run, result: dict[str, Any]) -> str | None:
    if run.error is None:
        return None if run.ok else f"the run ended as {result['cause'] or result['status']}"
    error = error_to_json(run.error)
    text = error["traceback"]
    if run.status in (Status.TIMEOUT, Status.KILLED) or not text:
        text = "\n".join(part for part in (f"{error['name']}: {error['value']}", text) if part)
    if run.status is Status.TIMEOUT:
        state = "lost" if run.state_lost else "kept"
        text = f"the run timed out; the state of its kernel was {state}\n{text}"
    return str(text)


# -- files -----------------------------------------------------------------------------------------


class FileContent(BaseModel):
    content: str


class NewContent(ForeignBody):
    path: str
    content: str


class DirectoryEntry(BaseModel):
    name: str
    path: str
    is_file: bool
    is_dir: bool
    size: int | None
    modified_time: float


class DirectoryList(BaseModel):
    """`complete` is false if the directory has more entries."""

    entries: list[DirectoryEntry]
    complete: bool = True


class Uploaded(BaseModel):
    status: Literal["ok"] = "ok"
    path: str
    size: int


# -- history ---------------------------------------------------------------------------------------


class HistoryEntry(BaseModel):
    id: str
    session_id: str | None = None
    exec_type: str
    code: str
    success: bool
    execution_time_ms: int
    output: str | None
    error: str | None
    payload_ref: str | None = None
    description: str | None
    tags: str | None
    notes: str | None
    learn_enabled: bool = False
    learn_status: str | None = None
    learn_error: str | None = None
    learn_processed_at: Time | None = None
    created_at: Time
    # Bay has no contexts, so the default one is omitted.
    context: str | None = Field(default=None, exclude_if=lambda name: name is None)


class HistoryList(BaseModel):
    entries: list[HistoryEntry]
    total: int


class Annotation(ForeignBody):
    """An absent or null field stays as it is."""

    description: Text | None = None
    tags: Tags | None = None
    notes: Text | None = None


# -- cargos ----------------------------------------------------------------------------------------


class NewCargo(ForeignBody):
    size_limit_mb: Annotated[int, Field(ge=1, le=65536)] | None = 1024


class CargoResponse(BaseModel):
    id: str
    managed: bool
    managed_by_sandbox_id: str | None
    backend: str = "directory"
    size_limit_mb: int
    created_at: Time
    last_accessed_at: Time


class CargoList(BaseModel):
    items: list[CargoResponse]
    next_cursor: str | None


# -- operation -------------------------------------------------------------------------------------


class Resources(BaseModel):
    cpus: float
    memory: str


class ProfileContainer(BaseModel):
    name: str
    runtime_type: str
    capabilities: list[str]
    resources: Resources


class Profile(BaseModel):
    """Bay's fields, and `languages`: those that run on this host without an installation."""

    id: str
    image: str
    resources: Resources
    capabilities: list[str]
    idle_timeout: int
    description: str | None
    containers: list[ProfileContainer] | None
    languages: list[RunLanguage]


class ProfileList(BaseModel):
    items: list[Profile]


Task = Literal["idle_session", "expired_sandbox", "orphan_cargo", "orphan_container"]


class Collection(ForeignBody):
    """The tasks to report; all tasks run in any case."""

    tasks: list[Task] | None = None


class TaskResult(BaseModel):
    task_name: str
    cleaned_count: int
    skipped_count: int
    errors: list[str]


class Collected(BaseModel):
    results: list[TaskResult]
    total_cleaned: int
    total_errors: int
    duration_ms: int


class TaskStatus(BaseModel):
    enabled: bool


class CollectorStatus(BaseModel):
    enabled: bool
    is_running: bool
    instance_id: str
    interval_seconds: int
    tasks: dict[str, TaskStatus]
