"""The bodies of /api/v1, field by field. Times are seconds of the epoch, durations seconds."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints

from sbx.api.bodies import ConversationBody, RequestBody, RunErrorBody
from sbx.protocol.events import run_to_json
from sbx.protocol.files import Upload
from sbx.protocol.languages import RunLanguage, full_name
from sbx.protocol.runs import Cause, Run, Status
from sbx.service.models import SandboxView
from sbx.service.session_rules import FileRules
from sbx.service.sessions import SessionAsk, SessionStatus, reason_of

Limit = Annotated[int, Field(ge=1, le=200)]
Count = Annotated[int, Field(ge=1, le=1 << 50)]
Name = Annotated[str, StringConstraints(max_length=400)]  # the service checks ids, with 400
Unit = Literal["KB", "MB", "GB"]


# -- sessions --------------------------------------------------------------------------------------


class FileUploadConfig(RequestBody):
    """The limits of uploads, for one file and for one conversation. KB is 1024 bytes."""

    max_file_size: Count | None = None
    max_file_size_unit: Unit = "MB"
    max_file_count: Count | None = None
    allowed_file_types: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=32)]],
            Field(max_length=200),
        ]
        | None
    ) = None


class SessionConfig(RequestBody):
    """Absent fields are as in the settings of the operator; others may only narrow them."""

    session_id: Name | None = None
    policy: Name | None = None
    ttl: Count | None = None
    env: dict[str, str] | None = None
    file_upload_config: FileUploadConfig | None = None


class NewSession(RequestBody):
    user_id: Name
    agent_id: Name
    business_domain_id: Name | None = None
    config: SessionConfig | None = None

    def ask(self) -> SessionAsk:
        config = self.config or SessionConfig()
        files = config.file_upload_config
        return SessionAsk(
            user_id=self.user_id,
            agent_id=self.agent_id,
            business_domain_id=self.business_domain_id,
            session_id=config.session_id,
            policy=config.policy,
            ttl_s=config.ttl,
            env=config.env,
            files=files.model_dump() if files is not None else None,
        )


class AllowedUploads(BaseModel):
    max_file_size: int
    max_file_size_unit: Unit
    max_file_count: int
    allowed_file_types: list[str]


class SessionInfo(BaseModel):
    """`conversations` are ids. `reason`: the cause of the status `error`; `recreated_because`: the
    reason why this session replaced an earlier one of this id; `restored`: it has the files and
    conversations of that one, and begins empty otherwise. `expires_at` moves with each use."""

    policy: str
    expires_at: float | None
    conversations: list[str]
    file_upload_config: AllowedUploads
    reason: str | None = None
    recreated_because: str | None = None
    restored: bool = False


class SessionBody(BaseModel):
    session_id: str
    status: SessionStatus
    created_at: int
    ttl: int | None
    info: SessionInfo


class SessionList(BaseModel):
    items: list[SessionBody]
    next_cursor: str | None


class SessionExtension(RequestBody):
    extend_by: Annotated[int, Field(ge=-(1 << 50), le=1 << 50)]


def shown(
    view: SandboxView, status: SessionStatus, rules: FileRules, conversations: list[str]
) -> SessionBody:
    """Return the body of a session."""
    assert view.session_id is not None
    return SessionBody(
        session_id=view.session_id,
        status=status,
        created_at=int(view.created_at),
        ttl=round(view.ttl_s) if view.ttl_s is not None else None,
        info=SessionInfo(
            policy=view.policy_name,
            expires_at=view.expires_at,
            conversations=conversations,
            file_upload_config=AllowedUploads(**rules.to_json()),
            reason=reason_of(view),
            recreated_because=view.recreated_because,
            restored=view.restored,
        ),
    )


# -- files -----------------------------------------------------------------------------------------


class SessionUploadList(BaseModel):
    files: list[str]
    items: list[Upload]


# -- conversations ---------------------------------------------------------------------------------


class ConversationList(BaseModel):
    items: list[ConversationBody]


class Prompt(BaseModel):
    prompt: str


# -- execution -------------------------------------------------------------------------------------


class Execution(RequestBody):
    """`timeout` in seconds; the default is the policy's run_timeout, the maximum its wall_time."""

    conversation_id: Name
    code: str
    language: Annotated[RunLanguage, BeforeValidator(full_name)] = "python"
    timeout: Annotated[float, Field(ge=1)] | None = None
    stream: bool = False


class SessionRunBody(BaseModel):
    run_id: str
    status: Status
    cause: Cause | None
    stdout: str
    stderr: str
    result: str | None
    outputs: list[dict[str, Any]]
    error: RunErrorBody | None
    execution_count: int | None
    duration_ms: int
    state_lost: bool
    recorded: bool = True


class Interruption(RequestBody):
    conversation_id: Name


_NOT_OF_RUN = {"duration_ms", "recorded"}
_OF_RUN = tuple(name for name in SessionRunBody.model_fields if name not in _NOT_OF_RUN)


def run_body(run: Run) -> dict[str, Any]:
    """Return the fields of SessionRunBody. Without validation, because this path is hot."""
    result = run_to_json(run, encoded=True)
    return {**{name: result[name] for name in _OF_RUN}, "duration_ms": round(run.duration_s * 1000)}
