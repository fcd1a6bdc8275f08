"""A user's yes or no to one tool call, as the agent, the store and clients use it.

Times are seconds of the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RuleKind = Literal["exact", "prefix"]
# How long an approval counts: a rule for further calls, or the duration of granted access.
Remember = RuleKind | Literal["hour", "conversation"]
AS_GRANT: tuple[Remember, ...] = ("hour", "conversation")
TIMEOUT = "timeout"
ABORT = "abort"
RESTART = "restart"
_WHY = {
    TIMEOUT: "no answer came within the time limit",
    ABORT: "the run was aborted",
    "nobody": "no user was available to decide",
    RESTART: "the service was restarted while the call waited for an answer",
}


@dataclass(frozen=True, slots=True)
class ApprovalDecision:
    """`by` is the source of the decision.

    It is an owner, an owner and the id of a token, or `timeout`, `abort`, `restart`.
    """

    approved: bool
    by: str
    at: float
    remembered: Remember | None = None

    @property
    def why(self) -> str:
        """Return a sentence for the caller that requested the tool call."""
        if self.approved:
            return f"The call was approved by {self.by}."
        return f"The call was denied: {_WHY.get(self.by, f'{self.by} said no')}. It was not made."


@dataclass(frozen=True, slots=True)
class Approval:
    """One call and its decision; it is pending without a `decision`. `seq` is its position in
    lists.

    `dry_run` is the result of the call on a copy of the files, if it was tried on one.
    `remember_as`: how an approval may count for longer than this call.
    """

    tool_call_id: str
    tool_name: str
    tool_args: Mapping[str, Any]
    owner: str
    conversation_id: str
    run_id: str
    created_at: float
    expires_at: float
    user_id: str | None = None
    agent_id: str | None = None
    project_id: str | None = None
    dry_run: Mapping[str, Any] | None = None
    decision: ApprovalDecision | None = None
    seq: int = 0
    remember_as: tuple[Remember, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the call in a list."""
        data: dict[str, Any] = {
            "tool_call_id": self.tool_call_id,
            "tool_name": self.tool_name,
            "tool_args": dict(self.tool_args),
            "conversation_id": self.conversation_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "remember_as": list(self.remember_as),
        }
        if self.dry_run is not None:
            data["dry_run"] = dict(self.dry_run)
        return data


@dataclass(frozen=True, slots=True)
class ApprovalScope:
    """The approvals that a caller may see and decide: those of an owner, within bounds.

    A bound of None does not restrict.
    """

    owner: str
    user_id: str | None = None
    agent_id: str | None = None
    conversation_id: str | None = None

    @property
    def is_bounded(self) -> bool:
        """Return whether this covers less than everything of the owner, as for a token."""
        return self != ApprovalScope(self.owner)

    def covers(self, approval: Approval) -> bool:
        return self.owner == approval.owner and all(
            bound in (None, value)
            for bound, value in (
                (self.user_id, approval.user_id),
                (self.agent_id, approval.agent_id),
                (self.conversation_id, approval.conversation_id),
            )
        )


@dataclass(frozen=True, slots=True)
class StoredApprovalRule:
    """ "Always allow": calls of one tool whose text equals this one or begins with it.

    It applies to the conversation or the project that is set. `seq` is its position in lists.
    """

    id: str
    owner: str
    tool_name: str
    kind: RuleKind
    text: str
    by: str
    created_at: float
    conversation_id: str | None = None
    project_id: str | None = None
    seq: int = 0

    def to_json(self) -> dict[str, Any]:
        data = {
            "id": self.id,
            "tool_name": self.tool_name,
            "kind": self.kind,
            "text": self.text,
            "by": self.by,
            "created_at": self.created_at,
        }
        where = {"conversation_id": self.conversation_id, "project_id": self.project_id}
        return data | {key: value for key, value in where.items() if value is not None}
