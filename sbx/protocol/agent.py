"""The events of an agent's run, on the wire and in the loop: `run_start` first, `run_end` last.

On the wire each event also has `seq`, which increases by one, `run_id` and `conversation_id`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sbx.protocol.approvals import Remember

Reason = Literal["done", "max_steps", "aborted", "budget", "error"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AgentRunStart:
    model: str
    max_steps: int
    sandboxed: bool = True  # False: its tools act on the host itself
    type: Literal["run_start"] = field(default="run_start", init=False)


@dataclass(frozen=True, slots=True)
class AgentTextDelta:
    text: str
    type: Literal["text_delta"] = field(default="text_delta", init=False)


@dataclass(frozen=True, slots=True)
class ToolStart:
    """`approval_required` is None if the call is tried on a copy first: a `tool_pending` follows if
    its effect needs an approval. `expires_at` (seconds of the epoch) and `remember_as` are set if
    the call itself needs an approval; see ToolPending."""

    tool_call_id: str
    tool_name: str
    tool_args: Mapping[str, Any]
    approval_required: bool | None = False
    expires_at: float | None = None
    sandboxed: bool = True
    remember_as: tuple[Remember, ...] = ()
    type: Literal["tool_start"] = field(default="tool_start", init=False)


@dataclass(frozen=True, slots=True)
class ToolPending:
    """A call that was tried on a copy waits for an approval until `expires_at`. No file is changed
    yet. `dry_run` is the result of the trial: status, exit_code, output, changes; None if there was
    no copy to try it on. `remember_as`: how an approval may count for longer than this call."""

    tool_call_id: str
    tool_name: str
    tool_args: Mapping[str, Any]
    expires_at: float
    dry_run: Json | None = None
    remember_as: tuple[Remember, ...] = ()
    type: Literal["tool_pending"] = field(default="tool_pending", init=False)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    tool_call_id: str
    stream: Literal["stdout", "stderr"]
    text: str
    type: Literal["tool_output"] = field(default="tool_output", init=False)


@dataclass(frozen=True, slots=True)
class ToolApproval:
    """`by` is the source of the decision: an owner, or `timeout`, `abort`, `restart`.

    `remembered` is `exact` or `prefix` for a rule, `hour` or `conversation` for granted access, or
    None.
    """

    tool_call_id: str
    approved: bool
    by: str
    remembered: Remember | None = None
    type: Literal["tool_approval"] = field(default="tool_approval", init=False)


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """`outputs`: bundles by media type; an image is the file that keeps it, and a last
    `{"truncated": true}` stands for the rest. `error` has the shape of every report. `cached`: it
    is the result of an earlier call."""

    tool_call_id: str
    result: str
    is_error: bool
    duration_ms: float
    outputs: tuple[Json, ...] = ()
    error: Json | None = None
    cached: bool = False
    type: Literal["tool_end"] = field(default="tool_end", init=False)


@dataclass(frozen=True, slots=True)
class StepEnd:
    step: int
    usage: Mapping[str, int]
    type: Literal["step_end"] = field(default="step_end", init=False)


@dataclass(frozen=True, slots=True)
class AgentRunEnd:
    """`error` has the shape of every error report: code, message, hint?, details?."""

    reason: Reason
    content: str
    usage: Mapping[str, int]
    error: Json | None = None
    type: Literal["run_end"] = field(default="run_end", init=False)


AgentEvent = (
    AgentRunStart
    | AgentTextDelta
    | ToolStart
    | ToolPending
    | ToolOutput
    | ToolApproval
    | ToolEnd
    | StepEnd
    | AgentRunEnd
)
_KINDS: dict[str, type] = {
    "run_start": AgentRunStart,
    "text_delta": AgentTextDelta,
    "tool_start": ToolStart,
    "tool_pending": ToolPending,
    "tool_output": ToolOutput,
    "tool_approval": ToolApproval,
    "tool_end": ToolEnd,
    "step_end": StepEnd,
    "run_end": AgentRunEnd,
}


def question_of(event: AgentEvent) -> ToolPending | None:
    """Return the question to the user in an event, before or after a trial; None without one."""
    match event:
        case ToolPending():
            return event
        case ToolStart(approval_required=True):
            return ToolPending(
                event.tool_call_id,
                event.tool_name,
                event.tool_args,
                event.expires_at or 0.0,
                remember_as=event.remember_as,
            )
    return None


def to_json(event: AgentEvent) -> Json:
    data = asdict(event)
    for key, absent in (("expires_at", None), ("dry_run", None), ("remember_as", ())):
        if key in data and data[key] == absent:
            del data[key]
    return {"type": event.type, **{key: value for key, value in data.items() if key != "type"}}


def from_json(data: Mapping[str, Any]) -> AgentEvent:
    """Return the event. Ignore fields that it does not have (seq, ids). Raise ValueError."""
    kind = _KINDS.get(str(data.get("type")))
    if kind is None:
        raise ValueError(f"unknown type of an agent's event: {str(data.get('type'))[:80]!r}")
    names = {name for name in kind.__dataclass_fields__ if name != "type"}  # type: ignore[attr-defined]
    try:
        event: AgentEvent = kind(**{key: data[key] for key in names & data.keys()})
    except TypeError as error:
        raise ValueError(
            f"an event {data.get('type')} has a missing or invalid field: {error}"
        ) from None
    return event
