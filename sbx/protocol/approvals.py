"""A person's yes or no to one tool call, as the agent asks for it, the store keeps it, and clients
see it. Times are seconds of the epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Remember = Literal["exact", "prefix"]
TIMEOUT = "timeout"
ABORT = "abort"
RESTART = "restart"
_WHY = {
    TIMEOUT: "nobody answered within the time for it",
    ABORT: "the run was aborted",
    "nobody": "nobody could be asked",
    RESTART: "the service was restarted while the call waited for an answer",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """`by` is who decided: an owner, an owner and the id of a token, or `timeout`, `abort`,
    `restart`."""

    approved: bool
    by: str
    at: float
    remembered: Remember | None = None

    @property
    def why(self) -> str:
        """A sentence for whoever made the call."""
        if self.approved:
            return f"The call was approved by {self.by}."
        return f"The call was denied: {_WHY.get(self.by, f'{self.by} said no')}. It was not made."


@dataclass(frozen=True, slots=True)
class Approval:
    """One call and what became of it; pending without a `decision`. `seq` is its place in lists.

    `rehearsal` is what the call did on a copy, where it was tried on one.
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
    rehearsal: Mapping[str, Any] | None = None
    decision: Decision | None = None
    seq: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it is listed."""
        told: dict[str, Any] = {
            "tool_call_id": self.tool_call_id,
            "tool_name": self.tool_name,
            "tool_args": dict(self.tool_args),
            "conversation_id": self.conversation_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
        }
        if self.rehearsal is not None:
            told["rehearsal"] = dict(self.rehearsal)
        return told


@dataclass(frozen=True, slots=True)
class Reach:
    """What somebody may see and decide: an owner's, within bounds. None does not bound."""

    owner: str
    user_id: str | None = None
    agent_id: str | None = None
    conversation_id: str | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether this reaches less than all that the owner has: it is that of a token."""
        return self != Reach(self.owner)

    def covers(self, one: Approval) -> bool:
        return self.owner == one.owner and all(
            bound in (None, value)
            for bound, value in (
                (self.user_id, one.user_id),
                (self.agent_id, one.agent_id),
                (self.conversation_id, one.conversation_id),
            )
        )


@dataclass(frozen=True, slots=True)
class Remembered:
    """ "Always allow": calls of one tool whose text is, or begins with, this one. It holds for the
    one of conversation and project that is named. `seq` is its place in lists."""

    id: str
    owner: str
    tool_name: str
    kind: Remember
    text: str
    by: str
    created_at: float
    conversation_id: str | None = None
    project_id: str | None = None
    seq: int = 0

    def to_json(self) -> dict[str, Any]:
        told = {
            "id": self.id,
            "tool_name": self.tool_name,
            "kind": self.kind,
            "text": self.text,
            "by": self.by,
            "created_at": self.created_at,
        }
        where = {"conversation_id": self.conversation_id, "project_id": self.project_id}
        return told | {key: value for key, value in where.items() if value is not None}
