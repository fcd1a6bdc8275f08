"""The bodies of the agent's routes, field by field. Times are seconds of the epoch."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from sbx.api.bodies import RequestBody
from sbx.protocol.approvals import Remember
from sbx.protocol.changes import FILES_MAX, PREFIXES_MAX, ChangeBudget

Limit = Annotated[int, Field(ge=1, le=200)]
Name = Annotated[str, StringConstraints(max_length=400)]  # ids are judged by the runtime: 400
Message = Annotated[str, StringConstraints(min_length=1, max_length=1 << 20)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Command = Annotated[str, StringConstraints(max_length=10_000)]
Path = Annotated[str, StringConstraints(max_length=4096)]
Json = dict[str, Any]


# -- chat ------------------------------------------------------------------------------------------


class NewChat(RequestBody):
    """`conversation_id`: null for a new one, which is part of every event. `model`: a name at the
    configured provider; `max_steps`: null for the configured number. `resume`, without a message:
    continue where an earlier run broke off. `completion_check`: a command in the sandbox; its exit
    code 0 ends the run, otherwise the agent gets its output and continues. `detach`: reply at once,
    and leave the events to those who follow the run."""

    user_id: Name
    agent_id: Name
    business_domain_id: Name | None = None
    conversation_id: Name | None = None
    sandbox_session_id: Name | None = None
    project_id: Name | None = None
    message: Message | None = None
    resume: bool = False
    max_steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    model: ModelName | None = None
    completion_check: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = (
        None
    )
    detach: bool = False

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.resume != (self.message is None):
            raise ValueError("message is missing" if not self.resume else "resume has no message")
        return self


class StartedChat(BaseModel):
    """A run whose events can be followed."""

    run_id: str
    conversation_id: str
    session_id: str | None
    sandbox_id: str


class BudgetBody(RequestBody):
    """The changes of one call that need no approval: at most `files` paths below a directory of
    the project ("." is all of it), and removals only with `deletions`."""

    below: Path
    files: Annotated[int, Field(strict=True, ge=1, le=FILES_MAX)]
    deletions: bool = False


class CommandsChange(RequestBody):
    """`allowed`: commands need no approval, and Python may start processes. `changes`: whether
    changes of files need approvals; `ask_outside`: directories of the project in which they do not,
    and `budgets` for single calls. An absent field stays as it is."""

    allowed: bool | None = None
    changes: Literal["ask", "allow"] | None = None
    ask_outside: Annotated[list[Path], Field(max_length=PREFIXES_MAX)] | None = None
    budgets: Annotated[list[BudgetBody], Field(max_length=PREFIXES_MAX)] | None = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if all(value is None for _, value in self):
            raise ValueError("name allowed, changes, ask_outside or budgets")
        return self


class CommandPermission(BaseModel):
    """The approvals that one conversation in a project needs."""

    allowed: bool
    changes: Literal["ask", "allow"]
    ask_outside: list[str]
    budgets: list[ChangeBudget]


class Aborted(BaseModel):
    """`aborted` is false if no run was in progress."""

    aborted: bool


# -- messages --------------------------------------------------------------------------------------


class CalledTool(BaseModel):
    """A call as the model wrote it: `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Picture(BaseModel):
    """Base64."""

    media_type: str
    data: str


class MessageBody(BaseModel):
    """`covers`: a summary stands for all messages up to this one."""

    seq: int
    role: Literal["user", "assistant", "tool", "summary"]
    content: str
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool | None = None
    images: list[Picture] | None = None
    outputs: list[Json] | None = None
    error: Json | None = None
    covers: int | None = None
    created_at: float


class MessageList(BaseModel):
    items: list[MessageBody]
    next_cursor: str | None


# -- approvals -------------------------------------------------------------------------------------


class ApprovalBody(RequestBody):
    """`remember`: allow this exact command from now on, or every one that begins with `prefix`; or
    grant requested access for an `hour` or the `conversation` instead of one run."""

    approved: bool
    remember: Remember | None = None
    prefix: Command | None = None

    @model_validator(mode="after")
    def _has_its_prefix(self) -> Self:
        if self.remember == "prefix" and self.prefix is None:
            raise ValueError("prefix is missing: the first words of the allowed commands")
        return self


class Decided(BaseModel):
    tool_call_id: str
    approved: bool
    by: str
    remembered: Remember | None


class PendingBody(BaseModel):
    """`remember_as`: the values of `remember` with which this caller may approve the call."""

    tool_call_id: str
    tool_name: str
    tool_args: Json
    conversation_id: str
    created_at: float
    expires_at: float
    remember_as: list[Remember] = []
    dry_run: Json | None = None


class Decision(BaseModel):
    """`at` in seconds of the epoch."""

    approved: bool
    by: str
    at: float
    remembered: Remember | None


class ApprovalItem(PendingBody):
    """A call with its decision; null while it waits for one."""

    project_id: str | None
    decision: Decision | None


class PendingList(BaseModel):
    items: list[PendingBody]
    next_cursor: str | None


class RuleBody(BaseModel):
    """A command, or the words that commands begin with, allowed for one conversation or project."""

    id: str
    tool_name: str
    kind: Literal["exact", "prefix"]
    text: str
    by: str
    created_at: float
    conversation_id: str | None = None
    project_id: str | None = None


class RuleList(BaseModel):
    items: list[RuleBody]
    next_cursor: str | None


# -- projects --------------------------------------------------------------------------------------


class NewProject(RequestBody):
    """`working_directory` of the service's host; with the sandbox off, tools act on that host.
    `ask_commands`: each command and each cell needs an approval before it runs."""

    name: Name
    working_directory: Path
    sandbox_enabled: bool = True
    ask_commands: bool = False


class ProjectChange(RequestBody):
    """An absent field stays as it is."""

    name: Name | None = None
    working_directory: Path | None = None
    sandbox_enabled: bool | None = None
    ask_commands: bool | None = None


class ProjectBody(BaseModel):
    """`conversations`: how many it has. `in_use`: whether an agent works in it now."""

    id: str
    name: str
    working_directory: str
    sandbox_enabled: bool
    ask_commands: bool
    created_at: float
    conversations: int
    in_use: bool


class ProjectList(BaseModel):
    items: list[ProjectBody]
    next_cursor: str | None


# -- tools -----------------------------------------------------------------------------------------


class Invocation(RequestBody):
    sandbox_session_id: Name
    conversation_id: Name
    arguments: Json = Field(default_factory=dict)


class Invoked(BaseModel):
    """`result` is the text for a model; a call that failed is a success of this request."""

    tool_call_id: str
    result: str
    is_error: bool
