"""Access that a person grants to one conversation, as the runtime, agents and clients use it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

GrantDuration = Literal["once", "hour", "conversation"]
GRANT_DURATIONS: tuple[GrantDuration, ...] = get_args(GrantDuration)  # the shortest first
AccessKind = Literal["network", "secret", "directory", "run_time", "memory", "package"]
ACCESS_KINDS: tuple[AccessKind, ...] = get_args(AccessKind)


@dataclass(frozen=True, slots=True)
class Access:
    """`target` is `host:port` for `network`, a name for `secret`, an absolute path of the host for
    `directory`, seconds for `run_time`, MiB for `memory`, and the canonical name for `package`
    (packaging.python.org, "Names and normalization")."""

    kind: AccessKind
    target: str

    def __str__(self) -> str:
        match self.kind:
            case "network":
                return f"connections to {self.target}"
            case "secret":
                return f"use of the secret {self.target}"
            case "directory":
                return f"reading the directory {self.target}"
            case "run_time":
                return f"runs of up to {self.target} s"
            case "memory":
                return f"memory of up to {self.target} MiB"
            case "package":
                return f"installation of the package {self.target}"


@dataclass(frozen=True, slots=True)
class Grant:
    """`by` is the person who granted it. Times are seconds of the epoch. `expires_at` is None for
    a grant that lasts as long as its conversation; a grant for one run ends with this run, and at
    `expires_at` at the latest. `inside` is the path at which code sees a granted directory."""

    id: str
    kind: AccessKind
    target: str
    duration: GrantDuration
    by: str
    granted_at: float
    expires_at: float | None
    inside: str | None = None

    @property
    def access(self) -> Access:
        return Access(self.kind, self.target)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
